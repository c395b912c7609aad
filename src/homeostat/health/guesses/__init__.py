"""Guess what no rule recognises, from known errors and from lists of accepted names."""
