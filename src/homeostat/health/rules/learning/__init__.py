"""Rules of the family learning."""
