"""Cases of the keys that say how the weights are updated, and where."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.every_key.workshop import (
    Case,
    Run,
    See,
    Workshop,
    all_of,
    alters,
    assert_same,
    eval_losses,
    fact,
    losses,
    metric,
    refuses,
    shows,
    steps,
    weight_bytes,
)
from torch import nn

from homeostat.config import RunConfig
from homeostat.errors import OutOfMemoryHaltError, TrainingHaltedError
from homeostat.train import runtime
from homeostat.train.lanes import Lanes

HAS_GPU = torch.cuda.is_available()
UNPACKED = ("trainer.packing=false",)
PROFILED = ("observe.profiler={steps: [2]}",)
ON_DEVICE = ("trainer.device=cuda",) if HAS_GPU else ()
VARLEN_ON_GPU = (
    (
        shows(
            "model.attention=varlen",
            fact("model_loaded", "attention"),
            was="sdpa",
            now="varlen",
            base=("trainer.device=cuda", "model.attention=sdpa"),
        ),
    )
    if HAS_GPU
    else ()
)


def traced(run: Run) -> list[dict[str, Any]]:
    """The operators of step 2, from the profiler's own trace."""
    trace = json.loads((run.dir / "trace" / "step_00000002.json").read_text())
    return [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]


def num_calls(operator: str) -> See:
    return lambda run: sum(event["name"] == operator for event in traced(run))


def calls_any(operator: str) -> See:
    return lambda run: any(event["name"] == operator for event in traced(run))


def tallest_tile(run: Run) -> int:
    """Rows of the largest product with the output matrix, [m, D] x [D, 299]."""
    shapes = [e["args"]["Input Dims"] for e in traced(run) if e["name"] == "aten::mm"]
    return max(left[0] for left, right, *_ in shapes if right[1:] == [299])


def shares_of_peak(rates: Iterable[float], config: RunConfig) -> list[float]:
    return [round(rate / config.trainer.lr, 6) for rate in rates]


def dtypes(run: Run) -> set[torch.dtype]:
    return {tensor.dtype for tensor in run.weights().values()}


def saved_threads(run: Run) -> int:
    (file,) = run.dir.glob("checkpoints/step_*/state.json")
    return json.loads(file.read_text())["run"]["threads"]


# By default wsd decays over a fifth of the steps, which here is none.
MORE = {"wsd": ", decay_share: 0.5"}


def scheduled(kind: str, change: str, *, was: list[float], now: list[float]) -> Case:
    """Four steps of a schedule, and again with one of its keys changed.

    Both loops ask the config for a step's rate (`the_loop_asks_for_the_rate`), and so does this.
    """
    assert was != now, f"{change}: a change that shows nothing proves nothing"
    base = ("trainer.max_steps=4", f"trainer.schedule={{type: {kind}{MORE.get(kind, '')}}}")

    def case(workshop: Workshop) -> None:
        for overrides, wanted in ((base, was), ((*base, f"trainer.schedule{change}"), now)):
            config = workshop.config(*overrides)
            rates = [config.trainer.learning_rate(step, 4) for step in range(1, 5)]
            assert shares_of_peak(rates, config) == wanted

    return case


def the_loop_asks_for_the_rate(workshop: Workshop) -> None:
    run = workshop.run("trainer.max_steps=4", "trainer.schedule={type: linear}")
    assert shares_of_peak(run.metric("learning_rate"), run.config) == PLAIN["linear"]


# The first of the four steps is warm-up unless the schedule is set otherwise.
PLAIN = {
    "constant": [1.0, 1.0, 1.0, 1.0],
    "linear": [1.0, 1.0, 0.666667, 0.333333],
    "cosine": [1.0, 1.0, 0.775, 0.325],
    "wsd": [1.0, 1.0, 1.0, 0.666667],
}
# After two steps of warm-up, given as steps or as half of all.
WARMED = {
    "constant": [0.5, 1.0, 1.0, 1.0],
    "linear": [0.5, 1.0, 1.0, 0.5],
    "cosine": [0.5, 1.0, 1.0, 0.55],
    "wsd": [0.5, 1.0, 1.0, 1.0],
}


def schedule_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for kind, plain in PLAIN.items():
        for name, value in (("warmup_steps", "2"), ("warmup_share", "0.5")):
            case = scheduled(kind, f".{name}={value}", was=plain, now=WARMED[kind])
            cases[f"trainer.schedule.{name} ({kind})"] = case
        other = "constant" if kind != "constant" else "linear"
        change = f"={{type: {kind}{MORE.get(kind, '')}}}"
        cases[f"trainer.schedule.type ({kind})"] = all_of(
            scheduled(other, change, was=PLAIN[other], now=plain), the_loop_asks_for_the_rate
        )
    floors = {
        "linear": [1.0, 1.0, 0.833333, 0.666667],
        "cosine": [1.0, 1.0, 0.875, 0.625],
        "wsd": [1.0, 1.0, 1.0, 0.833333],
    }
    for kind, now in floors.items():
        case = scheduled(kind, ".min_lr_share=0.5", was=PLAIN[kind], now=now)
        cases[f"trainer.schedule.min_lr_share ({kind})"] = case
    cases["trainer.schedule.decay_share (wsd)"] = scheduled(
        "wsd", ".decay_share=1.0", was=PLAIN["wsd"], now=PLAIN["linear"]
    )
    return cases


def threads_are_set(workshop: Workshop) -> None:
    assert saved_threads(workshop.run()) == 1
    run = workshop.again("trainer.threads=2")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert saved_threads(run) == 2


def lanes_are_set(workshop: Workshop) -> None:
    def saved(run: Run) -> tuple[int, int]:
        (file,) = run.dir.glob("checkpoints/step_*/state.json")
        state = json.loads(file.read_text())["run"]
        return state["lanes"], state["threads"]

    plain = workshop.run()
    with in_parts() as counts:
        run = workshop.again("trainer.lanes=2", "trainer.threads=null")
    assert (saved(plain), saved(run)) == ((1, 1), (2, 1))
    assert set(counts) == {2}
    assert losses(run) == pytest.approx(losses(plain), rel=1e-4)


@contextmanager
def in_parts() -> Iterator[list[int]]:
    """Return how many parts each micro-batch was computed in."""
    counts: list[int] = []
    inner = Lanes.map

    def counting(self: Lanes, work: Any, items: Any) -> Any:
        counts.append(len(items))
        return inner(self, work, items)

    Lanes.map = counting
    try:
        yield counts
    finally:
        Lanes.map = inner


def sick_model(workshop: Workshop) -> tuple[str, ...]:
    """A model whose every loss is NaN."""
    folder = workshop.folder / "sick"
    if not folder.exists():
        folder.mkdir()
        for file in (workshop.folder / "trained").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        state = load_file(folder / "model.safetensors")
        # Finite, and too large for the MLP: its products are not.
        state["model.layers.0.mlp.up_proj.weight"].fill_(1e38)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return ("model.path=sick", "model.init=pretrained", "trainer.max_steps=4")


def skipped_before_halting(workshop: Workshop, *overrides: str) -> list[int]:
    run = workshop.attempt(*sick_model(workshop), *overrides)
    assert isinstance(run.error, TrainingHaltedError)
    return [event["step"] for event in run.events("step_skipped")]


def a_step_that_is_not_finite_is_skipped_or_halts(workshop: Workshop) -> None:
    assert skipped_before_halting(workshop) == [1, 2, 3]
    assert skipped_before_halting(workshop, "trainer.on_nonfinite=halt") == [1]


def skipped_steps_are_counted_to_the_limit(workshop: Workshop) -> None:
    assert skipped_before_halting(workshop, "trainer.max_nonfinite_steps=2") == [1, 2]
    run = workshop.again(*sick_model(workshop), "trainer.max_nonfinite_steps=5")
    assert len(run.events("step_skipped")) == 4


@contextmanager
def little_memory(max_tokens: int) -> Iterator[None]:
    """The allocator fails, for real, when a forward pass holds more tokens than this."""

    def demand(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding) and args[0].numel() > max_tokens:
            torch.empty(2**60, dtype=torch.uint8)

    handle = nn.modules.module.register_module_forward_pre_hook(demand)
    try:
        yield
    finally:
        handle.remove()


def out_of_memory_is_retried_or_halts(workshop: Workshop) -> None:
    held_out = "data.validation_share=0.25"
    plain = workshop.run(held_out)
    retried = workshop.again(held_out, watch=little_memory(200))
    assert retried.events("oom_retry")
    assert min(retried.metric("data/micro_batches")) > max(plain.metric("data/micro_batches"))
    assert max(retried.metric("data/packing_fill")) <= 1
    assert_same(plain, retried, "losses")
    assert eval_losses(retried) == pytest.approx(eval_losses(plain), rel=1e-5)
    halted = workshop.attempt("trainer.on_oom=halt", watch=little_memory(200))
    assert isinstance(halted.error, OutOfMemoryHaltError)
    assert not halted.events("oom_retry")


@contextmanager
def counted(owner: Any, name: str, *, call: Callable[..., Any]) -> Iterator[list[int]]:
    """Calls of a function of torch's, which go to `call`."""
    calls = [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return call(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counting)
        if not HAS_GPU:
            patch.setattr(runtime, "find_device_conflicts", lambda config, device: [])
        yield calls


def reaches(
    owner: Any, name: str, *, base: str, change: str, call: Callable[..., Any] | None = None
) -> Case:
    """torch's function is called with the change and not without: on a GPU, or where there is
    none on the CPU, with the refusal out of the way and `call` in place of what cannot work."""

    def case(workshop: Workshop) -> None:
        found, function = [], getattr(owner, name) if HAS_GPU or call is None else call
        for override in (base, change):
            with counted(owner, name, call=function) as calls:
                workshop.again(*ON_DEVICE, override)
            found.append(calls[0])
        assert found[0] == 0
        assert found[1] > 0

    return case


CASES: dict[str, Case] = {
    "model.attention": all_of(
        shows(
            "model.attention=eager", calls_any("aten::scaled_dot_product_attention"),
            was=True, now=False, base=PROFILED, same="losses",
        ),
        refuses("model.attention=varlen", "no CPU kernel"),
        *VARLEN_ON_GPU,
    ),
    "trainer.device": alters("trainer.device=cuda") if HAS_GPU
    else refuses("trainer.device=cuda", "no CUDA device"),
    "trainer.threads": threads_are_set,
    "trainer.lanes": lanes_are_set,
    "trainer.epochs": shows(
        "trainer.epochs=2", lambda run: len(steps(run)), was=5, now=10,
        base=("trainer.max_steps=null",),
    ),
    "trainer.max_steps": shows("trainer.max_steps=4", steps, was=[1, 2, 3], now=[1, 2, 3, 4]),
    "trainer.batch_rows": shows(
        "trainer.batch_rows=4", metric("data/rows"), was=[8, 8, 8], now=[4, 4, 4]
    ),
    "trainer.packing": shows(
        "trainer.packing=false", metric("data/micro_batches"), was=[1] * 3, now=[8] * 3,
        same="losses",
    ),
    "trainer.max_tokens_per_device": shows(
        "trainer.max_tokens_per_device=130", lambda run: min(run.metric("data/micro_batches")) > 1,
        was=False, now=True, same="losses",
    ),
    "trainer.micro_batch_rows": shows(
        "trainer.micro_batch_rows=4", metric("data/micro_batches"), was=[8] * 3, now=[2] * 3,
        base=UNPACKED, same="losses",
    ),
    "trainer.lr": all_of(
        shows("trainer.lr=5e-3", lambda run: run.metric("learning_rate")[0], was=1e-2, now=5e-3),
        alters("trainer.lr=5e-3", weight_bytes),
    ),
    "trainer.max_grad_norm": all_of(
        alters("trainer.max_grad_norm=0.1", weight_bytes),
        alters("trainer.max_grad_norm=null", weight_bytes, base=("trainer.max_grad_norm=0.1",)),
    ),
    "trainer.precision": shows(
        "trainer.precision=bf16", dtypes, was={torch.float32}, now={torch.bfloat16}
    ),
    # Two layers, of which all or norms and gates are run a second time in the backward pass.
    # Two layers, once for a row that is scored by itself; in the update, once more if not kept.
    "trainer.gradient_checkpointing": all_of(
        shows(
            "trainer.gradient_checkpointing=true", num_calls("aten::silu"), was=4, now=6,
            base=PROFILED, same="bits",
        ),
        shows(
            "trainer.gradient_checkpointing=selective", num_calls("aten::silu"), was=4, now=6,
            base=PROFILED, same="bits",
        ),
    ),
    # 91 tokens are trained in step 2; 64 KiB hold 54 rows of 299 fp32 logits.
    "trainer.logits_chunk_bytes": shows(
        "trainer.logits_chunk_bytes=64KiB", tallest_tile, was=91, now=54, base=PROFILED,
        same="losses",
    ),
    "trainer.pin_memory": all_of(
        refuses("trainer.pin_memory=true", "this run is on the CPU"),
        reaches(
            torch.Tensor, "pin_memory", call=lambda tensor: tensor,
            base="trainer.pin_memory=false", change="trainer.pin_memory=true",
        ),
    ),
    "trainer.empty_cache_interval": all_of(
        refuses("trainer.empty_cache_interval=1", "this run is on the CPU"),
        reaches(
            torch.cuda, "empty_cache",
            base="trainer.empty_cache_interval=0", change="trainer.empty_cache_interval=2",
        ),
    ),
    "trainer.on_nonfinite": a_step_that_is_not_finite_is_skipped_or_halts,
    "trainer.max_nonfinite_steps": skipped_steps_are_counted_to_the_limit,
    "trainer.on_oom": out_of_memory_is_retried_or_halts,
    **schedule_cases(),
}  # fmt: skip
