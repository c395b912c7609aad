"""Rules of the family memory."""
