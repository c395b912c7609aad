"""Scoring and answering for an evaluation harness, against transformers and plain sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import tiny
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.config.model import ModelConfig
from homeostat.errors import DataError, MissingDependencyError
from homeostat.generation.choice import Choice, choose
from homeostat.generation.exporting import export_model
from homeostat.generation.harness import Harness
from homeostat.generation.harness_lm import read_tasks, result_rows
from homeostat.generation.loading import load_text_model

CONTEXT = 48
PAIRS = [
    ("turn around abc", " cba"),
    ("turn", " around the corner and back again"),
    ("a", "b"),
    ("x" * 60, "yz"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("harness")
    model = tiny.write_model(place / "model", initializer_range=0.3)
    choice = Choice(ModelConfig(path=str(model), init="random"), seed=4)
    export_model(choice, place / "whole")
    return place / "whole"


@pytest.fixture(scope="module")
def harness(folder: Path) -> Harness:
    return Harness(load_text_model(choose(folder), device="cpu"), context=CONTEXT)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def plain_score(model, context: list[int], rest: list[int]) -> tuple[float, bool]:
    """The same number by one unpadded forward pass of transformers in float64."""
    whole = torch.tensor([*context, *rest][-(CONTEXT + 1) :])
    with torch.no_grad():
        logp = model(whole[None, :-1]).logits[0].log_softmax(-1)[-len(rest) :]
    target = torch.tensor(rest)
    picked = logp.gather(-1, target[:, None]).sum()
    return float(picked), bool((logp.argmax(-1) == target).all())


def test_log_likelihoods_are_those_of_transformers(harness: Harness, theirs) -> None:
    pairs = [(harness.encode(a), harness.encode(b, opened=False)) for a, b in PAIRS]
    for one, (context, rest) in zip(harness.score(pairs), pairs, strict=True):
        logprob, is_greedy = plain_score(theirs, context, rest)
        assert one.logprob == pytest.approx(logprob, abs=1e-4)
        assert one.is_greedy == is_greedy


def test_greedy_continuations_are_recognised(harness: Harness, theirs) -> None:
    context = harness.encode("turn around")
    with torch.no_grad():
        best = int(theirs(torch.tensor([context])).logits[0, -1].argmax())
    right, wrong = harness.score([(context, [best]), (context, [(best + 1) % 290])])
    assert right.is_greedy
    assert not wrong.is_greedy


def test_a_long_text_is_read_in_windows_that_cover_each_token_once(
    harness: Harness, theirs
) -> None:
    text = "turn around " * 20
    tokens = harness.encode(text)
    assert len(tokens) > 2 * CONTEXT
    expected, start = 0.0, 0
    while start < len(tokens):
        end = min(start + CONTEXT, len(tokens))
        before = [harness.prefix_id] if start == 0 else tokens[end - CONTEXT - 1 : start]
        expected += plain_score(theirs, before, tokens[start:end])[0]
        start = end
    assert harness.score_whole(text) == pytest.approx(expected, abs=1e-3)


def test_answers_end_before_the_stop_text(harness: Harness) -> None:
    options = {"until": ["zzzz"], "max_gen_toks": 8, "do_sample": False}
    whole, again = harness.generate([("turn around abc", options)] * 2)
    assert whole == again
    stop = whole[2:4]
    (cut,) = harness.generate([("turn around abc", {**options, "until": stop})])
    assert cut == whole[: whole.index(stop)]


def test_what_the_engine_does_not_have_is_named(harness: Harness) -> None:
    with pytest.raises(DataError, match="repetition_penalty"):
        harness.generate([("a", {"repetition_penalty": 1.1})])
    with pytest.raises(DataError, match="--max-new-tokens"):
        harness.generate([("a", {"max_gen_toks": CONTEXT})])
    with pytest.raises(DataError, match="Raise --context"):
        harness.score([([1], [2] * (CONTEXT + 1))])


def test_a_task_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: my_task\ndataset_path: json\n")
    found = read_tasks(["arc_easy", str(tmp_path / "mine.yaml")], include=None)
    assert found.names == ("arc_easy", "my_task")
    assert found.folders == (tmp_path,)
    with pytest.raises(DataError, match="does not exist"):
        read_tasks(["nowhere.yaml"], include=None)


def test_results_become_rows() -> None:
    numbers = {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 1.0}
    found = {"results": {"t": numbers}, "n-samples": {"t": {"original": 4, "effective": 2}}}
    first, second = result_rows(found)
    assert (first.metric, first.value, first.stderr, first.num_samples) == ("acc", 0.5, 0.1, 2)
    assert (second.metric, second.stderr) == ("exact_match (strict)", None)


def test_the_missing_package_is_named(folder: Path) -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        result = CliRunner().invoke(app, ["eval", str(folder), "--tasks", "x"])
        assert isinstance(result.exception, MissingDependencyError)
        assert "homeostat[eval]" in str(result.exception)
    else:
        pytest.skip("lm_eval is installed: nothing is missing")
