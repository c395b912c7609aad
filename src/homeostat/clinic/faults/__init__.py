"""The faults, one file per part of a run that they befall. Each lists its own in FAULTS."""
