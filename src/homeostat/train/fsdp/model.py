"""A decoder whose parameters are split over ranks (FSDP2), and how its weights are loaded.

    built on the meta device -> adapter -> split -> memory for this rank's rows -> weights, one
    tensor at a time, of which each rank keeps its rows

No rank ever holds more of the model than its share, the layer that is computed, and one tensor that
is being read. If training is in bf16, trained parameters are held in fp32: these are the masters
that the optimizer owns, and a layer's bf16 copy is made from them when it is gathered. Frozen
parameters are held in the compute dtype, except for the expert bias of routers, which is fp32
everywhere: such a router is gathered by itself, as it is held. Experts are stacked in dimension 0,
so that each rank holds some of them; with expert parallelism a rank computes those of its share
(train/fsdp/experts.py), which are gathered by themselves.

With `offload_params` a rank's rows are in host memory: they are copied to the device to be
gathered, and gradients are copied back (torch's CPUOffloadPolicy).

Embedding, output matrix and final norm are gathered from the beginning of the forward pass to the
end of the backward pass: the output matrix is used right after the hidden states.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from homeostat.config.cluster import FsdpBackend
from homeostat.config.model import HeadInit, LoraConfig, ModelConfig
from homeostat.config.trainer import Checkpointing
from homeostat.models.adapter_files import load_adapter
from homeostat.models.blocks import MoeBlock
from homeostat.models.build import (
    LoadedModel,
    attention_name,
    config_origin,
    decoder_flags,
    give_weights,
    model_sheet,
    new_decoder,
    open_source,
    read_configs,
    require_moe_settings,
)
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.lora import apply_lora, draw_adapters
from homeostat.models.memory import require_memory
from homeostat.models.moe import require_even_experts
from homeostat.ops.host_memory import HOST
from homeostat.train.fsdp.experts import divide_experts
from homeostat.train.fsdp.mesh import Ranks, is_of_experts, local_part
from homeostat.train.fsdp.recorded import record_collectives
from homeostat.train.runtime import Runtime
from homeostat.train.sequence.heads import require_sequence


def load_sharded(
    model: ModelConfig,
    adapter: LoraConfig | None,
    backend: FsdpBackend,
    *,
    ranks: Ranks,
    runtime: Runtime,
    seed: int,
    gradient_checkpointing: Checkpointing,
    trained: bool,
    head: HeadInit | None = None,
) -> LoadedModel:
    """Load a model like `models.build.load_model`, but only this rank's share of it."""
    assert model.implementation == "native", "refused by config/combinations"
    started = time.perf_counter()
    source = open_source(model)
    config, generation_config = read_configs(source)
    origin = config_origin(source)
    shape = decoder_config(config, origin=origin)
    held_on = HOST if backend.offload_params else runtime.device
    num_params, dtype = shape.num_params // ranks.num_shards, runtime.dtype
    require_memory(num_params, dtype=dtype, device=held_on, what=origin.sizes)
    require_moe_settings(model.moe, shape.moe)
    require_even_experts(shape.moe, ep=ranks.mesh.ep)
    require_sequence(shape, ranks.mesh)
    flags = decoder_flags(model, shape, gradient_checkpointing, dtype=dtype, device=runtime.device)
    with torch.device("meta"):
        module = new_decoder(shape, flags, has_value_head=head is not None).to(runtime.dtype)
    targets = apply_lora(module, adapter, seed=seed) if adapter is not None else []
    if not trained:
        module.requires_grad_(False)
    sheet = model_sheet(module, config, generation_config, {})
    if ranks.mesh.ep > 1:
        divide_experts(module, ranks.expert_group, note=ranks.record.collective.lasting)
    split(module, backend, ranks=ranks, runtime=runtime)
    module.to_empty(device=held_on)
    part = OwnPart(ranks, runtime.dtype)
    give_weights(module, model, source, seed=seed, head=head, part=part)
    if adapter is not None:
        draw_adapters(module, seed=seed, part=part)
        if adapter.path is not None:
            load_adapter(module, Path(adapter.path), adapter, base=model, part=part)
    facts = {
        "implementation": model.implementation,
        "attention": attention_name(module),
        "meta_init": True,
        "lora_modules": len(targets),
        "bytes": sum(local_part(parameter).nbytes for parameter in module.parameters()),
        "seconds": time.perf_counter() - started,
    }
    return LoadedModel(module, replace(sheet, facts=facts))


def split(module: Decoder, backend: FsdpBackend, *, ranks: Ranks, runtime: Runtime) -> None:
    """Split a decoder layer by layer, and the rest together."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    precision = MixedPrecisionPolicy(
        param_dtype=runtime.dtype,
        reduce_dtype=torch.float32,
        # The rotary tables stay fp32, as everywhere.
        cast_forward_inputs=False,
    )
    offload = OffloadPolicy()
    if backend.offload_params:
        offload = CPUOffloadPolicy(pin_memory=runtime.device.type == "cuda")
    how = {"mesh": ranks.device_mesh, "mp_policy": precision, "offload_policy": offload}
    per_layer = {**how, "reshard_after_forward": backend.reshard_after_forward}
    as_held = {**per_layer, "mp_policy": replace(precision, param_dtype=None)}
    for layer in module.layers:
        if isinstance(layer.mlp, MoeBlock) and layer.mlp.gate.e_score_correction_bias is not None:
            fully_shard(layer.mlp.gate, **as_held)
        if isinstance(layer.mlp, MoeBlock) and ranks.mesh.ep > 1:
            fully_shard(layer.mlp.experts, **{**per_layer, "mesh": ranks.expert_shards})
        fully_shard(layer, **per_layer)
    fully_shard(module, reshard_after_forward=False, **how)
    for name, part in module.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        # The loss is normalised over the whole update: gradients of ranks are summed, not averaged.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        record_collectives(part, name=name or "the rest", entry=ranks.record.collective)
    for method in ("hidden", "hidden_part"):
        register_fsdp_forward_method(module, method)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """Selects this rank's rows of a parameter.

    All values start rounded to `dtype`, the compute dtype. Implements `models.weights.Part`.
    """

    ranks: Ranks
    dtype: torch.dtype

    def shape(self, parameter: Tensor) -> torch.Size:
        return self.ranks.shape(parameter)

    def __call__(self, parameter: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
        start, stop = self.ranks.split(parameter)
        value = tensor[start:stop].to(computed_dtype(parameter, self.dtype))
        return local_part(parameter), value


def computed_dtype(parameter: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a parameter is computed with: `dtype` where it is trained, because it
    is a master then, and the one that it is held in where it is frozen."""
    return dtype if parameter.requires_grad else parameter.dtype


def whole_tensor(parameter: Tensor, *, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """All rows of a parameter, as it is computed with. All ranks take part."""
    assert isinstance(parameter, DTensor), type(parameter)
    mesh = parameter.device_mesh
    # Rows in host memory are gathered on the device, too.
    part = local_part(parameter).to(device_of(mesh), computed_dtype(parameter, dtype))
    split_as = {"shape": parameter.shape, "stride": parameter.stride()}
    gathered = DTensor.from_local(part, mesh, parameter.placements, run_check=False, **split_as)
    whole = gathered.full_tensor()
    if not is_of_experts(parameter):
        return whole
    found = whole.new_empty(ranks.shape(parameter))
    dist.all_gather(list(found.chunk(ranks.mesh.ep)), whole.contiguous(), group=ranks.expert_group)
    return found


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's part of what a mesh computes with."""
    is_cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else HOST


def give_back(module: Decoder) -> None:
    """Free what was gathered and not given back by a backward pass."""
    for part in sharded_modules(module):
        part.reshard()


def sharded_modules(module: Decoder) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
