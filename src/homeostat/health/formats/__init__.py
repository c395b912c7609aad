"""Formats of a diagnosis: as_text.py is the page for people, the others are for programs."""
