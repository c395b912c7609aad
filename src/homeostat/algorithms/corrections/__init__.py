"""Corrections for tokens that were sampled under another policy than the one that is trained.

    log w_m = old_logp_m - engine_logp_m        old: the trainer, at the beginning of the step

w is not 1 where engine and trainer round differently, and where the engine's weights are older. One
file per kind, all pure functions on tensors; `correct` puts them together:

    factor_m = weight_m / weight_mean * 1[not rejected] * 1[not vetoed] * 1[not off-policy]

`factor` multiplies the surrogate and carries no gradient. A NaN among the log-probs makes it NaN.
"""
