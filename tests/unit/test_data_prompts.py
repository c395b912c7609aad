"""Prompts: the tokens the model will see, every other column kept, an order that can be resumed."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chat import CHATML, Style, encode, make_tokenizer

from homeostat.config.data import DataConfig, PromptSource, ReasoningGymSource
from homeostat.config.model import ModelConfig
from homeostat.data.gym import GymRows
from homeostat.data.prepare import split_rows
from homeostat.data.prompts import PromptSampler, PromptSet, prepare_prompts
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.errors import DataError, MissingDependencyError, ModelError

TINY = Path(__file__).parents[2] / "recipes" / "assets" / "tiny-chat"
OPENING = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(ModelConfig(path=str(TINY)))


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def prepare(
    source: PromptSource | ReasoningGymSource, tokenizer: ChatTokenizer, **changes: Any
) -> PromptSet:
    data = DataConfig(train=(source,), **changes)
    return prepare_prompts([source], tokenizer, data)


def prompts_of(
    folder: Path, rows: list[Any], tokenizer: ChatTokenizer, *, data: Any = None, **source: Any
) -> PromptSet:
    found = PromptSource(type="prompts", path=write(folder, rows), **source)
    return prepare(found, tokenizer, **(data or {}))


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def test_a_text_is_a_user_turn_and_the_other_columns_are_kept(tmp_path, tokenizer):
    rows = [{"prompt": "one and", "answer": 3, "more": {"a": [1, None]}}, {"prompt": "you"}]
    prompts = prompts_of(tmp_path, rows, tokenizer)
    assert [prompts[n].prompt_id for n in range(2)] == [0, 1]
    assert tokenizer.decode(prompts[0].tokens_T) == user("one and") + OPENING
    assert prompts[0].prompt == "one and"
    assert prompts[0].columns == {"answer": 3, "more": {"a": [1, None]}}
    assert prompts[1].columns == {}
    assert prompts.origin(1) == f"{tmp_path}/rows.jsonl:2"
    assert prompts.lengths.tolist() == [len(prompts[n].tokens_T) for n in range(2)]
    assert prompts.max_token_id == max(prompts[n].tokens_T.max() for n in range(2))
    assert prompts.report.tokens == prompts.lengths.sum()
    with pytest.raises(IndexError):
        prompts[2]


def test_a_prompt_is_what_sft_shows_before_the_answer(tmp_path, tokenizer):
    turns = [("user", "is it in?"), ("assistant", "the other"), ("user", "and you?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    prompts = prompts_of(tmp_path, [{"prompt": messages}], tokenizer)
    whole = {"messages": [*messages, {"role": "assistant", "content": "one"}]}
    tokens_T, weights_T = encode(whole, tokenizer, turns="last")
    border = int(np.flatnonzero(weights_T)[0])
    assert prompts[0].tokens_T.tolist() == tokens_T[:border].tolist()
    assert prompts[0].prompt == messages


def test_a_system_message_stands_first_unless_the_prompt_has_its_own(tmp_path, tokenizer):
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}]
    rows = [{"prompt": "a"}, {"prompt": own}, {"prompt": own[1:]}]
    prompts = prompts_of(tmp_path, rows, tokenizer, system="be brief")
    texts = [tokenizer.decode(prompts[n].tokens_T) for n in range(3)]
    said = "<|im_start|>system\n{}<|im_end|>\n"
    assert texts[0] == said.format("be brief") + user("a") + OPENING
    assert texts[1] == said.format("mine") + user("b") + OPENING
    assert texts[2] == said.format("be brief") + user("b") + OPENING
    assert prompts[2].prompt == own[1:]


def test_plain_text_is_opened_as_a_document_and_not_closed(tmp_path):
    style = Style(CHATML, ("<|im_end|>", "<s>"), eos="<|im_end|>", end="<|im_end|>", bos="<s>")
    make_tokenizer(tmp_path / "model", style)
    with_bos = add_bos(tmp_path / "model")
    (bos,) = with_bos.prefix_ids
    rows = [{"prompt": "the one"}, {"prompt": "<s>the one"}]
    prompts = prompts_of(tmp_path, rows, with_bos, chat=False)
    expected = [bos, *with_bos.encode("the one")[0].tolist()]
    assert [prompts[n].tokens_T.tolist() for n in range(2)] == [expected, expected]


def add_bos(folder: Path) -> ChatTokenizer:
    """The tokenizer with the habit of opening documents by <s>."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    number = next(t["id"] for t in content["added_tokens"] if t["content"] == "<s>")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [number], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(content))
    return load_tokenizer(ModelConfig(path=str(folder)))


BAD = [
    ({"question": "a"}, "missing column: no column is named 'prompt'"),
    ({"prompt": None}, "missing column: column 'prompt' is null"),
    ({"prompt": 7}, "wrong type: column 'prompt' holds a int"),
    ({"prompt": " \n"}, "empty prompt"),
    ({"prompt": []}, "no messages"),
    ({"prompt": [{"role": "user", "content": " "}]}, "empty prompt"),
    ({"prompt": [{"role": "assistant", "content": "a"}]}, "nothing to answer"),
    ({"prompt": [{"content": "a"}]}, "not a usable message"),
    ({"prompt": "\ud800"}, "not valid Unicode"),
    ("text", "not a JSON object"),
]


@pytest.mark.parametrize(("row", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_row_that_cannot_be_used_is_refused_or_dropped(tmp_path, tokenizer, row, message):
    rows = [{"prompt": "a"}, row, {"prompt": "b"}]
    with pytest.raises(DataError) as refused:
        prompts_of(tmp_path, rows, tokenizer)
    assert f"{tmp_path}/rows.jsonl:2: {message}" in str(refused.value)
    assert "1 of 3 rows cannot be used" in str(refused.value)
    prompts = prompts_of(tmp_path, rows, tokenizer, data={"bad_rows": "drop"})
    assert [prompts[n].prompt for n in range(len(prompts))] == ["a", "b"]
    assert (prompts.report.seen, prompts.report.num_bad) == (3, 1)
    assert prompts.origin(1).endswith(":3")
    assert message.startswith(prompts.report.examples[0].reason)


def test_long_prompts_are_dropped_or_refused(tmp_path, tokenizer):
    rows = [{"prompt": "a"}, {"prompt": "x y " * 50}]
    prompts = prompts_of(tmp_path, rows, tokenizer, data={"max_length": 40})
    assert (len(prompts), prompts.report.dropped_overlong) == (1, 1)
    with pytest.raises(DataError, match=r"rows.jsonl:2: \d+ tokens") as refused:
        prompts_of(tmp_path, rows, tokenizer, data={"max_length": 40, "overlong": "refuse"})
    assert "truncate" not in str(refused.value)
    exact = int(prompts.lengths[0])
    assert len(prompts_of(tmp_path, rows[:1], tokenizer, data={"max_length": exact})) == 1
    with pytest.raises(DataError, match="no rows are left"):
        prompts_of(tmp_path, rows[:1], tokenizer, data={"max_length": exact - 1})


def test_without_a_chat_template_only_plain_text_can_be_asked(tmp_path, tokenizer):
    bare = ChatTokenizer(tokenizer._backend, special=tokenizer.special, chat_template=None)
    with pytest.raises(ModelError, match=r"prompts source .* no chat template"):
        prompts_of(tmp_path, [{"prompt": "a"}], bare)
    assert len(prompts_of(tmp_path, [{"prompt": "a"}], bare, chat=False)) == 1
    with pytest.raises(ModelError, match="no chat template"):
        prompts_of(tmp_path, [{"prompt": [{"role": "user", "content": "a"}]}], bare, chat=False)


def test_parquet_hands_over_all_its_columns(tmp_path, tokenizer):
    day = datetime.date(2026, 1, 2)
    table = pa.table({"q": ["one", "two"], "answer": ["1", None], "day": [day, day]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = PromptSource(
        type="prompts", path=str(tmp_path / "a.parquet"), prompt_column="q", limit=2
    )
    prompts = prepare(source, tokenizer)
    assert prompts[1].columns == {"answer": None, "day": day}
    assert prompts.origin(1).endswith("a.parquet[1]")
    assert len(prepare(source.model_copy(update={"limit": 1}), tokenizer)) == 1


def test_the_fingerprint_is_of_the_content(tmp_path, tokenizer):
    rows = [{"prompt": "a", "answer": 1, "x": 2}, {"prompt": "b", "answer": 2}]
    marks = {prompts_of(tmp_path, rows, tokenizer).fingerprint}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    swapped = [{"x": 2, "answer": 1, "prompt": "a"}, rows[1]]
    marks.add(prompts_of(elsewhere, swapped, tokenizer).fingerprint)
    assert len(marks) == 1
    for other in (
        rows[::-1],
        rows[:1],
        [{**rows[0], "answer": 3}, rows[1]],
        [{**rows[0], "prompt": "c"}, rows[1]],
    ):
        marks.add(prompts_of(tmp_path, other, tokenizer).fingerprint)
    marks.add(prompts_of(tmp_path, rows, tokenizer, system="s").fingerprint)
    assert len(marks) == 6


def test_equal_prompts_are_held_out_together(tmp_path, tokenizer):
    texts = np.random.default_rng(5).choice(list("abcdefgh"), 80).tolist()
    prompts = prompts_of(tmp_path, [{"prompt": text} for text in texts], tokenizer)
    for seed in range(5):
        train, held_out = split_rows(prompts.made_from_B, 0.3, seed)
        assert sorted([*train, *held_out]) == list(range(80))
        assert not {texts[n] for n in train} & {texts[n] for n in held_out}


CHAIN = {"type": "reasoning_gym", "task": "chain_sum", "size": 6, "seed": 3}


def test_a_reasoning_gym_task_gives_questions_that_its_scorer_knows(tokenizer):
    import reasoning_gym  # takes a second, and this test alone needs it

    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    source = ReasoningGymSource(**CHAIN, options=options, instruction="Only the number.")
    prompts = prepare(source, tokenizer)
    assert len(prompts) == 6
    reference = reasoning_gym.create_dataset("chain_sum", size=6, seed=3, **options)
    for number in range(6):
        prompt, expected = prompts[number], reference[number]
        asked = f"{expected['question']}\nOnly the number."
        assert tokenizer.decode(prompt.tokens_T) == user(asked) + OPENING
        assert prompt.prompt == asked
        columns = prompt.columns
        assert (columns["question"], columns["answer"]) == (
            expected["question"],
            expected["answer"],
        )
        scorer = reasoning_gym.create_dataset(
            columns["task"], **json.loads(columns["task_options"])
        )
        entry = json.loads(columns["entry"])
        assert scorer.score_answer(expected["answer"], entry) == 1.0
        assert scorer.score_answer("no", entry) < 1.0
    assert prompts.origin(2) == "reasoning_gym:chain_sum[2]"
    assert prepare(source, tokenizer).fingerprint == prompts.fingerprint
    other = source.model_copy(update={"seed": 4})
    assert prepare(other, tokenizer).fingerprint != prompts.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"terms": 2}}, r"no option 'terms'. It has: min_terms, max_terms"),
        ({"options": {"size": 2}}, "size is a key of the source itself"),
        ({"options": {"min_terms": 9}}, "refuses its options: max_terms must be >= min_terms"),
        ({"options": {"min_terms": "x"}}, "refuses its options"),
        ({"task": "chain_sums"}, r"no task 'chain_sums'. There are: chain_sum"),
        ({"task": "composite"}, "no task 'composite'"),
        ({"task": "arc_agi"}, "compares tuples"),
    ],
)
def test_a_task_that_cannot_be_made_says_why(tokenizer, changes, message):
    with pytest.raises(DataError, match=message):
        prepare(ReasoningGymSource(**(CHAIN | changes)), tokenizer)


def test_a_missing_reasoning_gym_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'homeostat\[tasks\]'"):
        GymRows(ReasoningGymSource(**CHAIN))


def sampler(num_prompts: int, **changes: Any) -> PromptSampler:
    options: dict[str, Any] = {"seed": 7, "shuffle": True, "fingerprint": "f"}
    return PromptSampler(np.arange(num_prompts), **(options | changes))


@given(
    num_prompts=st.integers(1, 20),
    counts=st.lists(st.integers(0, 50), max_size=8),
    stop=st.integers(0, 8),
)
def test_every_prompt_comes_once_an_epoch_and_a_resumed_order_is_the_same(
    num_prompts, counts, stop
):
    whole = sampler(num_prompts)
    parts = [whole.take(count) for count in counts]
    taken = [prompt for part in parts for prompt in part]
    for start in range(0, len(taken) - num_prompts + 1, num_prompts):
        assert sorted(taken[start : start + num_prompts]) == list(range(num_prompts))
    assert whole.epoch == len(taken) / num_prompts
    first = sampler(num_prompts)
    for count in counts[:stop]:
        first.take(count)
    state = json.loads(json.dumps(first.state()))
    second = sampler(num_prompts, state=state)
    assert [second.take(count) for count in counts[stop:]] == parts[stop:]
    # The order does not depend on how it is cut into steps.
    assert sampler(num_prompts).take(len(taken)) == taken


def test_orders_differ_by_epoch_and_seed_unless_they_are_not_to_be_shuffled():
    first, again = sampler(50), sampler(50, seed=8)
    orders = [tuple(first.take(50)), tuple(first.take(50)), tuple(again.take(50))]
    assert len(set(orders)) == 3
    plain = sampler(4, shuffle=False)
    assert plain.take(6) == [0, 1, 2, 3, 0, 1]
    chosen = PromptSampler(np.array([9, 4]), seed=0, shuffle=False, fingerprint="f")
    assert chosen.take(3) == [9, 4, 9]


@pytest.mark.parametrize(
    "change", [{"fingerprint": "g"}, {"seed": 8}, {"shuffle": False}, {"num_prompts": 6}]
)
def test_other_prompts_are_not_continued(change):
    state = sampler(5).state()
    with pytest.raises(DataError, match="not those that the run started with"):
        sampler(change.pop("num_prompts", 5), state=state, **change)


@pytest.mark.parametrize("state", [{}, {"cursor": -1, "data": "x"}, {"cursor": True, "data": "x"}])
def test_a_damaged_state_is_refused(state):
    with pytest.raises(DataError, match="damaged"):
        sampler(5, state=state)
