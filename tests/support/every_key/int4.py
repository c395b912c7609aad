"""Keys of training for INT4."""

from __future__ import annotations

from tests.support.every_key.workshop import Case, Workshop, all_of, alters, losses, refuses

INT4 = ("trainer.int4={group_size: 32}",)


def the_first_steps_are_those_without_int4(workshop: Workshop) -> None:
    plain, switched = workshop.run(), workshop.run(*INT4, "trainer.int4.start_step=3")
    assert losses(switched)[:2] == losses(plain)[:2]
    assert losses(switched)[2] != losses(plain)[2]


CASES: dict[str, Case] = {
    "trainer.int4.group_size": all_of(
        alters(INT4[0]),
        refuses("trainer.int4.group_size=128", "inputs are no multiple of it", base=INT4),
    ),
    "trainer.int4.skip_layers": all_of(
        alters("trainer.int4.skip_layers=[lm_head, embed, o_proj]", base=INT4),
        refuses("trainer.int4.skip_layers=[lm_head, embed, o_prj]", "covers no layer", base=INT4),
    ),
    "trainer.int4.start_step": the_first_steps_are_those_without_int4,
}
