"""Cases of the keys of energy-based fine-tuning.

Structured ones are judged on the same saved rollouts; strided ones sample a separate step.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.support.every_key.rl_workshop import SAVED, only, samples
from tests.support.every_key.workshop import Case, Run, Workshop, weight_bytes

from homeostat.errors import ConfigError

EBFT = ("algorithm={type: ebft}", "rewards=null", "ebft={whitening: false}")
STRIDED = (
    *EBFT,
    "data.train=[{type: text, path: texts.jsonl}]",
    "data.max_length=40",
    "data.shuffle=false",
    "rollout={prompts_per_step: 2, samples_per_prompt: 3}",
)
SHAPE = {"stride": 6, "context_length": 5, "generate_length": 4}


def learned(workshop: Workshop, *changes: str) -> Run:
    return workshop.run(*SAVED, *EBFT, *changes)


def strided(workshop: Workshop, **changes: int) -> Run:
    shape = ", ".join(f"{name}: {value}" for name, value in {**SHAPE, **changes}.items())
    return workshop.run(*STRIDED, f"ebft={{mode: strided, {shape}}}")


def a_mode_says_what_is_sampled(workshop: Workshop) -> None:
    answers, blocks = samples(learned(workshop)), samples(strided(workshop))
    assert len(set(answers.group_S)) == 4
    assert set(blocks.length_S) == {SHAPE["generate_length"]}
    with pytest.raises(ConfigError, match="continues raw text"):
        learned(workshop, "ebft.mode=strided")


def anchors_of(run: Run) -> list[int]:
    """Lengths of the prompts of the first text, in tokens: a character is one."""
    prompts = list(dict.fromkeys(samples(run).prompts))
    return [len(prompt) for prompt in prompts if prompts[-1][:4] != prompt[:4]]


def a_text_is_continued(workshop: Workshop, *, key: str, value: int) -> None:
    for changes in ({}, {key: value}):
        shape = {**SHAPE, **changes}
        run = strided(workshop, **changes)
        first, last = shape["context_length"], 31 - shape["generate_length"]
        # The text's 30 characters, and the token that ends it.
        assert anchors_of(run) == list(range(first, last + 1, shape["stride"]))
        assert only("completions/mean_length", run) == shape["generate_length"]


def a_column_holds_the_truth(workshop: Workshop) -> None:
    answer = learned(workshop)
    first = learned(workshop, "ebft.reference_column=first")
    assert only("ebft/cfm_loss", answer) != only("ebft/cfm_loss", first)
    assert only("ebft/diversity", answer) == only("ebft/diversity", first)


def layers_are_compared(workshop: Workshop) -> None:
    found = [
        only("ebft/alignment", learned(workshop, f"ebft.feature_layers={depths}"))
        for depths in ("[0.5]", "[1.0]", "[0.5, 1.0]")
    ]
    assert found[2] == pytest.approx((found[0] + found[1]) / 2, rel=1e-5)
    assert found[0] != pytest.approx(found[1], rel=1e-3)


def states_are_pooled(workshop: Workshop) -> None:
    kinds = ("last_token", "completion_mean", "mean_pooling")
    found = [only("ebft/cfm_loss", learned(workshop, f"ebft.embed_method={k}")) for k in kinds]
    assert len({round(value, 4) for value in found}) == 3
    with pytest.raises(ConfigError, match="differ in length"):
        learned(workshop, "ebft.embed_method=concat")
    shape = ", ".join(f"{name}: {value}" for name, value in SHAPE.items())
    side_by_side = f"ebft={{mode: strided, embed_method: concat, {shape}}}"
    assert only("ebft/cfm_loss", workshop.run(*STRIDED, side_by_side)) != only(
        "ebft/cfm_loss", strided(workshop)
    )


def features_are_whitened(workshop: Workshop) -> None:
    plain, white = learned(workshop), learned(workshop, "ebft.whitening=true")
    # Samples that differ are orthogonal; the distance is measured before.
    assert only("ebft/diversity", white) < only("ebft/diversity", plain) / 4
    assert only("ebft/cfm_loss", white) == only("ebft/cfm_loss", plain)


def a_term_is_weighted(workshop: Workshop, *, key: str, sign: float) -> None:
    runs = [learned(workshop, f"ebft.{key}_coefficient={value}") for value in (1.0, 3.0)]
    term = only(f"ebft/{key}", runs[0])
    assert term == only(f"ebft/{key}", runs[1])
    more = only("rewards/energy/mean", runs[1]) - only("rewards/energy/mean", runs[0])
    assert more == pytest.approx(sign * 2 * term, rel=1e-5)


def advantages_are_estimated(workshop: Workshop) -> None:
    rloo, norm, plain = (
        samples(learned(workshop, f"ebft.advantage_estimator={name}"))
        for name in ("rloo", "group_norm", "reinforce")
    )
    assert plain.advantage_S == pytest.approx(plain.reward_S)
    groups = [rloo.group_S == group for group in np.unique(rloo.group_S)]
    for own_S in groups:
        deviation = rloo.reward_S[own_S].std(ddof=1) + 1e-4
        want = rloo.advantage_S[own_S] / deviation
        assert norm.advantage_S[own_S] == pytest.approx(want, rel=1e-5)


def the_policy_loss_is_weighted(workshop: Workshop) -> None:
    one, half = (learned(workshop, f"ebft.rl_coefficient={value}") for value in (1.0, 0.5))
    assert only("grad_norm", half) == pytest.approx(only("grad_norm", one) / 2, rel=1e-5)


def the_truth_is_imitated(workshop: Workshop) -> None:
    plain = learned(workshop)
    runs = {value: learned(workshop, f"ebft.ce_coefficient={value}") for value in (0.5, 1.0)}
    for value, run in runs.items():
        want = only("train/loss", plain) + value * only("ebft/ce_loss", run)
        assert only("train/loss", run) == pytest.approx(want, rel=1e-5)
    assert only("ebft/ce_loss", runs[0.5]) == only("ebft/ce_loss", runs[1.0]) > 1
    assert weight_bytes(plain) != weight_bytes(runs[1.0])
    assert plain.metric("ebft/ce_loss") == []


CASES: dict[str, Case] = {
    "ebft.mode": a_mode_says_what_is_sampled,
    "ebft.reference_column": a_column_holds_the_truth,
    "ebft.stride": partial(a_text_is_continued, key="stride", value=3),
    "ebft.context_length": partial(a_text_is_continued, key="context_length", value=9),
    "ebft.generate_length": partial(a_text_is_continued, key="generate_length", value=2),
    "ebft.feature_layers": layers_are_compared,
    "ebft.embed_method": states_are_pooled,
    "ebft.whitening": features_are_whitened,
    "ebft.alignment_coefficient": partial(a_term_is_weighted, key="alignment", sign=1.0),
    "ebft.diversity_coefficient": partial(a_term_is_weighted, key="diversity", sign=-1.0),
    "ebft.advantage_estimator": advantages_are_estimated,
    "ebft.rl_coefficient": the_policy_loss_is_weighted,
    "ebft.ce_coefficient": the_truth_is_imitated,
}
