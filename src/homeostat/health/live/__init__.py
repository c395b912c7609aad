"""Evaluate rules while a run is running."""
