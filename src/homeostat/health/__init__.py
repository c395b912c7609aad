"""The doctor: rules that judge runs, ours and others', before, during, after. Torch-free."""
