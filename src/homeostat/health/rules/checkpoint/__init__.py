"""Rules of the family checkpoint."""
