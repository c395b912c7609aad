"""Rules of the family agents."""
