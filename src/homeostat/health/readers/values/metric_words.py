"""Understand the name of a metric by its words, so that it need not be in a table.

    smoothed train CE -> train/loss      Dev NLL/token -> eval/loss      val.ppl -> eval/perplexity
    mean_ep_return -> reward             total grad norm (L2) -> grad_norm

A name is understood only if every word of it is: one that names the quantity, one that says on
which rows it was measured, and words that do not change what it is ("mean", "per", "token").
"value_loss" and "reward_std" are other quantities, so they stay unknown.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_WORD = re.compile(r"[a-z]+|\d+")
_MAX_CHARS, _MAX_WORDS = 80, 8

_TRAINED = frozenset({"train", "training", "trn", "tr", "trainer"})
_HELD_OUT = frozenset(
    {"val", "valid", "validation", "validate", "eval", "evaluation", "dev", "development",
     "heldout", "holdout", "va", "vl"}
)  # fmt: skip
_TESTED = frozenset({"test", "testing", "tst"})
_PARTS = _TRAINED | _HELD_OUT | _TESTED
_ANY = frozenset(
    {"avg", "average", "averaged", "ave", "avr", "mean", "running", "smoothed", "smooth", "ema",
     "moving", "epoch", "iter", "iteration", "step", "batch", "global", "current", "cur", "curr",
     "per", "overall", "history", "log", "logs", "metric", "metrics", "scalar", "scalars", "set",
     "is", "the", "of", "on", "data", "dataset"}
)  # fmt: skip

# Words of a quantity, and words that may stand beside them without making it another one.
_QUANTITIES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "loss": (
        frozenset({"loss", "losses", "nll", "nllloss", "xent", "ce", "crossentropy", "bpb", "bpc"}),
        frozenset(
            {"lm", "mlm", "clm", "model", "language", "modeling", "token", "tokens", "total",
             "reduced", "sft", "pretrain", "pretraining", "finetune", "finetuning", "causal",
             "main", "full", "negative", "likelihood", "seq", "sequence", "text", "next",
             "prediction", "objective", "word", "char", "byte", "sentence", "example"}
        ),
    ),
    "perplexity": (
        frozenset({"ppl", "perplexity", "pplx"}),
        frozenset({"lm", "model", "token", "word", "language", "total"}),
    ),
    "reward": (
        frozenset({"reward", "rewards", "rew", "return", "returns", "ret"}),
        frozenset(
            {"episode", "episodes", "episodic", "ep", "rollout", "rollouts", "total", "cumulative",
             "accumulated", "sample", "samples"}
        ),
    ),
    "accuracy": (
        frozenset({"acc", "accuracy"}),
        frozenset({"token", "tokens", "top", "1", "score"}),
    ),
    "critic": (frozenset({"criticloss"}), frozenset({"ppo"})),
    "kl": (
        frozenset({"kl", "kld", "kldiv"}),
        frozenset({"div", "divergence", "policy", "ref", "reference", "to", "from", "token"}),
    ),
    "entropy": (
        frozenset({"entropy"}),
        frozenset({"policy", "actor", "token", "tokens", "action"}),
    ),
    "learning_rate": (
        frozenset({"lr"}),
        frozenset({"actor", "policy", "group", "param", "optimizer", "base", "model", "0"}),
    ),
    "grad_norm": (
        frozenset({"gnorm", "gradnorm"}),
        frozenset({"total", "l", "2", "actor", "policy", "model", "all"}),
    ),
}  # fmt: skip
# Several words that name a quantity only together.
_TOGETHER: tuple[tuple[frozenset[str], frozenset[str], str], ...] = (
    (frozenset({"grad", "grads", "gradient", "gradients"}), frozenset({"norm", "norms"}), "gnorm"),
    (frozenset({"learning"}), frozenset({"rate"}), "lr"),
    (frozenset({"cross"}), frozenset({"entropy"}), "ce"),
    (frozenset({"critic", "value", "vf", "v", "baseline"}), frozenset({"loss"}), "criticloss"),
    (frozenset({"held"}), frozenset({"out"}), "heldout"),
    (frozenset({"bits"}), frozenset({"byte", "char", "character"}), "bpb"),
)
# The words by which quantities are mostly called.
_PLAIN = frozenset(
    {"acc", "accuracy", "criticloss", "loss", "losses", "ppl", "perplexity", "reward", "rewards",
     "entropy", "kl", "lr", "gnorm"}
)  # fmt: skip
_NAMES = {
    ("loss", True): "train/loss",
    ("loss", False): "eval/loss",
    ("perplexity", True): "train/perplexity",
    ("perplexity", False): "eval/perplexity",
    ("reward", True): "reward",
    ("reward", False): "eval/reward",
    ("accuracy", True): "train/accuracy",
    ("accuracy", False): "eval/score/accuracy",
    ("critic", True): "critic/loss",
    ("kl", True): "kl",
    ("entropy", True): "entropy",
    ("learning_rate", True): "learning_rate",
    ("grad_norm", True): "grad_norm",
}


class Meaning(NamedTuple):
    """Our name of a metric, and how sure that is: of two metrics of one name the lower rank counts.

    0: plain words ("mean train loss"); 1: words for a variant ("total_loss", "ce"); 2: measured on
    test rows, which count only if there are no validation rows.
    """

    name: str
    rank: int


@lru_cache(maxsize=4096)
def meaning_of(name: str) -> Meaning | None:
    """Return what a name says by its words; None if one of them is not understood."""
    words = _words(name)
    if not words or len(words) > _MAX_WORDS:
        return None
    named = {quantity for quantity, (own, _) in _QUANTITIES.items() if own & set(words)}
    if len(named) != 1:
        return None
    quantity = named.pop()
    own, beside = _QUANTITIES[quantity]
    where = [word for word in words if word not in own | beside | _ANY]
    is_test = any(word in _TESTED for word in where)
    is_held_out = is_test or any(word in _HELD_OUT for word in where)
    is_trained = any(word in _TRAINED for word in where)
    if (is_held_out and is_trained) or set(where) - _PARTS:
        return None
    found = _NAMES.get((quantity, not is_held_out))
    is_variant = any(word in beside for word in words) or bool(own & set(words) - _PLAIN)
    return Meaning(found, 2 if is_test else int(is_variant)) if found else None


def is_of_one_part(name: str) -> bool:
    """Return whether a metric's name says on which rows it was measured."""
    return meaning_of(name) is not None and not _PARTS.isdisjoint(_words(name))


def loss_of_rows(word: str) -> str | None:
    """Return the loss that a bare "train" or "val" may stand for, as in "train 2.1 val 2.3"."""
    low = word.lower().strip(".:")
    return "train_loss" if low in _TRAINED else "val_loss" if low in _HELD_OUT | _TESTED else None


def _words(name: str) -> list[str]:
    if len(name) > _MAX_CHARS or not name.isascii():
        return []
    text = name if name.islower() or name.isupper() else _HUMP.sub("_", name)
    words = _WORD.findall(text.lower())
    for first, second, one in _TOGETHER:
        at = [place for place, word in enumerate(words) if word in first]
        end = [place for place, word in enumerate(words) if word in second]
        if at and end:
            words[at[0]] = one
            del words[end[0]]
    return words
