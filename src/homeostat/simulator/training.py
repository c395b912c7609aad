"""The trainer's part of a step: passes, updates, and what its ranks send each other.

Sharded weights are gathered for the forward and again for the backward pass of every micro-batch,
and gradients are reduced in fp32 after it. These transfers overlap with computing except for one
layer, so a pass takes the longer of the two and one layer of the other. Tokens that are sent to
experts and the exchanges of Ulysses are waited for; the ring of context parallelism overlaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from homeostat.simulator.layout import Layout
from homeostat.simulator.machine import Machine
from homeostat.simulator.rates import FORWARD_SHARE, Work, added
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.workload import Workload

_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class TrainSeconds:
    """Seconds of a step's scoring and training, and the share that is waiting for transfers."""

    score_s: float
    compute_s: float
    transfer_s: float
    exposed_s: float

    @property
    def train_s(self) -> float:
        """Seconds of the updates of a step."""
        return self.compute_s + self.exposed_s


def micro_batches(workload: Workload, layout: Layout) -> int:
    """Return the number of micro-batches of one rank in one pass over a step's rows.

    A row stays on one data group, and the longest is on the busiest: groups differ in that much.
    """
    mesh = layout.mesh
    groups = mesh.num_data_groups
    budget = workload.max_tokens * mesh.cp * mesh.sp
    per_update = busiest_tokens(workload, layout) / workload.updates
    assert groups >= 1, "a mesh has at least one data group"
    return workload.updates * max(1, math.ceil(per_update / budget))


def busiest_tokens(workload: Workload, layout: Layout) -> float:
    """Return the tokens of the busiest data group in one pass over the rows."""
    groups = layout.mesh.num_data_groups
    if groups == 1:
        return float(workload.tokens)
    even = workload.tokens / groups
    longest = workload.longest_drawn
    rows_each = workload.rows / groups / workload.updates
    # Rows are dealt longest first: what is left over is about half a mean row.
    leftover = 0.5 * workload.tokens / workload.rows if rows_each > 1 else 0.0
    return max(even + leftover * workload.updates, float(longest))


def pass_flops(shape: ModelShape, workload: Workload) -> float:
    """Return the FLOPs of one forward pass over the rows of a step, over all ranks."""
    body = 2.0 * shape.body_params * workload.tokens
    head = 2.0 * shape.head_params * workload.trained_tokens
    return body + head + shape.attention_flops(workload.pairs)


def _elements(shape: ModelShape, workload: Workload) -> float:
    """Return the numbers of the residual stream in all layers, and of the logits, of one pass."""
    stream = float(workload.tokens) * shape.layers * shape.hidden
    return stream + float(workload.trained_tokens) * shape.vocab


def score_work(shape: ModelShape, workload: Workload, layout: Layout) -> Work:
    """Return one rank's work of the passes without gradients before training."""
    share = _busiest_share(workload, layout)
    # All rows are scored at once, however many updates they are for.
    passes = micro_batches(replace(workload, updates=1), layout) * workload.scored
    return {
        "score_flop": pass_flops(shape, workload) * share * workload.scored,
        "pass_layer": shape.layers * passes * FORWARD_SHARE,
        "pass_element": _elements(shape, workload) * share * workload.scored * FORWARD_SHARE,
    }


def train_work(shape: ModelShape, workload: Workload, layout: Layout) -> Work:
    """Return one rank's work of the updates of a step."""
    share = _busiest_share(workload, layout) * workload.epochs
    trained = shape.num_params if workload.adapter_params is None else workload.adapter_params
    # Of a frozen matrix no gradient is computed: two products of three.
    products = 3.0 if workload.adapter_params is None else 2.0
    flops = pass_flops(shape, workload) * (products + _recomputed(workload, layout))
    updates = workload.updates * workload.epochs
    return {
        "train_flop": flops * share,
        "pass_layer": float(shape.layers * micro_batches(workload, layout) * workload.epochs),
        "pass_element": _elements(shape, workload) * share,
        "update": float(updates),
        "update_param": trained * updates / layout.mesh.num_shards,
    }


def train_seconds(
    shape: ModelShape, workload: Workload, layout: Layout, machine: Machine
) -> TrainSeconds:
    """Return the seconds of scoring and training of one step."""
    if layout.context_parallel_size > 1:
        # A ring computes a prompt with each of its completions.
        workload = replace(workload, shares_prompts=False)
    compute = machine.rates.seconds(train_work(shape, workload, layout))
    score = machine.rates.seconds(score_work(shape, workload, layout))
    if layout.trainer_gpus == 1:
        offloaded = _offload_s(shape, workload, layout)
        return TrainSeconds(score, compute, offloaded, offloaded)
    passes = micro_batches(workload, layout)
    gather = _gather_s(shape, layout, machine) * passes
    reduce = _reduce_s(shape, workload, layout, machine) * passes
    waited = _exchange_s(shape, workload, layout, machine)
    layers = shape.layers
    # Keys and values go round the ring once forward, and with their gradients twice backward.
    ring = 3 * _ring_s(shape, workload, layout, machine)
    hidden = workload.epochs * (2 * gather + reduce + ring)
    exposed = max(0.0, hidden - compute) + hidden / layers + workload.epochs * 3 * waited
    exposed += _offload_s(shape, workload, layout)
    scored = max(score, gather * workload.scored) + waited * workload.scored
    return TrainSeconds(scored, compute, hidden + 3 * waited, exposed)


def step_work(
    shape: ModelShape, workload: Workload, layout: Layout
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the work of scoring and of training, for fitting rates."""
    return added(score_work(shape, workload, layout)), added(train_work(shape, workload, layout))


def _busiest_share(workload: Workload, layout: Layout) -> float:
    """Return the share of all arithmetic that the busiest rank does."""
    mesh = layout.mesh
    return busiest_tokens(workload, layout) / workload.tokens / (mesh.cp * mesh.sp)


def _recomputed(workload: Workload, layout: Layout) -> float:
    return 1.0 if layout.gradient_checkpointing else workload.recomputed


def _gathered_bytes(shape: ModelShape, layout: Layout) -> float:
    """Bytes of weights that a rank gathers for one pass: of experts only those it computes."""
    routed = shape.routed_params / layout.expert_parallel_size
    return 2.0 * (shape.num_params - shape.routed_params + routed)


def _collective_s(num_bytes: float, ranks: int, machine: Machine) -> float:
    """Return the seconds in which every rank receives the bytes that all ranks hold together."""
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / machine.node_gpus)
    inside = min(ranks, machine.node_gpus)
    link = num_bytes * (inside - 1) / inside / machine.link_bytes_per_s
    node_rate = inside * machine.network_bytes_per_s
    return max(link, num_bytes * (nodes - 1) / nodes / node_rate)


def _gather_s(shape: ModelShape, layout: Layout, machine: Machine) -> float:
    latency = shape.layers * machine.collective_s
    shards = layout.mesh.num_shards
    if shards == 1:
        return 0.0
    return _collective_s(_gathered_bytes(shape, layout), shards, machine) + latency


def _reduce_s(shape: ModelShape, workload: Workload, layout: Layout, machine: Machine) -> float:
    """Gradients in fp32: over the shards of a replica, then over replicas."""
    if workload.adapter_params is not None:
        sent = float(workload.adapter_params * _GRADIENT_BYTES)
    else:
        sent = _gathered_bytes(shape, layout) / 2 * _GRADIENT_BYTES
    mesh = layout.mesh
    inside = _collective_s(sent, mesh.num_shards, machine)
    rest = sent / mesh.num_shards * 2 * (mesh.replicate - 1) / mesh.replicate
    return inside + rest / machine.network_bytes_per_s + shape.layers * machine.collective_s


def _exchange_s(shape: ModelShape, workload: Workload, layout: Layout, machine: Machine) -> float:
    """Return the seconds of a forward pass that exchange tokens: with experts, and in Ulysses."""
    mesh = layout.mesh
    tokens = busiest_tokens(workload, layout) / (mesh.cp * mesh.sp)
    width = tokens * shape.hidden * 2.0
    ep, sp, seconds = layout.expert_parallel_size, mesh.sp, 0.0
    calls = micro_batches(workload, layout) * machine.collective_s
    if ep > 1:
        rate = machine.link_bytes_per_s if ep <= machine.node_gpus else machine.network_bytes_per_s
        # A token goes once to every rank that has one of its experts, and its sum comes back.
        copies = ep * (1 - (1 - 1 / ep) ** shape.active_experts) * (ep - 1) / ep
        seconds += shape.moe_layers * 2 * (width * copies / rate + calls)
    if sp > 1:
        kv = 2.0 * max(shape.kv_heads, sp) / shape.heads
        sent = width * shape.heads * shape.head_dim / shape.hidden * (2 + kv) * (sp - 1) / sp
        seconds += shape.layers * (sent / machine.link_bytes_per_s + 2 * calls)
    return seconds


def _ring_s(shape: ModelShape, workload: Workload, layout: Layout, machine: Machine) -> float:
    """Return the seconds in which all keys and values of a forward pass go round the ring."""
    mesh = layout.mesh
    if mesh.cp == 1:
        return 0.0
    own = busiest_tokens(workload, layout) / (mesh.cp * mesh.sp)
    # Ulysses inside a ring leaves each rank its share of the heads, of all its group's tokens.
    sent = own * shape.kv_elements * 2.0 * (mesh.cp - 1)
    in_node = mesh.cp * mesh.sp <= machine.node_gpus
    rate = machine.link_bytes_per_s if in_node else machine.network_bytes_per_s
    calls = micro_batches(workload, layout) * shape.layers * (mesh.cp - 1) * machine.collective_s
    return sent / rate + calls


def _offload_s(shape: ModelShape, workload: Workload, layout: Layout) -> float:
    """Return the seconds of what comes from host memory and goes back, at PCIe's rate.

    Moments once an update, in both directions; weights twice and gradients once a micro-batch.
    """
    trained = shape.num_params if workload.adapter_params is None else workload.adapter_params
    moved = 16.0 * trained * workload.updates if layout.offload_optimizer else 0.0
    if layout.offload_params:
        moved += (8.0 * shape.num_params + 4.0 * trained) * micro_batches(workload, layout)
    return moved * workload.epochs / layout.mesh.num_shards / _HOST_BYTES_PER_S


# PCIe 5 x16 in one direction, as pinned copies reach it.
_HOST_BYTES_PER_S = 50e9
