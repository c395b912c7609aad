"""Two ranks on one GPU share rows, by gloo, beside attention over the whole rows.

NCCL refuses two ranks on one GPU, so that messages go through host memory here; FSDP itself does
not run so, and only attention is computed. Run as a module: rank, size, folder, cp, sp, dtype. The
first rank writes what it found.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from homeostat.config.mesh import Mesh
from homeostat.ops.attention import AttentionContext, PackedAttention, PackedLayout
from homeostat.train.sequence.blocks import block_kernel
from homeostat.train.sequence.heads import HeadExchange
from homeostat.train.sequence.links import SequenceLinks
from homeostat.train.sequence.ring import RingAttention, RingLayout
from homeostat.train.sequence.split import SequencePart, part_of_rows
from homeostat.workers.activity import ActivityRecord

LENGTHS = (3000, 700, 700)
HEADS, KEY_HEADS, DIM = 8, 2, 64


def inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys, values, and the gradient of the result, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(sum(LENGTHS), heads, DIM, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]
    return tuple(x.to(device, dtype) for x in made)


def context_of(
    links: SequenceLinks, part: SequencePart, kernel: str, device: torch.device
) -> AttentionContext:
    if links.cp.size > 1:
        blocks = block_kernel(kernel, device_type=device.type)
        inner = RingAttention(RingLayout.of(part.chunks, device), links.cp, blocks)
    else:
        inner = PackedAttention(PackedLayout.of(list(LENGTHS), device), kernel)
    return inner if links.sp.size == 1 else HeadExchange(inner, links.sp, part.num_joined)


def attended(
    context: AttentionContext, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Return the result and the gradients of queries, keys and values."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = context.attend(0, *leaves, scale=DIM**-0.5)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def errors(found: tuple[Tensor, ...], part: SequencePart, whole: tuple[Tensor, ...]) -> list[float]:
    """Relative errors over this rank's own tokens."""
    own = torch.from_numpy(np.flatnonzero(part.is_own_X)).to(found[0].device)
    at = torch.from_numpy(part.index_X).to(own.device)[own]
    pairs = ((x[own].float(), y[at].float()) for x, y in zip(found, whole, strict=True))
    return [float((x - y).norm() / y.norm()) for x, y in pairs]


def main(rank: int, size: int, folder: Path, cp: int, sp: int, kind: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    kernel = "varlen" if device.type == "cuda" and kind == "bf16" else "sdpa"
    meeting = f"file://{folder / f'meeting_{cp}_{sp}_{kind}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    entry = ActivityRecord().collective
    links = SequenceLinks.of(Mesh(cp=cp, sp=sp), rank=rank, device=device, entry=entry)
    assert links is not None
    place = {"cp": (cp, links.cp.place), "sp": (sp, links.sp.place)}
    part = part_of_rows(np.array(LENGTHS), **place)
    given = inputs(device, dtype)
    index = torch.from_numpy(part.index_X).to(device)
    is_own = torch.from_numpy(part.is_own_X).to(device)
    mine = [x[index] for x in given]
    # What only fills up has no gradient: nothing reads it.
    mine[3] = mine[3] * is_own[:, None, None]
    context, seconds = context_of(links, part, kernel, device), 0.0
    found: tuple[Tensor, ...] = ()
    for _ in range(2):
        started = time.perf_counter()
        found = attended(context, *mine)
        float(found[1].sum())
        seconds = time.perf_counter() - started
    reference = PackedAttention(PackedLayout.of(list(LENGTHS), device), kernel)
    worst = links.all.sum(torch.tensor(errors(found, part, attended(reference, *given))))
    if rank == 0:
        result = {"cp": cp, "sp": sp, "dtype": kind, "seconds": seconds}
        result["errors"] = (worst / size).tolist()
        (folder / f"result_{cp}_{sp}_{kind}.json").write_text(json.dumps(result))
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.enable()
    rank, size, folder, cp, sp, kind = sys.argv[1:]
    main(int(rank), int(size), Path(folder), int(cp), int(sp), kind)
