"""Cases of the keys that say how completions are sampled, by what, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.every_key.rl_workshop import (
    OTHER_REFERENCE,
    PRETRAINED,
    SAMPLED_ONLY,
    SAVED,
    evaluated,
    only,
    samples,
    texts,
)
from tests.support.every_key.workshop import (
    Case,
    Run,
    See,
    Workshop,
    all_of,
    alters,
    assert_same,
    fact,
    kept_steps,
    losses,
    metric,
    names_the_default,
    refuses,
    shows,
    weight_bytes,
)
from torch import nn

from homeostat.observe.completions import completion_steps
from homeostat.observe.jsonl import iter_jsonl
from homeostat.rollout.journal import Journal
from homeostat.rollout.native.memory import free_bytes

# Drawn, not greedy, so that what cuts the distribution shows.
HELD_OUT = ("data.validation_share=0.25", "eval.sampling.temperature=1.0")
INVARIANT = ("model.numerics=invariant",)
TWO_STEPS = ("trainer.max_steps=2", "checkpoint.interval_steps=1", "checkpoint.keep_last=1")
PROFILED = (*SAVED, "observe.profiler={steps: [1]}")
KL = (*SAVED, "algorithm.kl={coefficient: 1.0}")
ADAPTED = (*KL, *PRETRAINED, "lora={rank: 4, path: adapter}")
# A second reward that every completion earns.
EARNED = (
    "rewards.functions=[{type: regex_format, pattern: '[0-2].*'},"
    " {type: regex_format, pattern: '.*', name: any}]"
)


def num_samples(run: Run) -> int:
    return len(texts(run))


def group_sizes(run: Run) -> list[int]:
    groups = samples(run).group_S.tolist()
    return [groups.count(group) for group in sorted(set(groups))]


def journal_steps(run: Run) -> list[int]:
    return Journal(run.dir / "journal").steps()


def num_updates(run: Run) -> int:
    return sum(1 for _ in iter_jsonl(run.dir / "row_losses.jsonl"))


def embedded_tokens(run: Run) -> int:
    """Tokens that step 1's update looked up, by the profiler's own trace."""
    trace = json.loads((run.dir / "trace" / "step_00000001.json").read_text())
    found = [e for e in trace["traceEvents"] if e.get("name") == "aten::embedding"]
    # Before the update a few rows are scored, and one by itself (run/learning/probes.py).
    in_order = sorted(found, key=lambda event: event["ts"])[2:]
    return sum(event["args"]["Input Dims"][1][0] for event in in_order)


def a_group_computes_its_prompt_once(workshop: Workshop) -> None:
    base = (*PROFILED, "algorithm.skip_zero_advantage=false")
    once, often = (workshop.run(*base, *more) for more in ((), ("trainer.share_prompts=false",)))
    found = samples(once)
    lengths = [len(prompt) for prompt in found.prompts]
    num_new = int(found.length_S.sum())
    assert embedded_tokens(often) == num_new + sum(lengths)
    # Four samples a group.
    assert embedded_tokens(once) == num_new + sum(lengths) // 4
    assert_same(once, often, "losses")


def has_metric(name: str) -> See:
    return lambda run: bool(run.metric(name))


def sampling_is_the_trainers(workshop: Workshop) -> None:
    """Colder: more certain, and the trainer's log-probs are at the same temperature."""
    warm, cold = workshop.run(), workshop.run("rollout.temperature=0.3")
    assert only("entropy", cold) < only("entropy", warm)
    assert texts(cold) != texts(warm)
    for run in (warm, cold):
        assert only("sampling/sampling_logp_difference/max", run) < 1e-5


def a_cut_is_replayed(change: str) -> Case:
    """Tokens are drawn from fewer ids; log-probs and entropy of the trainer are over the same."""

    def case(workshop: Workshop) -> None:
        whole, cut = workshop.run(), workshop.run(change)
        assert texts(cut) != texts(whole)
        assert not whole.metric("sampling/kept_share")
        assert only("sampling/kept_share", cut) < 0.6
        assert only("sampling/kept_mass", cut) < 0.95
        assert only("sampling/sampling_logp_difference/max", cut) < 1e-5
        assert only("entropy", cut) < only("entropy", whole)

    return case


def completions_end_at(change: str, *, reason: str) -> Case:
    """`>` is token 10 of the tiny vocabulary, and the end of no completion by itself."""

    def case(workshop: Workshop) -> None:
        plain, stopped = (samples(workshop.run(*more)) for more in ((), (change,)))
        assert any(">" in text[:-1] for text in plain.texts)
        assert reason not in plain.stops or reason == "stop"
        ended = [text for text in stopped.texts if ">" in text]
        assert ended
        for before, after, why in zip(plain.texts, stopped.texts, stopped.stops, strict=True):
            assert after == before[: before.index(">") + 1] if ">" in before else after == before
            assert not after.endswith(">") or why == reason

    return case


def a_round_has_a_deadline(workshop: Workshop) -> None:
    cut = samples(workshop.run("rollout.deadline_s=0.000001"))
    assert set(cut.stops) == {"deadline"}
    assert cut.length_S.max() < samples(workshop.run()).length_S.max()
    assert texts(workshop.run("rollout.deadline_s=600")) == texts(workshop.run())


def memory_bounds_what_runs(workshop: Workshop) -> None:
    """A sequence of up to 16 tokens takes 4 KiB; there is room for about six of the sixteen."""
    share = 6 * 2**12 / free_bytes(torch.device("cpu"))
    little = workshop.again(f"engine.memory_share={share}")
    assert 2 <= only("engine/max_running", little) < 16
    assert only("engine/max_running", workshop.run()) == 16
    assert_same(workshop.run(), little, "losses")
    refuses("engine.memory_share=1e-12", "Raise engine.memory_share")(workshop)


def the_engine_rounds_as_the_trainer_does(workshop: Workshop) -> None:
    """An engine in FP8 or INT4 alone differs from the trainer; trained alike, the two agree."""
    gaps = [
        only("sampling/sampling_logp_difference/max", workshop.run(*changes))
        for changes in (
            ("engine.quantization=fp8",),
            ("engine.quantization=int4",),
            ("trainer.fp8={recipe: blockwise}",),
            ("trainer.fp8={recipe: blockwise}", "engine.quantization=fp8"),
            ("trainer.int4={group_size: 32}",),
        )
    ]
    assert min(gaps[:2]) > 1e-3
    assert max(gaps[2:]) < 1e-3


def a_smaller_cache_is_less_exact(workshop: Workshop) -> None:
    plain, small = (
        workshop.run("engine.sleep=false", "engine.decode=plain", *more)
        for more in ((), ("engine.kv_cache_dtype=fp8",))
    )
    assert only("engine/cache_bytes", small) < 0.5 * only("engine/cache_bytes", plain)
    name = "sampling/sampling_logp_difference/max"
    assert only(name, small) > 10 * only(name, plain)


@contextmanager
def tokens_per_forward() -> Iterator[list[int]]:
    """Tokens of every forward pass, first to last."""
    found: list[int] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding):
            found.append(args[0].numel())

    handle = nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def prompts_are_computed_in_pieces(workshop: Workshop) -> None:
    made = []
    # Through the decoder's own modules, which are looked at here.
    plain = "engine.decode=plain"
    for more in ((), ("engine.prefill_tokens=4",)):
        with tokens_per_forward() as sizes:
            run = workshop.again(*SAMPLED_ONLY, plain, *more)
        made.append((texts(run), sizes))
    (whole, in_one), (pieces, in_some) = made
    # The prompts of four groups, each computed once; then one token for each of 16 samples.
    num_prompt_tokens = sum(len(prompt) for prompt in samples(workshop.run()).prompts) // 4
    assert in_one[:2] == [num_prompt_tokens, 16]
    num_pieces = in_some.index(16)
    assert sum(in_some[:num_pieces]) == num_prompt_tokens
    assert max(in_some[:num_pieces]) == 4
    assert whole == pieces


def debug_runs_half(workshop: Workshop) -> None:
    whole, sampled, trained = (workshop.run(*more) for more in ((), SAMPLED_ONLY, SAVED))
    replayed = workshop.run(*SAVED, "debug.mode=replay")
    assert [bool(losses(run)) for run in (whole, sampled, trained, replayed)] == [
        True, False, True, True,
    ]  # fmt: skip
    assert kept_steps(sampled) == []
    assert texts(whole) == texts(sampled)
    sees = (has_metric("engine/max_running"), has_metric("replay/logp_difference/max"))
    found = [[see(run) for see in sees] for run in (whole, trained, replayed)]
    assert found == [[True, False], [False, False], [True, True]]
    for run in (trained, replayed):
        assert_same(whole, run)


def rollouts_are_those_of_the_run_named(workshop: Workshop) -> None:
    first, other = (
        workshop.run(*SAVED, f"debug.rollouts=runs/{name}") for name in ("sampled", "sampled_other")
    )
    assert texts(first) == texts(workshop.run())
    assert texts(other) != texts(first)
    refuses("debug.rollouts=runs/nowhere", "does not exist", base=SAVED)(workshop)


def references(workshop: Workshop, *base: str) -> dict[str, float]:
    """The KL before the first update, by the reference's type."""
    kinds = {
        "initial": "reference={type: initial}",
        "checkpoint": OTHER_REFERENCE,
        "adapter_off": "reference={type: adapter_off}",
    }
    return {kind: only("kl", workshop.run(*base, override)) for kind, override in kinds.items()}


def a_reference_is(kind: str) -> Case:
    """The policy itself at the start; another model; or the model under an adapter."""

    def case(workshop: Workshop) -> None:
        found = references(workshop, *ADAPTED)
        others = {value for name, value in found.items() if name != kind}
        assert found["initial"] == pytest.approx(0.0, abs=1e-10)
        assert min(found["checkpoint"], found["adapter_off"]) > 1e-4
        assert all(abs(found[kind] - value) > 1e-5 for value in others)

    return case


def a_reference_is_refreshed(workshop: Workshop) -> None:
    two = (*KL, "trainer.max_steps=2", "reference={type: initial}")
    kept, fresh = (
        workshop.run(*two, *more).metric("kl") for more in ((), ("reference.refresh_steps=1",))
    )
    assert kept[0] == fresh[0] == fresh[1] == pytest.approx(0.0, abs=1e-10)
    assert kept[1] > 1e-6


def certain_sampling_is_greedy(change: str) -> Case:
    """Held-out prompts are answered as at temperature 0, whatever the noise."""

    def case(workshop: Workshop) -> None:
        plain = workshop.run(*HELD_OUT)
        greedy, certain = (
            workshop.run(*HELD_OUT, f"eval.sampling.{more}") for more in ("temperature=0", change)
        )
        assert evaluated(greedy) == evaluated(certain) != evaluated(plain)
        assert_same(plain, certain)

    return case


def solved_by_one_reward(workshop: Workshop) -> None:
    by_each, by_one = (
        evaluated(workshop.run(*HELD_OUT, EARNED, *more))
        for more in ((), ("eval.sampling.solved_by=regex_format",))
    )
    assert "eval/pass@1" not in by_each
    assert by_each["eval/pass@1/any"] == 1
    assert by_one["eval/pass@1"] == by_each["eval/pass@1/regex_format"] < 1
    assert by_one["eval/pass@1"] == by_one["eval/rewards/regex_format/mean"]


def an_evaluation_with_failures_is_no_best(workshop: Workshop) -> None:
    base = (*HELD_OUT, "rewards.functions=[{type: function, path: 'rewards.py:fails_on_zero'}]")
    strict, lenient = (
        workshop.run(*base, *more) for more in ((), ("eval.sampling.min_coverage=0",))
    )
    assert 0 < evaluated(strict)["eval/reward_coverage"] < 1
    assert evaluated(strict) == evaluated(lenient)
    assert [len(run.events("new_best")) for run in (strict, lenient)] == [0, 1]


CASES: dict[str, Case] = {
    "model.numerics": shows(
        "model.numerics=invariant",
        lambda run: only("sampling/sampling_logp_difference/max", run) == 0,
        was=False, now=True, same="losses",
    ),
    "rollout.prompts_per_step": shows(
        "rollout.prompts_per_step=2", group_sizes, was=[4] * 4, now=[4] * 2
    ),
    "rollout.samples_per_prompt": shows(
        "rollout.samples_per_prompt=2", group_sizes, was=[4] * 4, now=[2] * 4
    ),
    "rollout.max_new_tokens": shows(
        "rollout.max_new_tokens=3", metric("completions/max_length"), was=[6], now=[3]
    ),
    "rollout.temperature": sampling_is_the_trainers,
    "rollout.top_p": a_cut_is_replayed("rollout.top_p=0.6"),
    "rollout.top_k": all_of(
        a_cut_is_replayed("rollout.top_k=4"),
        refuses("rollout.top_k=1025", "less than or equal to 1024"),
    ),
    "rollout.min_p": a_cut_is_replayed("rollout.min_p=0.7"),
    "rollout.stop": completions_end_at("rollout.stop=['>']", reason="stop_string"),
    "rollout.stop_token_ids": completions_end_at("rollout.stop_token_ids=[10]", reason="stop"),
    "rollout.keep_journal": shows(
        "rollout.keep_journal=true", journal_steps, was=[], now=[1, 2], base=TWO_STEPS, same="bits"
    ),
    "rollout.deadline_s": a_round_has_a_deadline,
    "engine.type (native)": all_of(
        names_the_default("engine={type: native}"),
        refuses("engine={type: another}", r"engine\.type"),
    ),
    "engine.max_concurrency (native)": shows(
        "engine.max_concurrency=3", metric("engine/max_running"), was=[16], now=[3], same="losses"
    ),
    "engine.memory_share (native)": memory_bounds_what_runs,
    "engine.prefill_tokens (native)": prompts_are_computed_in_pieces,
    "engine.decode (native)": refuses("engine.decode=graphs", r"engine\.decode .* cannot run"),
    "engine.stall_s (native)": refuses("engine.stall_s=1e-9", r"none of 16 .*engine\.stall_s"),
    "engine.quantization (native)": all_of(
        the_engine_rounds_as_the_trainer_does,
        refuses("engine.quantization=fp8", "guarantees that", base=INVARIANT),
        refuses("engine.quantization=int8", r"engine\.quantization"),
        refuses("engine.quantization=int4", "guarantees that", base=INVARIANT),
    ),
    "engine.kv_cache_dtype (native)": all_of(
        a_smaller_cache_is_less_exact,
        refuses("engine.kv_cache_dtype=fp8", "guarantees that", base=INVARIANT),
    ),
    "engine.sleep (native)": shows(
        "engine.sleep=false", lambda run: only("engine/cache_bytes", run) > 0, was=False, now=True,
        same="bits",
    ),
    "reference.type (initial)": a_reference_is("initial"),
    "reference.type (checkpoint)": a_reference_is("checkpoint"),
    "reference.type (adapter_off)": a_reference_is("adapter_off"),
    "reference.refresh_steps (initial)": a_reference_is_refreshed,
    "reference.path (checkpoint)": shows(
        "reference.path=initial", lambda run: only("kl", run) > 1e-6, was=True, now=False,
        base=(*KL, OTHER_REFERENCE),
    ),
    "debug.mode": debug_runs_half,
    "debug.rollouts": rollouts_are_those_of_the_run_named,
    "trainer.updates_per_step": all_of(
        shows("trainer.updates_per_step=2", num_updates, was=1, now=2, base=SAVED),
        alters("trainer.updates_per_step=2", weight_bytes, base=SAVED),
    ),
    "trainer.epochs_per_step": all_of(
        shows("trainer.epochs_per_step=3", num_updates, was=1, now=3, base=SAVED),
        alters("trainer.epochs_per_step=3", weight_bytes, base=SAVED),
    ),
    "trainer.share_prompts": a_group_computes_its_prompt_once,
    "eval.sampling.samples_per_prompt": shows(
        "eval.sampling.samples_per_prompt=4", has_metric("eval/pass@4"), was=False, now=True,
        base=HELD_OUT, same="bits",
    ),
    "eval.sampling.temperature": all_of(
        alters("eval.sampling.temperature=0.3", evaluated, base=HELD_OUT, same="bits"),
        certain_sampling_is_greedy("temperature=0.0001"),
    ),
    "eval.sampling.top_p": certain_sampling_is_greedy("top_p=0.0001"),
    "eval.sampling.top_k": certain_sampling_is_greedy("top_k=1"),
    "eval.sampling.max_new_tokens": shows(
        "eval.sampling.max_new_tokens=9",
        lambda run: evaluated(run)["eval/completions/mean_length"] > 6,
        was=False, now=True, base=HELD_OUT, same="bits",
    ),
    "eval.sampling.solved_at": shows(
        "eval.sampling.solved_at=0.0", lambda run: evaluated(run)["eval/pass@1"] == 1,
        was=False, now=True, base=HELD_OUT, same="bits",
    ),
    "eval.sampling.solved_by": solved_by_one_reward,
    "eval.sampling.min_coverage": an_evaluation_with_failures_is_no_best,
    "observe.completions.interval_steps": shows(
        "observe.completions.interval_steps=2",
        lambda run: completion_steps(run.dir / "completions"),
        was=[1, 2], now=[2], base=TWO_STEPS, same="bits",
    ),
    "observe.completions.max_per_step": shows(
        "observe.completions.max_per_step=3", num_samples, was=16, now=3, same="bits"
    ),
    "observe.verify_logprobs.interval_steps": shows(
        "observe.verify_logprobs.interval_steps=2",
        lambda run: [fields["step"] for fields in run.events("logprobs_verified")],
        was=[1, 2], now=[1], base=(*TWO_STEPS, "observe.verify_logprobs.interval_steps=1"),
        same="bits",
    ),
    "observe.verify_logprobs.rows": shows(
        "observe.verify_logprobs.rows=3", fact("logprobs_verified", "rows"),
        was=1, now=3, base=("observe.verify_logprobs.rows=1",), same="bits",
    ),
}  # fmt: skip
