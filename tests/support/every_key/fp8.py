"""Cases of the keys of training in FP8, which a CPU emulates."""

from __future__ import annotations

from safetensors import safe_open
from tests.support.every_key.workshop import (
    Case,
    Run,
    Workshop,
    all_of,
    alters,
    fact,
    losses,
    refuses,
    shows,
)

FP8 = ("trainer.fp8={recipe: blockwise}",)
DELAYED = ("trainer.fp8={recipe: tensorwise, scaling: delayed}",)
LAYERS = fact("model_loaded", "precision")


def history_lengths(run: Run) -> set[int]:
    """The lengths of the histories in the last checkpoint."""
    folder = run.checkpoints.path(run.checkpoints.steps()[-1])
    (file,) = folder.rglob("precision.safetensors")
    with safe_open(file, framework="np") as stored:
        return {stored.get_slice(name).get_shape()[0] for name in stored.keys()}  # noqa: SIM118


def the_first_steps_are_those_without_fp8(workshop: Workshop) -> None:
    plain, switched = workshop.run(), workshop.run(*FP8, "trainer.fp8.start_step=3")
    assert losses(switched)[:2] == losses(plain)[:2]
    assert losses(switched)[2] != losses(plain)[2]


CASES: dict[str, Case] = {
    "trainer.fp8.recipe": all_of(
        alters(FP8[0]), alters("trainer.fp8.recipe=rowwise", base=FP8)
    ),
    "trainer.fp8.format": all_of(
        alters("trainer.fp8.format=hybrid", base=FP8),
        alters("trainer.fp8.format=bf16_gradients", base=FP8),
    ),
    "trainer.fp8.scaling": all_of(
        alters("trainer.fp8.scaling=dynamic", base=DELAYED),
        refuses("trainer.fp8.scaling=delayed", "blockwise has many", base=FP8),
    ),
    "trainer.fp8.amax_history": shows(
        "trainer.fp8.amax_history=2", history_lengths, was={16}, now={2}, base=DELAYED
    ),
    "trainer.fp8.power_of_two_scales": alters("trainer.fp8.power_of_two_scales=true", base=FP8),
    "trainer.fp8.skip_layers": all_of(
        alters("trainer.fp8.skip_layers=[lm_head, embed, o_proj]", LAYERS, base=FP8),
        alters("trainer.fp8.skip_layers=[lm_head, embed, o_proj]", base=FP8),
        refuses("trainer.fp8.skip_layers=[lm_head, embed, o_prj]", "covers no layer", base=FP8),
    ),
    "trainer.fp8.skip_first": alters("trainer.fp8.skip_first=1", base=FP8),
    "trainer.fp8.skip_last": alters("trainer.fp8.skip_last=1", base=FP8),
    "trainer.fp8.start_step": the_first_steps_are_those_without_fp8,
}  # fmt: skip
