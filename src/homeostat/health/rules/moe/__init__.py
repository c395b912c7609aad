"""Rules of the family moe."""
