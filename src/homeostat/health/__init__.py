"""The doctor: rules that judge runs of any framework, before, during and after. Torch-free."""
