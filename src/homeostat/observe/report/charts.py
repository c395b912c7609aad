"""Choose the plots of a run: names from the catalogue, grouped, scaled and labelled.

A chart without values is left out, so a CPU run shows no GPU charts.
"""

from __future__ import annotations

from homeostat.observe.report import chart_parts as parts
from homeostat.observe.report.expert_charts import expert_section
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.marked import with_marks
from homeostat.observe.report.plots import Line, Marker, Plot, Section
from homeostat.observe.report.precision_charts import precision_section
from homeostat.observe.report.rl_charts import make_rl_sections
from homeostat.observe.report.series import smooth


def make_sections(facts: RunFacts) -> list[Section]:
    """Return the sections of plots that suit the kind of run."""
    markers = parts.make_markers(facts)
    if facts.is_rl:
        sections = make_rl_sections(facts, markers)
    else:
        sections = [Section("", _row_plots(facts, markers)), _preference_section(facts, markers)]
    sections += [expert_section(facts, markers), precision_section(facts, markers)]
    return with_marks(sections, facts.illnesses, facts.other_remedies)


def _row_plots(facts: RunFacts, markers: list[Marker]) -> list[Plot]:
    columns = facts.columns
    return [
        _loss_plot(facts, markers),
        parts.grad_plot(facts, markers),
        parts.lr_plot(columns, markers),
        parts.update_plot(columns, markers),
        parts.rate_plot(columns, markers),
        Plot("Time per step", "seconds", parts.many(columns, {
            "time/step": "step", "time/data_wait": "waiting for data"}),
            from_zero=True, markers=markers),
        parts.memory_plot(columns, markers),
        parts.utilisation_plot(columns, markers),
        Plot("Data", "percent", parts.many(columns, {
            "data/packing_fill": "packing fill", "data/trained_share": "trained share"},
            factor=100.0), from_zero=True, markers=markers),
        parts.mix_plot(columns, markers),
    ]  # fmt: skip


def _preference_section(facts: RunFacts, markers: list[Marker]) -> Section:
    """Return the plots of preference training; they are empty in other runs."""
    columns = facts.columns
    sides = {"chosen": "chosen", "rejected": "rejected"}
    return Section("Preferences", [
        Plot("Accuracy", "percent of the pairs", parts.many(columns, {
            "preference/accuracy": "training", "eval/preference_accuracy": "evaluation"},
            factor=100.0), from_zero=True, markers=markers,
            about=parts.about("preference/accuracy")),
        Plot("Margin", "implicit reward", parts.many(columns, {
            "preference/margin": "training", "eval/preference_margin": "evaluation"}),
            markers=markers, about=parts.about("preference/margin")),
        Plot("Implicit rewards", "mean", parts.many(columns, {
            f"preference/{side}_reward": label for side, label in sides.items()}),
            markers=markers, about=parts.about("preference/chosen_reward")),
        Plot("Log-probs of completions", "nats", parts.many(columns, {
            f"preference/{side}_logp": label for side, label in sides.items()}),
            markers=markers, about=parts.about("preference/chosen_logp")),
    ], "what is preferred, and by how much")  # fmt: skip


def _loss_plot(facts: RunFacts, markers: list[Marker]) -> Plot:
    lines: list[Line] = []
    train, held_out = facts.columns.get("train/loss"), facts.columns.get("eval/loss")
    if train is not None:
        # The smoothed line comes first, so that hover follows the training steps.
        lines += [
            Line("training", train, 1, "faint", "train/loss"),
            Line("training, smoothed", smooth(train), 1, metric="train/loss"),
        ]
    if held_out is not None:
        lines.append(Line("evaluation", held_out, 2, "dots", "eval/loss"))
    unit = "per pair or row" if "preference/accuracy" in facts.columns else "nats per token"
    return Plot(
        "Loss", unit, lines, size="main", allow_log=True, best=facts.best_eval,
        markers=markers, about=parts.about("train/loss"),
    )  # fmt: skip
