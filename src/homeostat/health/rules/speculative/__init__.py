"""Rules of the family speculative."""
