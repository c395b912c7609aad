"""Formats of a diagnosis for programs and issue trackers; people's page is render_text.py."""
