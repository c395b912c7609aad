"""Name the measurement or switch that distinguishes two illnesses with the same signs.

The pairs share a finding in the clinic's rounds (bench/differential), or are causes that one rule
lists. Keys in the texts are ours; a framework's table translates them.
"""
# ruff: noqa: E501 (a table)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

_LOWER_RATE = "repeat the run with trainer.lr at a tenth and nothing else changed"
_OLD_WEIGHTS = "compare the engine's log-probs of one fixed text before and after a publication"
_FRESH = "set sync.interval to 1 and rollout.max_staleness to 0, and change nothing else"
_BATCH = "go back to a checkpoint before the jump and continue without the batch of that step"


@dataclass(frozen=True, slots=True)
class Decider:
    """Two illnesses, what to measure or change, and what the result means."""

    one: str
    other: str
    how: str

    @property
    def pair(self) -> frozenset[str]:
        return frozenset({self.one, self.other})


DECIDERS: tuple[Decider, ...] = (
    Decider("truncation-at-cap", "no-eos",
            "double rollout.max_new_tokens: if the cut share falls, answers were too long for the "
            "limit; if it stays, the end token is never produced or not recognised"),
    Decider("task-too-hard", "verifier-format-mismatch",
            "score the reference answers with the reward function: if they earn nothing either, "
            "the function does not read the format; if they earn the most, the task is too hard"),
    Decider("task-too-hard", "truncation-at-cap",
            "double rollout.max_new_tokens: if rewards appear, the answers were cut before they "
            "ended; if they stay at 0, the task is too hard"),
    Decider("truncation-at-cap", "verifier-format-mismatch",
            "score the reference answers with the reward function: if they earn nothing, the "
            "function does not read the format, whatever the length; if they earn the most, the "
            "answers are cut before the part that is read"),
    Decider("task-too-hard", "reward-too-noisy",
            "score the same completions twice: if the rewards differ, the reward is noise; if they "
            "are the same, the task is too hard"),
    Decider("lr-too-high", "policy-collapse",
            f"{_LOWER_RATE}: if the reward stays up, the learning rate was too high; if it "
            "falls later by as much, check what the reward function pays for when it falls"),
    Decider("lr-too-high", "kl-runaway",
            f"{_LOWER_RATE}, and compare the KL of both runs where they have the same reward: if it is "
            "smaller, the learning rate was too high; if it is the same, the reward pulls the policy "
            "away and needs a stronger KL penalty"),
    Decider("lr-too-high", "no-eos",
            "check whether completions/clipped_ratio rises before the reward falls: if it does, the "
            "answers stopped ending first, and the learning rate is not the cause; if the reward "
            "falls first, it is"),
    Decider("lr-too-high", "entropy-explosion",
            "set algorithm.entropy_bonus to 0 and change nothing else: if the entropy still "
            "grows, the learning rate is too high; if not, the bonus was too strong"),
    Decider("lr-too-high", "too-many-updates-per-rollout",
            "set trainer.updates_per_step to 1 and change nothing else: if ratios stay near 1, the "
            "number of updates was the cause; if not, the learning rate is"),
    Decider("lr-too-high", "bad-batch",
            f"{_BATCH}: if the run stays healthy, that batch was the cause; if it jumps elsewhere, the "
            "learning rate is"),
    Decider("lr-too-high", "nan-update-poisoned-weights",
            "look at grad_norm in the steps before the first NaN: if it grew over several steps, the "
            "learning rate is too high; if it was ordinary until one step, that update poisoned "
            "the weights"),
    Decider("lr-too-high", "stale-policy",
            f"{_FRESH}: if the reward stays up, the samples were too old; if not, the learning rate is "
            "too high"),
    Decider("policy-collapse", "no-eos",
            "read completions from before the fall: if they run on without an end token while their "
            "beginning is still sensible, the end token is the cause"),
    Decider("policy-collapse", "stale-policy",
            f"{_FRESH}: if the reward stays up, the samples were too old; if it falls all the same, "
            "their age is not the cause"),
    Decider("trained-weights-unmoved", "update-below-resolution",
            "keep fp32 master weights, or multiply trainer.lr by 100 for a few steps: if weights "
            "move then, the updates were below the resolution of their dtype; if not, no gradient "
            "reaches them"),
    Decider("overfitting", "duplicate-rows",
            "remove repeated rows and train again: if the validation loss no longer rises, the "
            "copies were the cause; if it rises after the same number of passes, it is overfitting"),
    Decider("overfitting", "data-repeated",
            "train for one epoch: if the validation loss does not rise within it, the repetition was "
            "the cause"),
    Decider("engine-weights-differ", "engine-logprob-mismatch",
            "set sync.verify to true: a checksum that differs shows that the engine has other "
            "weights; if they are equal, the arithmetic or the sampling settings differ"),
    Decider("engine-weights-differ", "weights-not-updated",
            f"{_OLD_WEIGHTS}: if they do not change at all, nothing arrives; if they change to other "
            "values than the trainer's, what arrives is wrong"),
    Decider("engine-weights-differ", "first-ratio-off",
            "set sync.verify to true: if checksums are equal, the trainer is the cause: its old "
            "log-probs do not belong to the weights that it updates"),
    Decider("weights-not-updated", "moe-routing-mismatch",
            f"{_OLD_WEIGHTS}: if they change with every publication, weights arrive, and the "
            "routing differs; if they stay the same, nothing arrives"),
    Decider("engine-logprob-mismatch", "moe-routing-mismatch",
            "set model.moe.router_replay to ids: if the difference disappears, the routing was the cause; if "
            "it stays, the arithmetic or the sampling settings differ"),
    Decider("lora-not-synced", "sleep-wake-weights-lost",
            "run some steps without sleep between them: if log-probs agree then, sleeping loses the "
            "weights; if not, the adapter never arrives"),
    Decider("zero-std-groups", "reward-constant",
            "compare the rewards of different prompts: if they differ from prompt to prompt, only "
            "the groups are alike; if all are the same, the reward function is constant"),
    Decider("reward-fn-failing", "dataset-column-missing",
            "call the reward function by hand on one row with all its columns: if it answers, the "
            "trainer does not pass a column on; if it raises, its own code fails"),
    Decider("reward-fn-failing", "reward-timeout",
            "call the reward function on the longest completion and measure the time: if it needs longer "
            "than rewards.timeout_s, it is too slow; if it raises, it fails"),
    Decider("greedy-sampling", "mode-collapse",
            "sample a prompt several times at temperature 1 from the first and from the last "
            "checkpoint: if answers of the last one still differ from each other, only the sampling "
            "was greedy; if only those of the first one do, the policy collapsed"),
    Decider("greedy-sampling", "entropy-collapse",
            "sample a prompt several times at temperature 1 from the last checkpoint: if the answers "
            "differ, only the sampling was greedy; if they are alike, the entropy collapsed"),
    Decider("mode-collapse", "entropy-collapse",
            "read several answers to one prompt: if they are word for word the same and earn "
            "little, the mode collapsed; if they differ in wording, only the entropy is low"),
    Decider("gpu-already-occupied", "kv-cache-no-room",
            "run nvidia-smi before the start: memory in use then belongs to another process; if "
            "none is in use, the engine's own share is too small"),
    Decider("library-version-mismatch", "package-missing",
            "import the named module in the same environment: if it is not found at all, the package "
            "is missing; if only a name in it is missing, the version is the wrong one"),
    Decider("nan-loss", "nan-update-poisoned-weights",
            "check the weights of the last checkpoint before the first NaN: if all are finite, the loss "
            "is not finite on that batch; if some are not, an earlier update poisoned them"),
)  # fmt: skip
_BY_PAIR = {decider.pair: decider for decider in DECIDERS}
assert len(_BY_PAIR) == len(DECIDERS), "a pair is there twice"


def deciders(names: Iterable[str]) -> Iterator[Decider]:
    """Yield how to distinguish each two of the illnesses, pairs of the first names first."""
    for pair in combinations(dict.fromkeys(names), 2):
        found = _BY_PAIR.get(frozenset(pair))
        if found is not None:
            yield found
