"""The numbers at the top of the page."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.observe import format as fmt
from homeostat.observe.report.elements import tile
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.series import Series


def make_tiles(facts: RunFacts) -> list[str]:
    """Return the tiles: first the result of the run, then its cost."""
    results = _reward_tiles(facts) if facts.is_rl else _loss_tiles(facts)
    costs = [*_length_tiles(facts), *_cost_tiles(facts)]
    return [*results, *costs] if facts.is_rl else [*costs[:2], *results, *costs[2:]]


def _known(facts: RunFacts, name: str) -> Series | None:
    series = facts.columns.get(name)
    return series if series is not None and series.finite.size else None


def _loss_tiles(facts: RunFacts) -> Iterator[str]:
    if train := _known(facts, "train/loss"):
        first, last = train.finite[0], train.finite[-1]
        yield tile("Training loss", fmt.loss(last), f"from {fmt.loss(first)}")
    if best := facts.best_eval:
        yield tile("Best eval loss", fmt.loss(best[1]), f"step {best[0]:,.0f}")
        yield tile("Final eval loss", fmt.loss(facts.columns["eval/loss"].y[-1]))


def _reward_tiles(facts: RunFacts) -> Iterator[str]:
    if reward := _known(facts, "reward"):
        first, last = reward.finite[0], reward.finite[-1]
        yield tile("Reward", fmt.number(last), f"from {fmt.number(first)}")
    if best := facts.best_eval:
        yield tile("Best held-out", fmt.number(best[1]), f"step {best[0]:,.0f}")
    if solved := _known(facts, "eval/pass@1"):
        first, last = solved.finite[0], solved.finite[-1]
        yield tile("Pass@1", fmt.percent(last), f"from {fmt.percent(first)}")


def _length_tiles(facts: RunFacts) -> Iterator[str]:
    total = facts.told("total_steps")
    yield tile("Steps", f"{facts.last_step:,}", f"of {total:,}" if isinstance(total, int) else "")
    yield tile("Time", fmt.duration(facts.duration_s))


def _cost_tiles(facts: RunFacts) -> Iterator[str]:
    if tokens := _known(facts, "num_tokens"):
        epochs = facts.columns.get("epoch")
        passes = f"{epochs.y[-1]:.3g}" if epochs is not None else ""
        unit = "" if not passes else " epoch" if passes == "1" else " epochs"
        yield tile("Tokens", fmt.count(tokens.finite[-1]), passes + unit)
    if speed := _known(facts, "throughput/tokens_per_s"):
        middle = sorted(speed.finite.tolist())[speed.finite.size // 2]
        yield tile("Tokens/s", fmt.count(middle), "median")
    for name, label in (("memory/max_alloc", "Memory"), ("memory/host_rss", "Host memory")):
        series = facts.columns.get(name)
        if series is not None and series.finite.any():
            yield tile(label, fmt.byte_size(float(series.finite.max())), "peak")
            break
