"""Rules of the family distributed."""
