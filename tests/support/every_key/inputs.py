"""Cases of the keys that say what goes in: the run itself, model, adapter, rows."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.every_key.workshop import (
    EXPORTED,
    LORA,
    TRAINED,
    Case,
    Run,
    Workshop,
    all_of,
    alters,
    assert_same,
    eval_losses,
    fact,
    has_file,
    losses,
    metric,
    prepares,
    prepares_same,
    refuses,
    refuses_config,
    shows,
)
from torch.utils._python_dispatch import TorchDispatchMode

from homeostat.data.loader import PlanLoader
from homeostat.observe.jsonl import iter_jsonl
from homeostat.train.local import LocalTrainer


def first_rows(run: Run) -> list[int]:
    """The rows of step 1."""
    return next(iter(iter_jsonl(run.dir / "row_losses.jsonl")))["row_ids"]


def first_loss(run: Run) -> float:
    return losses(run)[0]


def exported_names(run: Run) -> set[str]:
    (folder,) = run.dir.glob("checkpoints/step_*/hf")
    return {file.name for file in folder.glob("*.safetensors")}


def saved_pad_token(run: Run) -> str:
    (file,) = run.dir.glob("checkpoints/step_*/hf/tokenizer_config.json")
    return json.loads(file.read_text())["pad_token"]


def has_lengths(run: Run) -> bool:
    return any("lora_magnitude_vector" in name for name in run.weights())


def adapter_rank(run: Run) -> set[int]:
    return {tensor.shape[0] for name, tensor in run.weights().items() if ".lora_A." in name}


def a_name_is_the_folder(workshop: Workshop) -> None:
    run = workshop.run("name=renamed")
    assert run.dir == workshop.folder / "runs" / "renamed"
    assert (run.dir / "metrics.jsonl").is_file()
    assert_same(workshop.run(), run)


class DrawnOnCpu(TorchDispatchMode):
    """Counts numbers drawn at random in real memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)
        if func in drawing and args[0].device.type == "cpu":
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def meta_init_spares_a_first_initialisation(workshop: Workshop) -> None:
    drawn, runs = [], []
    for overrides in (TRAINED, (*TRAINED, "model.meta_init=false")):
        with DrawnOnCpu() as mode:
            runs.append(workshop.again(*overrides))
        drawn.append(mode.count)
    sizes = sum(tensor.numel() for tensor in runs[0].weights().values() if tensor.ndim == 2)
    assert drawn == [0, sizes]
    assert_same(*runs)


def num_processes_started() -> int:
    """Process names are numbered, so a new one tells how many there were."""
    return int(multiprocessing.get_context("spawn").Process().name.rpartition("-")[2])


def rows_are_tokenised_by_as_many_processes(workshop: Workshop) -> None:
    before = num_processes_started()
    one = workshop.again()
    assert num_processes_started() == before + 1
    two = workshop.again("data.num_processes=2")
    assert num_processes_started() == before + 1 + 2 + 1
    assert_same(one, two)


@contextmanager
def plans_ahead(expected: int) -> Iterator[list[int]]:
    """Return how far ahead of the last applied step plans were made.

    Step 1 waits for its successors.
    """
    applied, ahead = [0], [0]
    make, apply = PlanLoader.plan, LocalTrainer.apply

    def making(self: PlanLoader, step: int) -> Any:
        ahead[0] = max(ahead[0], step - applied[0])
        return make(self, step)

    def applying(self: LocalTrainer, role: Any, *, step: int, learning_rate: float) -> Any:
        deadline = time.monotonic() + 10
        while step == 1 and ahead[0] < expected and time.monotonic() < deadline:
            time.sleep(0.001)
        report = apply(self, role, step=step, learning_rate=learning_rate)
        applied[0] = step
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanLoader, "plan", making)
        patch.setattr(LocalTrainer, "apply", applying)
        yield ahead


def updates_are_packed_ahead(workshop: Workshop) -> None:
    found = []
    for number in (1, 4):
        # The plan in hand, and those that wait.
        with plans_ahead(number + 1) as ahead:
            long = ("trainer.max_steps=8", f"data.prefetch_updates={number}")
            found.append((ahead, workshop.again(*long)))
    assert [ahead for (ahead,), _ in found] == [2, 5]
    assert_same(found[0][1], found[1][1])


def cached_rows_are_found_again(workshop: Workshop) -> None:
    own, shared = workshop.run(), workshop.again("data.cache_dir=cache")
    assert (own.dir / "data").is_dir()
    assert not (shared.dir / "data").exists()
    (store,) = (workshop.folder / "cache").iterdir()
    written = {file: file.stat().st_mtime_ns for file in store.iterdir()}
    again = workshop.again("data.cache_dir=cache")
    assert {file: file.stat().st_mtime_ns for file in store.iterdir()} == written
    for run in (shared, again):
        assert_same(own, run)


def flawed_rows_are_refused_or_dropped(workshop: Workshop) -> None:
    flawed = "data.train.0.path=flawed.jsonl"
    error = workshop.attempt(flawed).error
    assert error is not None
    assert "1 of 41 rows cannot be used" in str(error)
    dropped = workshop.again(flawed, "data.bad_rows=drop")
    assert dropped.events("data_prepared")[0]["bad"] == {"missing column": 1}
    assert_same(workshop.run(), dropped)


def prepared(group: str) -> Any:
    """Return how many rows and tokens the group's sources gave."""
    names = ("seen", "kept", "tokens", "trained_tokens")

    def see(run: Run) -> dict[str, int]:
        (event,) = [e for e in run.events("data_prepared") if e["which"] == group]
        return {name: event[name] for name in names}

    return see


OPTIONS = ("model.chat_template=options.jinja",)


def source_case(group: str, kind: str, change: str) -> Case:
    """Other rows are prepared. A run over another file shows that they are what it learns from."""
    # The template shows tools where there are any, and is the model's own otherwise.
    base = (f"data.{group}=[{{type: {kind}, path: rows.jsonl}}]", *OPTIONS)
    change = f"data.{group}.0.{change}"
    rows = prepares(change, group, base=base)
    if not change.endswith("path=fewer.jsonl"):
        return rows
    seen = alters(
        change, prepared(group), base=base, same="bits" if group == "validation" else None
    )
    learnt = alters(change, losses if group == "train" else eval_losses, base=base)
    return all_of(rows, seen, learnt)


# Of each type of source: key -> the change that is seen.
SOURCE_CHANGES = {
    "messages": {"messages_column": "talk", "tools_column": "tools", "turns": "last"},
    "prompt_completion": {
        "prompt_column": "question", "completion_column": "answer", "chat": "false",
        "system": "Be brief.",
    },
    "text": {"text_column": "body"},
}  # fmt: skip
OTHER_KIND = {"messages": "text", "prompt_completion": "text", "text": "messages"}


def folder_case(group: str, kind: str, change: str, *, base: tuple[str, ...] = ()) -> Case:
    """Another part of a folder with two configurations of two splits each is prepared."""
    source = f"{{type: {kind}, path: parts, config: main, split: train}}"
    return prepares(f"data.{group}.0.{change}", group, base=(*base, f"data.{group}=[{source}]"))


def names_cases(
    group: str, kind: str, columns: str, *, file: str, base: tuple[str, ...] = ()
) -> dict[str, Case]:
    """Cases of the keys that all sources of files share; `columns` is what `columns` is set to.

    Revisions belong to names on the hub, which tests/integration/test_hub_runs.py trains from.
    """
    own = f"data.{group}=[{{type: {kind}, path: {file}}}]"
    place = f"data.{group}[]"
    return {
        f"{place}.split ({kind})": folder_case(group, kind, "split=test", base=base),
        f"{place}.config ({kind})": folder_case(group, kind, "config=other", base=base),
        f"{place}.revision ({kind})": refuses_config(
            f"data.{group}.0.revision=v1", "which has no revisions", base=(*base, own)
        ),
        f"{place}.columns ({kind})": prepares(
            f"data.{group}.0.columns={columns}", group, base=(*base, own)
        ),
    }


COLUMNS = {
    "messages": "{messages: talk}",
    "prompt_completion": "{prompt: [question, prompt], completion: answer}",
    "text": "{text: body}",
}


def auto_cases(group: str) -> dict[str, Case]:
    """Cases of a source whose type is recognised, which happens before the rows are opened."""
    own = f"data.{group}=[{{path: rows.jsonl}}]"
    place = f"data.{group}[]"
    # Of the columns that rows have, messages come first; {text: body} alone leaves them there.
    cases = names_cases(group, "auto", "{messages: talk}", file="rows.jsonl", base=OPTIONS)
    for name, value in {"path": "fewer.jsonl", "limit": "9"}.items():
        cases[f"{place}.{name} (auto)"] = prepares(
            f"data.{group}.0.{name}={value}", group, base=(*OPTIONS, own)
        )
    explicit = f"data.{group}=[{{type: messages, path: rows.jsonl, tools_column: tools}}]"
    same = prepares_same(own, explicit, base=OPTIONS)
    return {**cases, f"{place}.type (auto)": same}


def source_cases(group: str) -> dict[str, Case]:
    cases: dict[str, Case] = auto_cases(group)
    for kind, own in SOURCE_CHANGES.items():
        cases |= names_cases(group, kind, COLUMNS[kind], file="rows.jsonl")
        common = {"path": "fewer.jsonl", "limit": "9"}
        for name, value in (common | own).items():
            cases[f"data.{group}[].{name} ({kind})"] = source_case(group, kind, f"{name}={value}")
        other = OTHER_KIND[kind]
        cases[f"data.{group}[].type ({kind})"] = source_case(group, other, f"type={kind}")
    return cases


SHORT = ("data.max_length=44",)
NF4 = (*LORA, "model.quantization=nf4")

CASES: dict[str, Case] = {
    "version": refuses("version=2", "version"),
    "name": a_name_is_the_folder,
    "runs_dir": shows(
        "runs_dir=elsewhere", lambda run: run.dir.parent.name, was="runs", now="elsewhere",
        same="bits",
    ),
    "preset": shows(
        "preset=debug", has_file("trace/step_00000001.json"), was=False, now=True, same="bits"
    ),
    "seed": all_of(alters("seed=1", first_loss), alters("seed=1", first_rows, base=TRAINED)),
    "algorithm.type (sft)": refuses("algorithm.type=guess", r"algorithm\.type"),
    "algorithm.normalise (sft)": alters("algorithm={type: sft, normalise: row}"),
    "model.revision": refuses_config("model.revision=v1", "which has no revisions"),
    "model.path": alters("model.path=wide", fact("model_loaded", "bytes")),
    "model.init": alters("model.init=random", first_loss, base=TRAINED),
    "model.implementation": shows(
        "model.implementation=transformers", fact("model_loaded", "implementation"),
        was="native", now="transformers", base=TRAINED, same="losses",
    ),
    "model.meta_init": meta_init_spares_a_first_initialisation,
    "model.tokenizer": alters("model.tokenizer=bytewise", metric("num_tokens")),
    "model.chat_template": alters("model.chat_template=polite.jinja", metric("num_tokens")),
    "model.chat_template_options": all_of(
        alters("model.chat_template_options={shout: true}", metric("num_tokens"), base=OPTIONS),
        refuses("model.chat_template_options={whisper: true}", "never reads", base=OPTIONS),
    ),
    "model.pad_token": shows(
        "model.pad_token=<|im_start|>", saved_pad_token,
        was="<|im_end|>", now="<|im_start|>", base=EXPORTED, same="bits",
    ),
    "model.quantization": all_of(
        alters("model.quantization=nf4", fact("model_loaded", "bytes"), base=LORA),
        alters("model.quantization=int8", first_loss, base=LORA),
        refuses("model.quantization=nf4", "lora", base=TRAINED),
    ),
    "model.double_quantization": all_of(
        alters("model.double_quantization=true", fact("model_loaded", "bytes"), base=NF4),
        refuses("model.double_quantization=true", "nf4", base=LORA),
    ),
    "lora.rslora": alters("lora.rslora=true", base=LORA),
    "lora.dora": shows("lora.dora=true", has_lengths, was=False, now=True, base=LORA),
    "lora.rank": shows("lora.rank=2", adapter_rank, was={4}, now={2}, base=LORA),
    "lora.alpha": alters("lora.alpha=4.0", base=LORA),
    "lora.dropout": alters("lora.dropout=0.5", base=LORA),
    "lora.targets": shows(
        "lora.targets=[q_proj]", fact("model_loaded", "lora_modules"), was=14, now=2, base=LORA
    ),
    "lora.path": alters("lora.path=adapter", first_loss, base=LORA),
    "lora.export": shows(
        "lora.export=merged", exported_names, was={"adapter_model.safetensors"},
        now={"model.safetensors"}, base=(*LORA, *EXPORTED), same="bits",
    ),
    "data.validation_share": all_of(
        shows("data.validation_share=0.25", lambda run: len(eval_losses(run)), was=0, now=1),
        # 40 rows, or 30 of them.
        shows("data.validation_share=0.25", lambda run: run.metric("epoch")[0], was=0.2, now=0.25),
    ),
    "data.max_length": alters("data.max_length=44", prepared("train")),
    "data.overlong": all_of(
        shows("data.overlong=truncate", fact("data_prepared", "dropped_overlong"), was=22, now=0,
              base=SHORT),
        alters("data.overlong=truncate", prepared("train"), base=SHORT),
        refuses("data.overlong=refuse", "are longer than", base=SHORT),
    ),
    "data.bad_rows": flawed_rows_are_refused_or_dropped,
    "data.shuffle": all_of(
        alters("data.shuffle=false", first_rows),
        shows("data.shuffle=false", lambda run: sorted(first_rows(run)) == list(range(8)),
              was=False, now=True),
    ),
    "data.num_processes": rows_are_tokenised_by_as_many_processes,
    "data.prefetch_updates": updates_are_packed_ahead,
    "data.cache_dir": cached_rows_are_found_again,
    **source_cases("train"),
    **source_cases("validation"),
}  # fmt: skip
