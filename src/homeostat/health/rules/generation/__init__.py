"""Rules of the family generation."""
