"""Seconds of a publication: the trainer's weights to all engines."""

from __future__ import annotations

import math

from homeostat.simulator.layout import Layout
from homeostat.simulator.machine import Machine
from homeostat.simulator.memory import shared_weights
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.workload import Workload


def published_bytes(shape: ModelShape, workload: Workload, *, dtype_bytes: int) -> float:
    """Return the bytes of the weights, or of the adapter if only that is trained."""
    adapter = workload.adapter_params
    return float(dtype_bytes * (shape.num_params if adapter is None else adapter))


def publish_seconds(
    shape: ModelShape,
    workload: Workload,
    layout: Layout,
    machine: Machine,
    *,
    sends_weights: bool = False,
) -> float:
    """Return the seconds from the end of training until all engines serve the new weights.

    One GPU: engine and trainer share tensors, unless they are sent to another process. Colocated:
    ranks gather what their engine needs. Disaggregated: one rank broadcasts to all engines; inside
    a node over links, otherwise through its own network card.
    """
    rates = machine.rates
    shared = shared_weights(layout)
    if shared and not sends_weights:
        return 0.0
    size = published_bytes(shape, workload, dtype_bytes=machine.dtype_bytes)
    local = rates.publication + rates.publish_byte * size / layout.tensor_parallel_size
    if shared:
        return local
    ranks = layout.gpus
    nodes = math.ceil(ranks / machine.node_gpus)
    if layout.colocated:
        inside = size / layout.tensor_parallel_size / machine.link_bytes_per_s
        across = size * (nodes - 1) / nodes / (machine.node_gpus * machine.network_bytes_per_s)
        return local + max(inside, across)
    rate = machine.link_bytes_per_s if nodes == 1 else machine.network_bytes_per_s
    return local + size / rate
