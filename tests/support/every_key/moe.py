"""Keys of a model's experts. The model is `experts`, a tiny dots.llm1."""

from __future__ import annotations

from tests.support.every_key.workshop import Case, all_of, alters, metric, refuses

EXPERTS = ("model.path=experts",)
ROWS = (*EXPERTS, "model.moe={balancing: sequence_aux, aux_loss_coefficient: 0.1}")
MOVED = (*EXPERTS, "model.moe={balancing: bias, router_bias_update_rate: 0.1}")

CASES: dict[str, Case] = {
    "model.moe.balancing": all_of(
        alters("model.moe.balancing=aux", metric("moe/aux_loss"), base=ROWS),
        refuses("model.moe.balancing=none", "has no such loss", base=ROWS),
    ),
    "model.moe.aux_loss_coefficient": alters("model.moe.aux_loss_coefficient=2.0", base=ROWS),
    "model.moe.z_loss_coefficient": alters("model.moe.z_loss_coefficient=0.5", base=EXPERTS),
    "model.moe.router_bias_update_rate": alters(
        "model.moe.router_bias_update_rate=0.3", metric("moe/bias_max"), base=MOVED
    ),
    "model.moe.capacity_factor": alters("model.moe.capacity_factor=0.4", base=EXPERTS),
}
