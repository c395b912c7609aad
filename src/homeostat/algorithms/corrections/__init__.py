"""Corrections for tokens that were sampled from another policy than the one that is trained.

    log w_m = old_logp_m - engine_logp_m        old: the trainer, at the beginning of the step

w differs from 1 if engine and trainer round differently, or if the engine's weights are older.
There is one file per kind of correction, all pure functions on tensors; `correct` combines them:

    factor_m = weight_m / weight_mean * 1[not rejected] * 1[not vetoed] * 1[not off-policy]

`factor` multiplies the surrogate and carries no gradient. A NaN among the log-probs makes it NaN.
"""
