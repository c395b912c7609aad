"""Everything that a run shows and writes: metrics, events, logs, views, the report. Torch-free."""
