"""Turn rows into step plans: sources -> chat, rows -> prepare, store -> packing, loader."""
