"""Tiny real runs that differ in one key, and what can be seen of them.

    base overrides          -> Run  (kept: many keys are judged against the same base)
    base overrides + change -> Run
    see(base run), see(changed run) -> equal, different, or exactly what the case says

Runs are deterministic, so that a difference between two of them has one cause: the change. Paths
in overrides are relative to the workshop's folder, which `Workshop` fills with inputs.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.support import tiny, tiny_moe_runs

from homeostat.columns import dense
from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config
from homeostat.config.loading.resume import compare_configs
from homeostat.data.inputs import (
    Inputs,
    RowSet,
    choose_rows,
    parts_of,
    prepare_prompt_part,
    prepare_row_part,
)
from homeostat.data.prompts import PromptSet
from homeostat.data.store import RowStore
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import HomeostatError
from homeostat.hub.resolve import resolve_names
from homeostat.observe.jsonl import iter_jsonl, read_metrics
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.session import open_session
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.types import TokenRow

# The weights that a run of the base recipe came to, in HF format; and an adapter on top of them.
TRAINED = ("model.path=trained", "model.init=pretrained")
LORA = (*TRAINED, "lora={rank: 4}")
EXPORTED = ("checkpoint.export=final",)


@dataclass(frozen=True)
class Run:
    """The result of a run. `error` is how it ended, if it ended early."""

    config: RunConfig
    output: str
    error: HomeostatError | None

    @property
    def dir(self) -> Path:
        return self.config.run_dir

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.dir / "checkpoints")

    def metric(self, name: str) -> list[float]:
        records = read_metrics(self.dir / "metrics.jsonl")
        return [record[name] for record in records if name in record]

    def steps_with(self, name: str) -> list[int]:
        return [r["step"] for r in read_metrics(self.dir / "metrics.jsonl") if name in r]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in iter_jsonl(self.dir / "events.jsonl") if event["kind"] == kind]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the model's weights in the last checkpoint."""
        store = self.checkpoints
        return load_file(store.path(store.steps()[-1]) / "model.safetensors")


See = Callable[[Run], Any]


class Workshop:
    """A folder of inputs, and the runs made from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # For services that remember: a name that no earlier test has used.
        self.fresh_name = f"every-key-{uuid.uuid4().hex[:8]}"
        self._kept: dict[tuple[str, ...], Run] = {}
        self._num_runs = 0
        self.fill()

    def fill(self) -> None:
        """Writes the inputs."""
        write_inputs(self.folder)
        self.keep_export(self.run(*EXPORTED), "trained")
        self.keep_export(self.run(*LORA, *EXPORTED), "adapter")

    def recipe(self, name: str) -> dict[str, Any]:
        """Return the recipe to which overrides are applied."""
        return base_recipe(self.folder, name=name)

    def run(self, *overrides: str) -> Run:
        """The finished run of the base recipe with these overrides; the same ones run once."""
        if overrides not in self._kept:
            self._kept[overrides] = self.again(*overrides)
        return self._kept[overrides]

    def again(self, *overrides: str, watch: AbstractContextManager[Any] | None = None) -> Run:
        """Make a separate run, inside the context manager `watch`."""
        run = self.attempt(*overrides, watch=watch)
        if run.error is not None:
            raise run.error
        return run

    def attempt(self, *overrides: str, watch: AbstractContextManager[Any] | None = None) -> Run:
        """A run that may end early, by an error that is meant for the user."""
        config = self.config(*overrides)
        error: HomeostatError | None = None
        console = Console(file=io.StringIO())
        with contextlib.chdir(self.folder), watch or contextlib.nullcontext():
            try:
                config = resolve_names(config, tell=[].append)
                with open_session(
                    config, recipe="", command=["train"], console=console, log_level="warning"
                ) as session:
                    train_recipe(config, session)
            except HomeostatError as ended:
                error = ended
        absolute = config.model_copy(update={"runs_dir": str(self.folder / config.runs_dir)})
        return Run(absolute, console.file.getvalue(), error)  # type: ignore[attr-defined]

    def config(self, *overrides: str) -> RunConfig:
        self._num_runs += 1
        raw = self.recipe(f"run_{self._num_runs}")
        return build_config(raw, list(overrides), file=None)

    def inputs(self, *overrides: str) -> Inputs[RowStore] | Inputs[PromptSet]:
        """Open what a run with these overrides would train on and hold out, as the run would."""
        config = self.config(*overrides)
        with contextlib.chdir(self.folder):
            config = resolve_names(config, tell=[].append)
            tokenizer = load_tokenizer(config.model)
            parts = parts_of(config.data)
            if config.is_rl:
                made = [prepare_prompt_part(config.for_inputs, tokenizer, part) for part in parts]
            else:
                cache_dir = self.folder / "rows"
                made = [
                    prepare_row_part(config.data, tokenizer, part, cache_dir=cache_dir)
                    for part in parts
                ]
            return choose_rows(config.for_inputs, made[0], made[1] if len(made) > 1 else None)

    def keep_export(self, run: Run, name: str) -> None:
        last = run.checkpoints.steps()[-1]
        shutil.copytree(run.checkpoints.path(last) / "hf", self.folder / name)


def base_recipe(folder: Path, *, name: str) -> dict[str, Any]:
    """Three updates of eight rows on the CPU, one micro-batch each, one checkpoint at the end."""
    raw = tiny.recipe(folder, name=name)
    raw["runs_dir"] = "runs"
    raw["data"]["train"] = [{"type": "messages", "path": "rows.jsonl"}]
    raw["trainer"] = {"max_steps": 3, "batch_rows": 8, "lr": 1e-2, "threads": 1, "device": "cpu"}
    raw["checkpoint"] = {"interval_steps": 100, "export": "off"}
    return raw


def write_inputs(folder: Path) -> None:
    """Rows with a column for every kind of source, a flawed file, and models that differ."""
    tiny.write_rows(folder / "rows.jsonl")
    rows = []
    for number, row in enumerate(iter_jsonl(folder / "rows.jsonl")):
        word = row["messages"][1]["content"]
        talk = [{"role": "user", "content": "talk"}, {"role": "assistant", "content": word * 2}]
        row |= {"talk": talk, "prompt": f"say {word}", "completion": word}
        row |= {"tools": [{"name": f"tool {number}"}]}
        row |= {"question": "what?", "answer": f"{number} {word}", "text": word, "body": word * 3}
        rows.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "fewer.jsonl").write_text("\n".join(rows[5:35]), encoding="utf-8")
    write_pairs(folder, rows)
    write_parts(folder)
    (folder / "flawed.jsonl").write_text("\n".join([*rows, "{}"]), encoding="utf-8")
    tiny.write_model(folder / "wide", hidden_size=48)
    tiny.write_model(folder / "experts", **tiny_moe_runs.EXPERTS["dots1"])
    without_merges(tiny.write_model(folder / "bytewise") / "tokenizer.json")
    template = json.loads((folder / "wide" / "tokenizer_config.json").read_text())["chat_template"]
    (folder / "polite.jinja").write_text("please {{ '\\n' }}" + template, encoding="utf-8")
    options = "{% if shout %}!!!{% endif %}{{ tools | tojson if tools else '' }}"
    (folder / "options.jinja").write_text(options + template, encoding="utf-8")


def write_pairs(folder: Path, rows: list[str]) -> None:
    """Pairs and labelled rows in one file, made of the rows of the other sources."""
    pairs = []
    for number, text in enumerate(rows):
        row = json.loads(text)
        word = row["completion"]
        row |= {"chosen": f"x{word}", "rejected": f"y{word[::-1]}"}
        row |= {"label": number % 2 == 0, "other_label": number % 3 == 0}
        pairs.append(json.dumps(row))
    (folder / "pairs.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    (folder / "fewer_pairs.jsonl").write_text("\n".join(pairs[5:35]), encoding="utf-8")


def write_parts(folder: Path) -> None:
    """A folder as a dataset on the hub has it: two configurations with two splits each."""
    for number, name in enumerate(("main/train", "main/test", "other/train", "other/test")):
        file = folder / "parts" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**row, "score": 0.5} for row in iter_jsonl(folder / "pairs.jsonl")]
        some = rows[number * 5 : 20 + number * 5]
        file.write_text("\n".join(map(json.dumps, some)), encoding="utf-8")


def without_merges(file: Path) -> None:
    """A tokenizer that never joins bytes."""
    description = json.loads(file.read_text(encoding="utf-8"))
    description["model"]["merges"] = []
    file.write_text(json.dumps(description), encoding="utf-8")


# What can be seen of any run.


def losses(run: Run) -> list[float]:
    return run.metric("train/loss")


def eval_losses(run: Run) -> list[float]:
    return run.metric("eval/loss")


def steps(run: Run) -> list[int]:
    return run.steps_with("train/loss")


def kept_steps(run: Run) -> list[int]:
    return run.checkpoints.steps()


def weight_bytes(run: Run) -> dict[str, bytes]:
    return {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in run.weights().items()
    }


def metric(name: str) -> See:
    return lambda run: run.metric(name)


def fact(kind: str, field: str) -> See:
    """A field of the first event of this kind."""
    return lambda run: run.events(kind)[0][field]


def has_file(name: str) -> See:
    return lambda run: (run.dir / name).is_file()


# What a case may claim.

Case = Callable[[Workshop], None]
Same = Literal["bits", "losses"]


def shows(
    change: str,
    see: See,
    *,
    was: Any,
    now: Any,
    base: tuple[str, ...] = (),
    same: Same | None = None,
) -> Case:
    """The base run shows `was`, the changed one `now`; `same` says what must not differ."""
    assert was != now, f"{change}: a change that shows nothing proves nothing"

    def case(workshop: Workshop) -> None:
        before, after = workshop.run(*base), workshop.run(*base, change)
        assert see(before) == was
        assert see(after) == now
        assert_same(before, after, same)

    return case


def names_the_default(change: str, *, base: tuple[str, ...] = ()) -> Case:
    """Saying it is the same as leaving it out: the recipe comes out as the same config."""

    def case(workshop: Workshop) -> None:
        plain, said = workshop.config(*base), workshop.config(*base, change)
        assert compare_configs(plain, said.model_copy(update={"name": plain.name})) == []

    return case


def alters(
    change: str, see: See = losses, *, base: tuple[str, ...] = (), same: Same | None = None
) -> Case:
    """The two runs show different things; `same` says what must not differ."""

    def case(workshop: Workshop) -> None:
        before, after = workshop.run(*base), workshop.run(*base, change)
        assert see(before), "nothing was seen in the base run"
        assert see(before) != see(after)
        assert_same(before, after, same)

    return case


def prepares(
    change: str, group: str, *, base: tuple[str, ...], num_rows: tuple[int, int] | None = None
) -> Case:
    """The rows of this group differ, and those of the other group do not.

    Nothing is trained: that a run learns from these rows, and evaluates the held-out ones, other
    cases show. `num_rows` are the numbers of rows before and after, where the change is one of
    them.
    """

    def case(workshop: Workshop) -> None:
        before, after = workshop.inputs(*base), workshop.inputs(*base, change)
        trained, held_out = (
            (contents(before.train), contents(after.train)),
            (contents(before.evaluation), contents(after.evaluation)),
        )
        is_same = [one == other for one, other in (trained, held_out)]
        assert is_same == [group != "train", group != "validation"]
        if num_rows is not None:
            changed = trained if group == "train" else held_out
            assert tuple(map(len, changed)) == num_rows

    return case


def contents(chosen: RowSet[RowStore] | RowSet[PromptSet] | None) -> list[Any]:
    """Everything of the chosen rows that training depends on."""
    if chosen is None:
        return []
    found = [chosen.rows[int(row)] for row in chosen.ids]
    return [
        (one.tokens_T.tolist(), one.weights_T.tolist(), label_of(one))
        if isinstance(one, TokenRow)
        else (one.tokens_T.tolist(), one.prompt, dict(one.columns))
        for one in found
    ]


def label_of(row: TokenRow) -> float | None:
    """Return the label of a preference row's completion."""
    return float(dense(row.columns["label"])[0]) if "label" in row.columns else None


def refuses(change: str, why: str, *, base: tuple[str, ...] = ()) -> Case:
    """The base run works; with the change it is refused, for this reason."""

    def case(workshop: Workshop) -> None:
        workshop.run(*base)
        with pytest.raises(HomeostatError, match=why):
            workshop.again(*base, change)

    return case


def prepares_same(one: str, other: str, *, base: tuple[str, ...] = ()) -> Case:
    """Both recipes prepare the same rows."""

    def case(workshop: Workshop) -> None:
        found = [workshop.inputs(*base, change) for change in (one, other)]
        assert contents(found[0].train) == contents(found[1].train)
        assert contents(found[0].evaluation) == contents(found[1].evaluation)

    return case


def refuses_config(change: str, why: str, *, base: tuple[str, ...] = ()) -> Case:
    """The recipe is refused with the change and accepted without it; nothing is run."""

    def case(workshop: Workshop) -> None:
        workshop.config(*base)
        with pytest.raises(HomeostatError, match=why):
            workshop.config(*base, change)

    return case


def all_of(*cases: Case) -> Case:
    def case(workshop: Workshop) -> None:
        for part in cases:
            part(workshop)

    return case


def assert_same(first: Run, second: Run, same: Same | None = "bits") -> None:
    """Compare the final weights (bits), or losses, if sums were taken in another order (losses)."""
    if same == "bits":
        assert weight_bytes(first) == weight_bytes(second)
    elif same == "losses":
        assert losses(first) == pytest.approx(losses(second), rel=1e-5)
        norms = (run.metric("grad_norm") for run in (first, second))
        assert next(norms) == pytest.approx(next(norms), rel=1e-3)
