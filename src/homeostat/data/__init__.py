"""Rows to step plans: sources -> chat, rows -> prepare, store -> packing, loader."""
