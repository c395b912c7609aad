"""Fault injection: real runs made ill on purpose, to see whether the doctor notices."""
