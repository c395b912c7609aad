"""Rules of the family config."""
