"""Count the bytes that one rank holds of a trained model whose tensors are split (FSDP2).

held       fp32 masters of what is trained, which are the weights themselves; frozen weights in
           the compute dtype; gradients; Adam's moments: a share each, on the device or the host
gathered   embedding, head and final norm, the layer that is computed and the one that is
           fetched meanwhile, in the compute dtype; of divided experts this rank's share
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from homeostat.config.cluster import FsdpBackend
from homeostat.config.mesh import Mesh
from homeostat.models.shape_only import ShapeDecoder

# The layer that is computed, and the next one.
_NUM_GATHERED = 2
# Bytes of an element: fp32 master and gradient, and two fp32 moments.
_FP32, _MOMENTS = 4, 8


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of one rank, on its device and in host memory."""

    weights: int
    moments: int
    gradients: int
    host: int
    num_trained: int


def rank_bytes(shape: ShapeDecoder, backend: FsdpBackend, mesh: Mesh, *, buffers: int) -> RankBytes:
    """Return what a rank holds. `buffers`: what offloaded moments pass through at most."""
    trained = sum(p.numel() for p in shape.parameters() if p.requires_grad)
    num_trained = -(-trained // mesh.num_shards)
    frozen = sum(p.nbytes for p in shape.parameters() if not p.requires_grad) // mesh.num_shards
    weights, gradients = num_trained * _FP32 + frozen, num_trained * _FP32
    moments = num_trained * _MOMENTS
    host = (weights + gradients if backend.offload_params else 0) + (
        moments if backend.offload_optimizer else 0
    )
    here = not backend.offload_params
    return RankBytes(
        weights=weights * here + gathered_bytes(shape, mesh),
        moments=min(buffers, moments) if backend.offload_optimizer else moments,
        gradients=gradients * here,
        host=host,
        num_trained=num_trained,
    )


def gathered_bytes(shape: ShapeDecoder, mesh: Mesh) -> int:
    """Return the bytes of the whole tensors that a rank has at one time."""
    divided = {p for block in shape.moe_blocks for p in block.experts.parameters()}

    def size(parameters: list[Tensor]) -> int:
        return sum(p.nbytes // (mesh.ep if p in divided else 1) for p in parameters)

    layers = [_parameters(layer) for layer in shape.layers]
    in_layers = {p for layer in layers for p in layer}
    rest = [p for p in _parameters(shape) if p not in in_layers]
    largest = max((size(layer) for layer in layers), default=0)
    return size(rest) + min(len(layers), _NUM_GATHERED) * largest


def _parameters(module: nn.Module) -> list[Tensor]:
    return list(module.parameters())
