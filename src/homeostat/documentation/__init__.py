"""The documentation as a site that is read offline."""
