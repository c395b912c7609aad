"""Statistics of a metric over its steps: medians, noise, windows."""
