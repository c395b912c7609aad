"""Rules of the family install."""
