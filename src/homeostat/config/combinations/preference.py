"""Find settings of preference training that cannot work together or have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.data import (
    AutoSource,
    PreferenceSource,
    RlSource,
    SftSource,
    UnpairedPreferenceSource,
    all_sources,
)
from homeostat.config.kind import RunKind
from homeostat.config.preference import KtoConfig, PreferenceAlgorithm
from homeostat.config.rollout import AdapterOffReference, InitialReference
from homeostat.config.run import RunConfig
from homeostat.errors import Problem


def find_preference_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of preference settings, and those settings in runs of other kinds."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PreferenceAlgorithm):
        yield from _elsewhere(config)
        if config.kind is RunKind.SFT:
            yield from _sft(config)
        return
    yield from _sources(config, algorithm)
    yield from _reference(config, algorithm)
    if isinstance(algorithm, KtoConfig) and config.trainer.batch_rows < 2:
        yield Problem(
            "trainer.batch_rows",
            "kto pairs each prompt with the completion of another row of the batch to estimate "
            "its baseline, and a batch of one row has no other row.",
            "Set it to 2 or more.",
        )


def _elsewhere(config: RunConfig) -> Iterator[Problem]:
    if "preference" in config.model_fields_set:
        yield Problem(
            "preference",
            f"algorithm.type={config.algorithm.type} does not learn from preferences, so it would "
            "have no effect.",
            "Remove it, or set algorithm.type to dpo or another preference algorithm.",
        )


def _sft(config: RunConfig) -> Iterator[Problem]:
    if config.reference is not None:
        yield Problem(
            "reference",
            "supervised fine-tuning does not compare the policy with another model, so a "
            "reference would have no effect.",
            "Remove it, or set algorithm.type to dpo, grpo or another algorithm that does.",
        )
    for place, source in all_sources(config.data):
        if not isinstance(source, SftSource | AutoSource):
            what = "no" if isinstance(source, RlSource) else "more than the"
            yield Problem(
                f"{place}.type",
                f"rows of a {source.type} source have {what} completion to train on.",
                "Use messages, prompt_completion or text, or set algorithm.type to an algorithm "
                "for such rows (dpo, kto, grpo ...).",
            )


def _sources(config: RunConfig, algorithm: PreferenceAlgorithm) -> Iterator[Problem]:
    fitting = "preference (pairs)" if algorithm.paired else "preference or unpaired_preference"
    for place, source in all_sources(config.data):
        if not isinstance(source, PreferenceSource | UnpairedPreferenceSource | AutoSource):
            yield Problem(
                f"{place}.type",
                f"rows of a {source.type} source do not say which completion is better.",
                f"Use {fitting}.",
            )
        elif isinstance(source, UnpairedPreferenceSource) and algorithm.paired:
            yield Problem(
                f"{place}.type",
                f"{config.algorithm.type} compares two completions of a prompt, and rows of an "
                "unpaired_preference source have one.",
                "Use preference (pairs), or algorithm.type=kto.",
            )


def _reference(config: RunConfig, algorithm: PreferenceAlgorithm) -> Iterator[Problem]:
    reference = config.reference
    is_live = config.preference.reference_logps == "live"
    if not algorithm.needs_reference:
        why = f"{config.algorithm.type} does not use a reference."
        if reference is not None:
            yield Problem("reference", why, "Remove it.")
        if "reference_logps" in config.preference.model_fields_set:
            yield Problem("preference.reference_logps", why, "Remove it.")
        return
    if isinstance(reference, AdapterOffReference) and config.lora is None:
        yield Problem(
            "reference.type",
            "there is no adapter to switch off.",
            "Set lora, or use type: initial.",
        )
    if isinstance(reference, InitialReference) and reference.refresh_steps and not is_live:
        yield Problem(
            "reference.refresh_steps",
            "precomputed log-probs belong to the reference at the start of the run, so a newer "
            "reference would not be used.",
            "Set preference.reference_logps=live, or remove it.",
        )


def find_late_precision(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if rows are scored under the reference before layers are quantised.

    The policy's log-probs have the quantisation's error from its first step on, and the loss would
    take that error for what the policy has learnt.
    """
    if not config.precomputes_reference or config.used_reference is None:
        return
    for name in ("fp8", "int4"):
        low = getattr(config.trainer, name)
        if low is not None and low.start_step > 1:
            yield Problem(
                f"trainer.{name}.start_step",
                "preference.reference_logps=precomputed scores all rows under the reference before "
                f"the first step, without {name.upper()}, and from step {low.start_step} on the "
                "policy would be compared with it in another precision.",
                f"Set preference.reference_logps=live, or trainer.{name}.start_step=1.",
            )
