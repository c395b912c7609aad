"""Vital signs as findings: how a run ended, and what of it is not finite, zero or frozen."""
