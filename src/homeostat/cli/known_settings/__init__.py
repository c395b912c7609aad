"""The lists of known settings, compared with the sources of their frameworks."""
