"""Only what the policy sampled is counted, decoded, ended and trained as the policy's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support import tiny_rl

from homeostat.algorithms.baselines import whitened
from homeostat.errors import EngineError
from homeostat.observe.completions import read_completions, write_completions
from homeostat.rollout.checks import require_servable
from homeostat.rollout.engine import Capabilities, Request, Sampling
from homeostat.rollout.flight import Flight
from homeostat.run.evaluation.rl_measure import _completion_metrics
from homeostat.run.learning.updates import build_update, step_advantages, step_rows
from homeostat.types import (
    Author,
    Completion,
    Prompt,
    RolloutGroup,
    Sample,
    Segment,
    StopReason,
)


def segment(author: Author, *tokens: int, version: int = 0) -> Segment:
    logp = -0.5 if author is Author.ENGINE else np.nan
    tokens_T = np.array(tokens, dtype=np.int64)
    return Segment(tokens_T, np.full(len(tokens), logp, dtype=np.float32), version, author=author)


def own(*tokens: int, version: int = 0) -> Segment:
    return segment(Author.ENGINE, *tokens, version=version)


def tool(*tokens: int) -> Segment:
    return segment(Author.TOOL, *tokens)


PROMPT = Prompt(0, np.array([9, 9, 9]), "p", {})
TURNS = Completion("a", (own(1, 2, version=4), tool(7, 7, 7), own(3, version=5)), StopReason.LENGTH)
PLAIN = Completion("b", (own(1, 2, 3, version=5),), StopReason.STOP)
ONLY_A_TOOL = Completion("c", (tool(7, 7),), StopReason.ABORTED)


def group(*completions: Completion) -> RolloutGroup:
    samples = [Sample(one, "", {"r": float(n)}, float(n)) for n, one in enumerate(completions)]
    return RolloutGroup(PROMPT, tuple(samples))


def test_a_completion_tells_the_policys_tokens_from_the_others() -> None:
    assert TURNS.by_policy_T.tolist() == [True, True, False, False, False, True]
    assert TURNS.policy_tokens_T.tolist() == [1, 2, 3]
    assert TURNS.policy_versions_T.tolist() == [4, 4, 5]
    assert (TURNS.num_policy_tokens, len(TURNS)) == (3, 6)
    empty = Completion("d", (), StopReason.ABORTED)
    assert (empty.num_policy_tokens, empty.policy_tokens_T.tolist()) == (0, [])


def test_lengths_penalties_and_weights_leave_a_tools_tokens_out(tmp_path: Path) -> None:
    config = tiny_rl.config(
        tmp_path,
        "rollout.max_new_tokens=4",
        algorithm={"type": "grpo", "overlong": {"type": "shape", "buffer_tokens": 2}},
    )
    rows = step_rows([group(TURNS, PLAIN, ONLY_A_TOOL)], config.for_learning)
    assert rows.lengths_S.tolist() == [3, 3, 0]
    assert rows.starts_S.tolist() == [3, 3, 3]
    # Three of at most four tokens: both are half way into the buffer, the tool's words or not.
    assert rows.penalty_S[0] == rows.penalty_S[1] < 0
    assert rows.trained_S.tolist() == [True, True, False]
    assert rows.rows[0].weights_T.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert np.isfinite(rows.rows[0].columns["engine_logp"]).all()
    metrics = _completion_metrics(list(group(TURNS, PLAIN).samples), fixed_length=False)
    assert metrics["completions/mean_length"] == metrics["completions/max_length"] == 3


def test_advantages_belong_to_the_policys_tokens(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path, algorithm={"type": "reinforce_pp"})
    rows = step_rows([group(TURNS, PLAIN)], config.for_learning)
    found = step_advantages(rows, config.for_learning, penalty_ST=None)
    assert [len(advantage_T) for advantage_T in found] == [3, 3]
    # Whitened over three tokens of each: what a tool wrote would shift the mean.
    alike = whitened(found, np.array([True, True]))
    assert np.concatenate(found) == pytest.approx(np.concatenate(alike), abs=1e-6)
    update = build_update(
        rows,
        found,
        chosen=range(len(rows.rows)),
        config=config.for_learning,
        sizes=config.trainer,
        kl_coefficient=None,
        step=1,
        epoch=0,
    )
    assert update.plan is not None
    first = update.plan.micro_batches[0].rows()[0]
    by_policy_T = np.concatenate([np.zeros(3, dtype=bool), TURNS.by_policy_T])
    assert (first.weights_T > 0).tolist() == by_policy_T.tolist()
    assert (first.columns["advantage"] != 0).tolist() == by_policy_T.tolist()


def test_the_table_of_completions_counts_the_policys_tokens(tmp_path: Path) -> None:
    write_completions(tmp_path, 1, [group(TURNS, ONLY_A_TOOL)], advantages=[[0.0, None]])
    rows = read_completions(tmp_path, 1)
    assert [(row["num_tokens"], row["policy_version"]) for row in rows] == [(3, 4), (0, None)]


def flight(*begun: Segment, new: int = 4) -> Flight:
    sampling = Sampling(new, stop_ids=frozenset({7}), stop_strings=("77",))
    request = Request("a", PROMPT.tokens_T, sampling, seed=0, begun=begun)
    return Flight(request, number=0, now=0.0, decode=lambda tokens: "".join(map(str, tokens)))


def test_a_tools_words_neither_end_a_request_nor_use_up_its_tokens() -> None:
    one = flight(own(1, 2), tool(5, 7, 7))
    assert one.given_end() is None
    assert one.append(3, -1.0, -1.0, version=1) is None
    assert one.append(4, -1.0, -1.0, version=1) is StopReason.LENGTH
    completion = one.completion(StopReason.LENGTH)
    assert completion.num_policy_tokens == 4
    # What the policy itself said before it was interrupted still counts.
    assert flight(tool(7), own(1, 77)).given_end() is StopReason.STOP_STRING
    assert flight(tool(1), own(1, 7)).given_end() is StopReason.STOP


def test_a_request_must_fit_with_what_a_tool_wrote() -> None:
    request = flight(tool(1, 1)).request

    def capabilities(max_tokens: int) -> Capabilities:
        return Capabilities("any", True, True, frozenset(), max_tokens)

    require_servable(request, capabilities(9), vocabulary=10, can_decode=True)
    with pytest.raises(EngineError, match="5 prompt tokens and up to 4 new ones"):
        require_servable(request, capabilities(8), vocabulary=10, can_decode=True)
