"""Check a recipe that trains on given rows before the first step: rows and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from homeostat.config.trainer import TrainerConfig
from homeostat.data.inputs import Part
from homeostat.data.store import RowStore
from homeostat.observe import format as fmt
from homeostat.run.preflight.item import Item, Level
from homeostat.types import StepPlan


def row_item(part: Part, store: RowStore, *, unit: str = "rows") -> Item:
    """Return how many rows, or pairs of them, were kept, and how many tokens they have."""
    report = store.report
    lost = report.seen - report.kept
    share = report.trained_tokens / report.tokens
    text = (
        f"{part}: {report.kept} of {report.seen} {unit} kept, {fmt.count(report.tokens)} tokens, "
        f"{100 * share:.0f} % trained, longest row {int(store.lengths.max())}"
    )
    if lost:
        text += f"; {report.dropped_overlong} too long, {report.num_bad} unusable"
    level: Level = "warning" if lost > 0.1 * report.seen else "ok"
    facts = {name: v for name, v in report.to_json().items() if "examples" not in name}
    return Item("data", level, text, {"which": part, **facts})


def row_size_items(
    trainer: TrainerConfig,
    plans: Sequence[StepPlan],
    *,
    num_rows: int,
    total_steps: int,
    unit: str = "rows",
) -> Iterator[Item]:
    """Show the sizes of an update. `plans` are the first of the run, to measure packing by.

    `unit` is what `num_rows` and trainer.batch_rows count.
    """
    tokens = sum(plan.num_tokens for plan in plans) / len(plans)
    batches = sum(len(plan.micro_batches) for plan in plans) / len(plans)
    largest = max(batch.num_tokens for plan in plans for batch in plan.micro_batches)
    warmup = trainer.schedule.num_warmup_steps(total_steps)
    facts = {
        "rows": num_rows,
        "steps_per_epoch": trainer.steps_per_epoch(num_rows),
        "total_steps": total_steps,
        "warmup_steps": warmup,
        "rows_per_update": trainer.batch_rows,
        "tokens_per_update": round(tokens),
        "micro_batches_per_update": batches,
        "largest_micro_batch_tokens": largest,
    }
    text = (
        f"{num_rows} {unit} / {trainer.batch_rows} per update = {facts['steps_per_epoch']} "
        f"updates an epoch; {total_steps} in all, {warmup} of them warm-up; an update has about "
        f"{fmt.count(tokens)} tokens in {batches:.1f} micro-batches of at most {largest}"
    )
    yield Item("sizes", "ok", text, facts)
    if trainer.batch_rows > num_rows:
        few = f"trainer.batch_rows={trainer.batch_rows} is more than the {num_rows} {unit}"
        yield Item("sizes", "warning", few)
