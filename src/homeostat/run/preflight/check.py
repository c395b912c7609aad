"""Check a recipe before the first step: device, model, data, sizes, memory, disk, health rules.

A failing check does not stop the others: `homeostat check` shows all results.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from homeostat.algorithms.row_loss import row_loss
from homeostat.config.combinations.check import count_steps
from homeostat.config.run import RunConfig
from homeostat.data.copies import row_facts
from homeostat.data.inputs import (
    Inputs,
    Part,
    choose_rows,
    parts_of,
    prepare_prompt_part,
    prepare_row_part,
    require_known_tokens,
    require_turn_end,
)
from homeostat.data.loader import PlanLoader
from homeostat.data.prompts import PromptSet
from homeostat.data.store import RowStore
from homeostat.data.template_probe import probe_template, uses_chat
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.errors import HomeostatError, MissingDependencyError
from homeostat.models.expert_offload import require_experts
from homeostat.models.moe import require_even_experts
from homeostat.models.preview import ModelPreview, preview_model
from homeostat.observe import format as fmt
from homeostat.precision.bases import base_rewrite
from homeostat.run.healing.tokenizer_probe import compare_tokenizers
from homeostat.run.preflight.cluster import cluster_items
from homeostat.run.preflight.disk import checkpoint_bytes, disk_item, existing
from homeostat.run.preflight.energy import energy_item
from homeostat.run.preflight.experts import expert_item
from homeostat.run.preflight.health import (
    compile_facts,
    disk_facts,
    health_items,
    machine_facts,
)
from homeostat.run.preflight.item import Item
from homeostat.run.preflight.mixing import filter_items, mix_items
from homeostat.run.preflight.model import model_items
from homeostat.run.preflight.plugins import plugin_items
from homeostat.run.preflight.precision import precision_items
from homeostat.run.preflight.reward_model import label_items
from homeostat.run.preflight.rl import (
    engine_items,
    evaluation_items,
    other_run_items,
    prompt_item,
    reward_items,
    size_items,
)
from homeostat.run.preflight.sft import row_item, row_size_items
from homeostat.run.sizing.estimate import (
    MemoryPlan,
    largest_rl_batch,
    plan_memory,
    with_columns,
)
from homeostat.run.sizing.token_budget import as_chosen, choose_tokens, tokens_line
from homeostat.train.cores import PLAIN, slowdown_of_bf16
from homeostat.train.runtime import choose_way, resolve_device, resolve_dtype, resolve_runtime
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.train.sequence.heads import require_sequence
from homeostat.types import StepPlan

# bf16 on a CPU is not worth its memory if it takes more than this many times as long as fp32.
MAX_SLOWDOWN = 1.5
# Number of steps that are planned to show how rows are packed into micro-batches.
NUM_PLANS_SHOWN = 20


class Preflight:
    """Runs the checks in order. A later check uses what an earlier one has loaded."""

    def __init__(self, config: RunConfig, *, progress: Callable[[int, int], None]) -> None:
        self.config = config
        self.progress = progress
        self.tokenizer: ChatTokenizer | None = None
        # Rows to train on, or prompts of an RL run; None unless they could be read.
        self.rows: Inputs[RowStore] | None = None
        self.prompts: Inputs[PromptSet] | None = None
        self.held_out: RowStore | PromptSet | None = None
        self.preview: ModelPreview | None = None
        self.way = PLAIN
        self.exit_code = 0

    def run(self) -> Iterator[Item]:
        """Yield the result of every check. An error becomes an item, and sets `exit_code`."""
        rows: tuple[tuple[str, Callable[[], Iterator[Item]]], ...] = (
            ("data", self._data),
            ("sizes", self._sizes),
        )
        if self.config.is_rl:
            rows = (
                ("data", self._prompts),
                ("sizes", self._rl_sizes),
                ("engine", self._engine),
                ("inputs", lambda: other_run_items(self.config)),
                ("rewards", self._rewards),
            )
        checks: tuple[tuple[str, Callable[[], Iterator[Item]]], ...] = (
            ("plug-ins", lambda: plugin_items(self.config)),
            ("device", self._device),
            ("cluster", self._cluster),
            ("tokenizer", self._tokenizer),
            ("model", self._model),
            *rows,
            ("memory", self._memory),
            ("disk", self._disk),
            ("sinks", self._sinks),
            ("run folder", self._run_folder),
            ("health", self._health),
        )
        said: set[str] = set()
        for name, check in checks:
            try:
                yield from check()
            except HomeostatError as error:
                self.exit_code = max(self.exit_code, error.exit_code)
                # Tokenizer and model share a folder: report a problem of the folder only once.
                if str(error) not in said:
                    yield Item(name, "error", str(error))
                said.add(str(error))

    def read_inputs(self) -> None:
        """Load only device, tokenizer, model shape and rows. Raises on the first problem."""
        rows = self._prompts if self.config.is_rl else self._data
        for check in (self._device, self._tokenizer, self._model, rows):
            for _ in check():
                pass

    def _device(self) -> Iterator[Item]:
        device = resolve_device(self.config)
        dtype = str(resolve_dtype(self.config.trainer, device)).removeprefix("torch.")
        ranks = self.config.ranks_line
        text = f"{device}, {dtype}" + (f"; {ranks}" if ranks else "")
        facts: dict[str, Any] = {"device": str(device)}
        slow = slowdown_of_bf16() if (device.type, dtype) == ("cpu", "bfloat16") else 0.0
        if slow:
            facts["bf16_slowdown"] = round(slow, 1)
            text += f", which takes this CPU {slow:.1f} times as long as fp32 (measured)"
        if device.type == "cpu":
            cores = choose_way(self.config.trainer, self.config.mesh, device)
            self.way = cores.way
            facts |= {"threads": cores.way.threads, "lanes": cores.way.lanes}
            text += f"; {cores}"
        yield Item("device", "warning" if slow > MAX_SLOWDOWN else "ok", text, facts)

    def _cluster(self) -> Iterator[Item]:
        device = resolve_device(self.config).type
        for item in cluster_items(self.config, device=device):
            self.exit_code = max(self.exit_code, 2 if item.level == "error" else 0)
            yield item

    def _tokenizer(self) -> Iterator[Item]:
        self.tokenizer = load_tokenizer(self.config.model)
        stops = sorted(self.tokenizer.stop_ids)
        shown = ", ".join(repr(self.tokenizer.decode([stop])) for stop in stops)
        yield Item(
            "tokenizer",
            "ok",
            f"{self.tokenizer.vocab_size} tokens; a turn ends with {shown}",
            {"vocab_size": self.tokenizer.vocab_size, "stop_ids": stops},
        )
        for note in self.tokenizer.notes:
            yield Item("tokenizer", "ok", note)

    def _model(self) -> Iterator[Item]:
        device = resolve_device(self.config)
        dtype = resolve_dtype(self.config.trainer, device)
        on_host = self.config.trainer.backend.on_host
        place: dict[str, Any] = {"dtype": dtype, "device": device, "on_host": on_host}
        place |= {"hold": base_rewrite(self.config.model)}
        self.preview = preview_model(self.config.model, self.config.lora, **place)
        decoder = self.preview.decoder
        moe = None if decoder is None else decoder.moe
        if on_host == "experts":
            require_experts(moe)
        require_even_experts(moe, ep=self.config.mesh.ep)
        if decoder is not None:
            require_sequence(decoder, self.config.mesh)
        active = decoder.num_active_params if decoder is not None and decoder.moe else None
        facts = {
            "num_params": self.preview.num_params,
            **({} if active is None else {"num_active_params": active}),
            "num_trainable": self.preview.num_trainable,
            "bytes": self.preview.num_bytes,
        }
        text = (
            f"{self.preview.family}, {fmt.count(self.preview.num_params)} parameters, "
            + ("" if active is None else f"{fmt.count(active)} of them for each token, ")
            + f"{fmt.count(self.preview.num_trainable)} trained, {fmt.byte_size(facts['bytes'])}"
        )
        if self.config.model.quantization is not None:
            text += f" with its linear maps in {self.config.model.quantization}"
        num_shards = self.config.mesh.num_shards
        if num_shards > 1:
            facts["bytes_per_rank"] = math.ceil(facts["bytes"] / num_shards)
            text += f", {fmt.byte_size(facts['bytes_per_rank'])} on each rank"
        yield Item("model", "ok", text, facts)
        if decoder is not None and decoder.moe is not None:
            place = {"are_offloaded": on_host is not None, "ep": self.config.mesh.ep}
            yield expert_item(self.config.model.moe, decoder, decoder.moe, **place)
        yield from precision_items(self.config, device)
        yield from model_items(self.config, self.preview)

    def _data(self) -> Iterator[Item]:
        if self.tokenizer is None:
            return
        for part in parts_of(self.config.data):
            rows = self._prepare(part)
            if part == "train":
                self.rows = choose_rows(self.config.for_inputs, rows, None)
            else:
                self.held_out = rows
            yield row_item(part, rows, unit=self._unit)
            self._require_known_tokens(rows, part)

    @property
    def _unit(self) -> str:
        return "rows" if self.config.rows_per_example == 1 else "pairs"

    def _prompts(self) -> Iterator[Item]:
        if self.tokenizer is None:
            return
        config = self.config.for_inputs
        for part in parts_of(config.data):
            prompts = prepare_prompt_part(config, self.tokenizer, part, progress=self.progress)
            require_turn_end(config, self.tokenizer, prompts, part)
            if part == "train":
                self.prompts = choose_rows(config, prompts, None)
            else:
                self.held_out = prompts
            yield prompt_item(part, prompts)
            self._require_known_tokens(prompts, part)

    def _require_known_tokens(self, rows: RowStore | PromptSet, part: Part) -> None:
        if self.preview is not None:
            require_known_tokens(rows, part, vocab_size=self.preview.vocab_size)

    def _rl_sizes(self) -> Iterator[Item]:
        if self.prompts is not None:
            yield from size_items(self.config, self.prompts)
            yield from mix_items(self.config, self.prompts.train)
            if self.config.has_validation:
                functions = self.config.reward_functions
                yield from evaluation_items(functions, self.config.eval.sampling)

    def _engine(self) -> Iterator[Item]:
        if self.prompts is not None and self.preview is not None:
            prompts, lanes = self.prompts.train.rows, self.way.lanes
            yield from engine_items(self.config, self.preview, prompts, lanes=lanes)

    def _rewards(self) -> Iterator[Item]:
        if self.prompts is None or self.tokenizer is None:
            return
        functions, prompts = self.config.reward_functions, self.prompts.train.rows
        if self.config.energy is not None:
            yield energy_item(self.config.energy, prompts, preview=self.preview)
        tried = reward_items(functions, prompts, self.tokenizer)
        for item in chain(tried, filter_items(self.config, prompts)):
            self.exit_code = max(self.exit_code, 2 if item.level == "error" else 0)
            yield item

    def _prepare(self, part: Part) -> RowStore:
        assert self.tokenizer is not None
        cache = self.config.data.cache_dir
        folder = Path(cache) if cache is not None else self.config.run_dir / "data"
        # A check leaves no files behind: mapped rows stay readable after their files are deleted.
        with tempfile.TemporaryDirectory(prefix="homeostat-check-") as temporary:
            return prepare_row_part(
                self.config.data,
                self.tokenizer,
                part,
                cache_dir=folder if folder.is_dir() else Path(temporary),
                progress=self.progress,
            )

    def _sizes(self) -> Iterator[Item]:
        if self.rows is None:
            return
        config, num_rows = self.config, len(self.rows.train)
        plans, total = self._plans(as_chosen(config, resolve_runtime(config, kept=PLAIN)))
        sizes = {"num_rows": num_rows, "total_steps": total}
        yield from row_size_items(config.trainer, plans, **sizes, unit=self._unit)
        yield from mix_items(config, self.rows.train)
        yield from label_items(config, self.rows.train)
        count_steps(config, num_rows)

    def _memory(self) -> Iterator[Item]:
        if self.preview is None or (self.rows is None and self.prompts is None):
            return
        if self.config.model.implementation != "native":
            text = "not estimated: only the native decoder can be estimated without data"
            yield Item("memory", "ok", text)
            return
        plan = self.memory_plan(self.config)
        chosen = choose_tokens(self.config, resolve_runtime(self.config, kept=PLAIN))
        text = (
            f"about {fmt.byte_size(plan.peak)} at most on {plan.device}, "
            f"{fmt.byte_size(plan.capacity)} are available{tokens_line(chosen)}"
        )
        if not plan.fits:
            # Only a warning, because an estimate is no proof: the run would still try.
            text += ". See `homeostat estimate` for what would make it fit"
        yield Item("memory", "ok" if plan.fits else "warning", text, plan.as_json())

    def memory_plan(self, config: RunConfig) -> MemoryPlan:
        """Return the memory plan of this recipe, or of one that differs only in memory settings."""
        assert self.preview is not None, "call run() or read_inputs() first"
        runtime = resolve_runtime(config, kept=self.way)
        config = as_chosen(config, runtime)
        if config.is_rl:
            assert self.prompts is not None
            prompts = self.prompts.train.rows
            batch = largest_rl_batch(config, prompts)
            longest = int(prompts.lengths.max())
            return plan_memory(config, runtime, batch, preview=self.preview, longest_prompt=longest)
        plans, _ = self._plans(config)
        batches = (batch for plan in plans for batch in plan.micro_batches)
        batch = max(batches, key=lambda batch: batch.num_tokens)
        return plan_memory(config, runtime, with_columns(config, batch), preview=self.preview)

    def _plans(self, config: RunConfig) -> tuple[list[StepPlan], int]:
        """Return the first step plans over given rows, and the number of steps in all."""
        assert self.rows is not None
        train = self.rows.train
        loss = row_loss(config.algorithm, preference=config.preference, data=config.data)
        with PlanLoader(
            train.rows, row_ids=train.ids, trainer=config.trainer, data=config.data,
            loss=loss, seed=config.seed, num_data_groups=config.mesh.num_data_groups,
        ) as plans:  # fmt: skip
            total = plans.total_steps
            return [plans.plan(step) for step in range(1, min(total, NUM_PLANS_SHOWN) + 1)], total

    def _disk(self) -> Iterator[Item]:
        if self.preview is None:
            return
        item = disk_item(self.config.checkpoint, self.preview, run_dir=self.config.run_dir)
        self.exit_code = max(self.exit_code, 1 if item.level == "error" else 0)
        yield item

    def _health(self) -> Iterator[Item]:
        """Evaluate the health rules on all facts that the earlier checks found."""
        facts: dict[str, Any] = {}
        inputs = self.prompts or self.rows
        if inputs is not None:
            facts |= row_facts(inputs.train.rows, self.held_out)
        if self.prompts is not None:
            facts["longest_prompt"] = int(self.prompts.train.rows.lengths.max())
        if self.preview is not None:
            facts |= {"vocab_size": self.preview.vocab_size, "model_bytes": self.preview.num_bytes}
            facts["model_length"] = self.preview.max_positions
            place = existing(self.config.run_dir)
            facts |= disk_facts(place, checkpoint_bytes=checkpoint_bytes(self.preview))
        facts |= machine_facts()
        facts["tokenizer_compared"] = compare_tokenizers(self.config.model)
        if self.tokenizer is not None and uses_chat(self.config.data):
            facts["chat_template_probed"] = probe_template(self.tokenizer)
        facts |= compile_facts(self.config.trainer)
        for item in health_items(self.config, facts):
            self.exit_code = max(self.exit_code, 1 if item.level == "error" else 0)
            yield item

    def _sinks(self) -> Iterator[Item]:
        for sink in self.config.observe.sinks:
            if importlib.util.find_spec(sink.type) is None:
                raise MissingDependencyError.of(
                    sink.type, extra=sink.type, needed_for=f"the sink {sink.type}"
                )
            yield Item("sinks", "ok", sink.type)

    def _run_folder(self) -> Iterator[Item]:
        store = CheckpointStore(self.config.run_dir / "checkpoints")
        if not self.config.run_dir.exists():
            yield Item("run folder", "ok", f"{self.config.run_dir} is new")
            return
        found = store.newest_valid()
        where = f"step {found.step}" if found is not None else "the beginning"
        yield Item("run folder", "ok", f"{self.config.run_dir} would resume from {where}")
