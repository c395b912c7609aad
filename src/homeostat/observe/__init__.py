"""What a run shows and leaves behind: metrics, events, logs, views, the report. Torch-free."""
