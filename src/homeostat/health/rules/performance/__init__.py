"""Rules of the family performance."""
