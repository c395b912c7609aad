"""Report what `check` finds about a model's experts."""

from __future__ import annotations

from homeostat.config.moe import MoeConfig
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.observe import format as fmt
from homeostat.ops.moe_shape import MoeShape
from homeostat.run.preflight.item import Item


def expert_item(
    config: MoeConfig, decoder: DecoderConfig, moe: MoeShape, *, are_offloaded: bool, ep: int
) -> Item:
    """Describe the experts, and what changes the routers besides the loss of the tokens.

    `ep` ranks share the experts of a layer.
    """
    facts = {
        "num_experts": moe.num_experts,
        "experts_per_token": moe.top_k,
        "expert_layers": len(moe.layers),
        "num_active_params": decoder.num_active_params,
    }
    text = (
        f"{moe.num_experts} experts in {len(moe.layers)} layers, {moe.top_k} for each token, "
        f"{fmt.count(decoder.num_active_params)} parameters at work; {_balancing(config, moe)}"
    )
    if ep > 1:
        facts["experts_per_rank"] = moe.num_experts // ep
        text += f"; {ep} ranks have {moe.num_experts // ep} of each layer's, and exchange tokens"
    if are_offloaded:
        text += "; they stay in host memory and are streamed to the GPU layer by layer"
    return Item("experts", "ok", text, facts)


def _balancing(config: MoeConfig, moe: MoeShape) -> str:
    if config.balancing == "bias":
        return f"their bias is moved by {config.router_bias_update_rate:g} after each update"
    words = "nothing keeps their load even"
    if config.balancing in ("aux", "sequence_aux"):
        words = f"load kept even by {config.balancing} x {config.aux_loss_coefficient:g}"
    if moe.has_bias:
        words += ", and the expert bias is frozen (model.moe.router_bias_update_rate is 0)"
    return words
