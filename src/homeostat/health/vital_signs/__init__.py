"""The vital signs of a run: its end, metrics that are not alive, and whether it progresses."""
