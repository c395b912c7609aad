"""Rules of the family policy."""
