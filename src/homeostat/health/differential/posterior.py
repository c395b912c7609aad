"""Compute how likely each illness is, by Bayes' rule over all signs that were judged.

For a form k of an illness, with p(s|k) from the table:

    log P(k) = log prior + sharpness * [ sum over present signs  log p(s|k)
                                       + sum over absent signs   log (1 - p(s|k))
                                       + lead * log p(s leads|k) ] + constant

One more form stands for illnesses that are not in the table: it shows every sign as often as the
others do on average. The formula treats signs as independent given the illness, although they are
not. `sharpness` corrects for that; it is fitted on other runs than the counts.
"""

from __future__ import annotations

import math

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.differential.illnesses import OTHER, Table
from homeostat.health.differential.signs import Signs


def forms_posterior(signs: Signs, table: Table) -> FloatArray64:
    """Return the probability of each form in the table's order; the last one is OTHER."""
    weights, num = table.weights, len(table.forms)
    prior = np.full(num + 1, math.log((1.0 - weights.other) / num))
    prior[-1] = math.log(weights.other)
    scores = prior + weights.sharpness * _evidence(signs, table)
    shares = np.exp(scores - scores.max())
    return np.asarray(shares / shares.sum(), dtype=np.float64)


def illness_posterior(signs: Signs, table: Table) -> dict[str, float]:
    """Return illness -> probability, the most likely first; OTHER is one of them."""
    shares = forms_posterior(signs, table)
    found = {OTHER: float(shares[-1])}
    for form, share in zip(table.forms.values(), shares, strict=False):
        found[form.illness] = found.get(form.illness, 0.0) + float(share)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def is_covered(signs: Signs, table: Table) -> bool:
    """Return whether any sign is present, and the table knows all that are."""
    return bool(signs.present) and signs.present <= table.signs.keys()


def _evidence(signs: Signs, table: Table) -> FloatArray64:
    """Return the log-likelihood of the signs under each form."""
    judged = [sign for sign in table.signs if sign in signs.judged]
    is_present = np.array([sign in signs.present for sign in judged], dtype=bool)
    shares = table.shares[:, [table.signs[sign] for sign in judged]]
    found = np.where(is_present, np.log(shares), np.log1p(-shares)).sum(axis=1)
    if signs.lead in table.signs:
        found = found + table.weights.lead * np.log(table.lead_shares[:, table.signs[signs.lead]])
    return np.asarray(found, dtype=np.float64)
