"""The plots of an RL run, in the order in which such a run is judged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from homeostat.observe.report import chart_parts as parts
from homeostat.observe.report.engine_charts import engine_section
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.plots import NUM_COLOURS, Band, Line, Marker, Plot, Section
from homeostat.observe.report.series import Array, Series, on_steps_of, smooth

Columns = dict[str, Series]

_TIMES = {"time/generate": "generate", "time/reward": "reward", "time/score": "score",
          "time/train": "train"}  # fmt: skip


def make_rl_sections(facts: RunFacts, markers: list[Marker]) -> list[Section]:
    """Return the sections of plots of an RL run."""
    columns = facts.columns
    return [
        Section("", [_reward_plot(facts, markers)]),
        Section("Rewards", _reward_plots(columns, markers), "what was earned, and by whom"),
        Section("Energies", _energy_plots(columns, markers), "features of samples and truth"),
        Section("Completions", _completion_plots(columns, markers), "as they were sampled"),
        Section("Policy", _policy_plots(columns, markers), "how the model moved"),
        engine_section(facts, markers),
        Section("Optimisation and cost", [
            Plot("Loss", "as normalised", parts.one(columns, "train/loss"), markers=markers,
                 about=parts.about("train/loss")),
            parts.grad_plot(facts, markers),
            parts.lr_plot(columns, markers),
            parts.update_plot(columns, markers),
            _time_plot(columns, markers),
            parts.rate_plot(columns, markers),
            parts.memory_plot(columns, markers),
            parts.utilisation_plot(columns, markers),
        ]),
    ]  # fmt: skip


def _reward_plot(facts: RunFacts, markers: list[Marker]) -> Plot:
    lines: list[Line] = []
    bands: list[Band] = []
    reward, held_out = facts.columns.get("reward"), facts.columns.get("eval/reward")
    if reward is not None:
        middle = smooth(reward)
        lines = [
            Line("step", reward, 1, "faint", "reward"),
            Line("smoothed", middle, 1, metric="reward"),
        ]
        deviation = Series(reward.x, on_steps_of(reward, facts.columns.get("reward_std")))
        spread = smooth(deviation).y
        bands = [Band("deviation within a group", deviation, middle.y - spread, middle.y + spread)]
    if held_out is not None:
        lines.append(Line("held-out prompts", held_out, 2, "dots", "eval/reward"))
    return Plot("Reward", "mean of the step's completions", lines, bands=bands, size="main",
                best=facts.best_eval, from_zero=True, markers=markers,
                about=parts.about("reward"))  # fmt: skip


def _reward_plots(columns: Columns, markers: list[Marker]) -> list[Plot]:
    return [
        Plot("Held-out pass@k", "percent of the prompts", _pass_lines(columns), from_zero=True,
             markers=markers, about=parts.about("eval/pass@1")),
        _functions_plot(columns, markers),
        Plot("Groups without a signal", "percent, all rewards of the group equal",
             parts.many(columns, {"frac_reward_zero_std": "groups"}, factor=100.0),
             from_zero=True, markers=markers, about=parts.about("frac_reward_zero_std")),
        Plot("Samples not trained", "percent",
             parts.unless_zero(columns, {"rollout/untrained_share": "samples"}, factor=100.0),
             from_zero=True, markers=markers, about=parts.about("rollout/untrained_share")),
        Plot("Groups passed over", "groups per record", parts.unless_zero(columns, {
            "rollout/groups_passed_over": "all", **parts.labelled(columns, r"filter/([^/]+)")}),
            from_zero=True, markers=markers, about=parts.about("rollout/groups_passed_over")),
        Plot("Solve rate", "percent of the samples", parts.many(columns, {
            "curriculum/solve_rate": "prompts seen", "curriculum/drawn_rate": "prompts drawn"},
            factor=100.0), from_zero=True, markers=markers,
            about=parts.about("curriculum/solve_rate")),
        parts.mix_plot(columns, markers),
        Plot("Rewards without a value", "samples per record",
             parts.unless_zero(columns, parts.labelled(columns, r"rewards/([^/]+)/failed")),
             from_zero=True, markers=markers,
             about="Samples for which a reward function gave no value."),
        *(Plot(label, "logged by the reward", [Line(label, columns[name], metric=name)],
               markers=markers)
          for name, label in parts.labelled(columns, r"rewards/([^/]+/logged/.+)").items()),
    ]  # fmt: skip


def _energy_plots(columns: Columns, markers: list[Marker]) -> list[Plot]:
    return [
        Plot("Likeness in feature space", "at most 2",
             parts.many(columns, {"ebft/alignment": "to the truth",
                                  "ebft/diversity": "among samples"}),
             markers=markers, about=parts.about("ebft/alignment")),
        Plot("Feature-matching loss", "squared distance", parts.one(columns, "ebft/cfm_loss"),
             from_zero=True, markers=markers, about=parts.about("ebft/cfm_loss")),
        Plot("Cross-entropy of the truth", "nats per token", parts.one(columns, "ebft/ce_loss"),
             markers=markers, about=parts.about("ebft/ce_loss")),
    ]  # fmt: skip


def _pass_lines(columns: Columns) -> list[Line]:
    sizes = sorted(map(int, parts.labelled(columns, r"eval/pass@(\d+)").values()))
    if len(sizes) > 5:
        sizes = sorted({sizes[round(place)] for place in np.linspace(0, len(sizes) - 1, 5)})
    names = {f"eval/pass@{k}": f"pass@{k}" for k in sizes}
    # If no single reward decides what is solved, show pass@1 of each.
    names |= parts.labelled(columns, r"eval/pass@1/([^/]+)")
    return [replace(line, style="dots") for line in parts.many(columns, names, factor=100.0)]


def _functions_plot(columns: Columns, markers: list[Marker]) -> Plot:
    """Plot one line per reward function, with faint dots where it was evaluated."""
    names = parts.labelled(columns, r"rewards/([^/]+)/mean")
    lines = parts.many(columns, names)
    held_out = parts.labelled(columns, r"eval/rewards/([^/]+)/mean")
    for name, label in held_out.items():
        colour = list(names.values()).index(label) if label in names.values() else 0
        colour = colour % NUM_COLOURS + 1
        lines.append(Line(f"{label}, held-out", columns[name], colour, "dots", name))
    # A single function is the reward itself, which is already drawn above.
    return Plot("By function", "mean value", lines if len(names) > 1 else [], markers=markers,
                about="Mean value of each reward function, before weights.")  # fmt: skip


def _completion_plots(columns: Columns, markers: list[Marker]) -> list[Plot]:
    lengths = {
        "completions/mean_length": "mean",
        "completions/mean_terminated_length": "mean of those not cut",
        "eval/completions/mean_length": "mean, held-out",
    }
    cut = {
        "completions/clipped_ratio": "training",
        "eval/completions/clipped_ratio": "held-out",
    }
    return [
        Plot("Length", "tokens", parts.many(columns, lengths), from_zero=True, markers=markers,
             bands=_between(columns, "completions/mean_length", "completions/min_length",
                            "completions/max_length", "shortest to longest"),
             about=parts.about("completions/mean_length")),
        Plot("Cut", "percent of the completions", parts.many(columns, cut, factor=100.0),
             from_zero=True, markers=markers, about=parts.about("completions/clipped_ratio")),
        Plot("Penalty for length", "reward", parts.unless_zero(
            columns, {"rollout/overlong_penalty": "penalty"}), markers=markers,
             about=parts.about("rollout/overlong_penalty")),
    ]  # fmt: skip


def _policy_plots(columns: Columns, markers: list[Marker]) -> list[Plot]:
    clipped = {"clip_ratio/low_mean": "lower bound", "clip_ratio/high_mean": "upper bound"}
    ratio = "policy/ratio_"
    return [
        Plot("Entropy", "nats per token", parts.one(columns, "entropy"), from_zero=True,
             markers=markers, about=parts.about("entropy")),
        Plot("Distinct texts", "percent", parts.many(
            columns, {"completions/distinct_share": "distinct"}, factor=100.0), from_zero=True,
             markers=markers, about=parts.about("completions/distinct_share")),
        Plot("KL from the reference", "nats per token", parts.one(columns, "kl"), allow_log=True,
             markers=markers, about=parts.about("kl")),
        Plot("Weight of the KL penalty", "",
             parts.unless_zero(columns, {"kl_coefficient": "weight"}), from_zero=True,
             markers=markers, about=parts.about("kl_coefficient")),
        Plot("KL of the update", "nats per token", parts.one(columns, "policy/update_kl"),
             allow_log=True, markers=markers, about=parts.about("policy/update_kl")),
        Plot("Clipped", "percent of the tokens", parts.many(columns, clipped, factor=100.0),
             from_zero=True, markers=markers, about=parts.about("clip_ratio/region_mean")),
        Plot("Ratio of new to old policy", "smallest, mean, largest", parts.many(columns, {
            f"{ratio}max": "largest", f"{ratio}mean": "mean", f"{ratio}min": "smallest"}),
             prefer_log=True, markers=markers, about=parts.about("policy/ratio_mean")),
    ]  # fmt: skip


def _time_plot(columns: Columns, markers: list[Marker]) -> Plot:
    """Plot the parts of a step on top of each other, up to its total time."""
    step = columns.get("time/step")
    if step is None:
        return Plot("Time per step", "seconds", [])
    found = {
        label: _or_zero(on_steps_of(step, columns.get(name)))
        for name, label in _TIMES.items()
        if name in columns
    }
    # The timers of the parts overlap slightly, so the rest is clamped at 0.
    rest: Array = np.maximum(step.y - sum(found.values(), np.zeros_like(step.y)), 0.0)
    metrics = {label: name for name, label in _TIMES.items()}
    bands: list[Band] = []
    low = np.zeros_like(step.y)
    for number, (label, seconds) in enumerate((found | {"other": rest}).items(), start=1):
        series = Series(step.x, seconds)
        metric = metrics.get(label, "time/step")
        bands.append(Band(label, series, low, low + seconds, number, "stack", metric))
        low = low + seconds
    return Plot("Time per step", "seconds", [], bands=bands, from_zero=True, markers=markers,
                about=parts.about("time/step"))  # fmt: skip


def _or_zero(values: Array) -> Array:
    return np.where(np.isfinite(values), values, 0.0)


def _between(columns: Columns, middle: str, low: str, high: str, label: str) -> list[Band]:
    if middle not in columns or low not in columns or high not in columns:
        return []
    steps = columns[middle]
    top = on_steps_of(steps, columns[high])
    return [Band(label, Series(steps.x, top), on_steps_of(steps, columns[low]), top)]
