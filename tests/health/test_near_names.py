"""Advice on a misspelt name, from the accepted names that the error itself lists."""

from __future__ import annotations

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.frameworks.known import known
from homeostat.health.guesses.near_names import nearest_name, nearest_setting
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES

HEAD = "Traceback (most recent call last):"
FRAME = (
    '  File "/data/venv/lib/python3.11/site-packages/swift/template/register.py", line 50, in get'
)


@pytest.mark.parametrize(
    ("text", "name", "meant"),
    [
        ("template_type: 'qwen25' not in ['chatml', 'qwen', 'qwen2_5']", "qwen25", "qwen2_5"),
        ("--optim: invalid choice: 'adamv' (choose from 'adamw', 'muon')", "adamv", "adamw"),
        ("Column actions not in the dataset: ['action', 'index']", "actions", "action"),
        ("Unknown quantization method: awq4. Must be one of ['awq', 'gptq']", "awq4", "awq"),
    ],
)
def test_the_nearest_accepted_name_is_found(text: str, name: str, meant: str) -> None:
    assert nearest_name(text) == (name, meant, text.count("', '") + 1)


@pytest.mark.parametrize(
    "text",
    [
        # Unlike all of them.
        "ValueError: backend 'triton' not in ['eager', 'sdpa']",
        # The name is among them: something else is wrong.
        "ValueError: 'sdpa' is not supported here, choose from ['sdpa', 'sdpa2']",
        # Nothing is refused, or no names are listed.
        "{'loss': '5.884', 'entropy': '5.84', 'mode': 'train', 'split': 'trains'}",
        "model 'train1' has the splits ['train', 'test']",
        "ValueError: 'lr' is not a number",
        "type fp8e4nv not supported. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')",
    ],
)
def test_other_texts_give_no_name(text: str) -> None:
    assert nearest_name(text) is None


def test_the_doctor_advises_it_first() -> None:
    error = "ValueError: template_type: 'qwen25' not in ['chatml', 'qwen', 'qwen2_5']"
    view = read_text("\n".join([HEAD, FRAME, "    raise ValueError(", error]), config=None)
    fix = diagnose(view, RULES).findings[0].fixes[0]
    assert fix.why == "write qwen2_5 in place of qwen25: it is the nearest of the 3 accepted names"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("got an unexpected keyword argument 'num_generation'", "num_generations"),
        ("error: unrecognized arguments: --num-iteration 4", "num_iterations"),
        # Known, so it stands in the wrong place; too far from any; another kind of error.
        ("got an unexpected keyword argument 'num_generations'", ""),
        ("got an unexpected keyword argument 'evaluation_strategy'", ""),
        ("num_generation must divide the batch", ""),
    ],
)
def test_a_setting_that_is_nearly_a_known_one_is_found(text: str, found: str) -> None:
    near = nearest_setting(text, known("trl").settings or {})
    assert (near[1] if near else "") == found


def test_the_doctor_advises_the_frameworks_own_setting() -> None:
    log = "litgpt pretrain\nlitgpt: error: unrecognized arguments: --train.microbatch 4"
    first = diagnose(read_text(log, config=None), RULES).findings[0]
    wanted = "write train.micro_batch_size in place of train.microbatch: LitGPT has"
    assert first.fixes[0].why.startswith(wanted)


def test_a_long_line_is_searched_in_time_that_grows_with_its_length() -> None:
    assert nearest_name("not xy1 in " + "'ab', " * 20_000 + "'") is None


def test_lists_that_differ_are_no_misspelt_name() -> None:
    """The keys of weights, hundreds on either side, are neither compared nor corrected."""
    missing, unexpected = (
        ", ".join(f"'{prefix}layers.{n}.weight'" for n in range(500)) for prefix in ("model.", "")
    )
    assert nearest_name(f"Missing keys {missing}: they are not among {unexpected}") is None
