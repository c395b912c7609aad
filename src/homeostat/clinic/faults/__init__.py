"""The faults, one file per part of a run that they alter. Each file lists its own in FAULTS."""
