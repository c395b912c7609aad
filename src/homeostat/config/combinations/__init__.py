"""Find settings that are valid alone but cannot work together. Start with check.py."""
