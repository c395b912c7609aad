"""Turn a recipe into a validated RunConfig, and change or describe it: YAML, presets, overrides."""
