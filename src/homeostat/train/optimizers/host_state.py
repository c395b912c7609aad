"""Optimizer state and masters in host memory, updated on the device bucket by bucket.

    host      masters and state of all tensors, pinned
    device    NUM_BUFFERS buffers, each with room for a bucket: parts of slots, BUCKET_BYTES

    load      host -> buffer     on one side stream     bucket n + 2
    update    in the buffer      where all computes     bucket n + 1
    store     buffer -> host     on another one         bucket n

After the last bucket of an update the first buckets are loaded again, so that they are ready when
the next update begins: the passes before it take longer than loading. Gradients and parameters stay
on the device; if they are in host memory too, they are copied with their bucket.

Invariants: a buffer is loaded only after what it held was stored, and updated only after it was
loaded. Weights and gradients in host memory may be used as soon as an update has returned. The rule
computes with the same operands as without offloading, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from homeostat.ops.host_memory import aligned
from homeostat.ops.transfer import SideStream
from homeostat.train.optimizers.slots import STEP, Piece, Rule, Slot, part_of_state

NUM_BUFFERS = 3
BUCKET_BYTES = 256 * 2**20
# Bytes of state and master for an element of fp32 AdamW: what a bucket's size is counted in.
_ELEMENT_BYTES = 12


@dataclass(slots=True)
class _Part:
    """Elements `start` to `stop` of a slot, and their places in a buffer.

    `master` is None where the parameter is its own master and on the device. `grad` and `param`
    are there only if the parameter is in host memory.
    """

    slot: Slot
    param: Tensor
    start: int
    stop: int
    on_host: bool
    state: dict[str, Tensor] = field(default_factory=dict)
    master: Tensor | None = None
    grad: Tensor | None = None
    value: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a whole tensor."""
        return tensor.view(-1)[self.start : self.stop]

    @property
    def host_state(self) -> dict[str, Tensor]:
        state = {name: t for name, t in self.slot.state.items() if name != STEP}
        how = self.start, self.stop
        return {name: part_of_state(name, tensor, *how) for name, tensor in state.items()}

    def sizes(self) -> list[int]:
        """Return the bytes of each of its tensors in a buffer."""
        count = self.stop - self.start
        found = [tensor.nbytes for tensor in self.host_state.values()]
        if self.on_host or not self.slot.is_own:
            found.append(count * self.slot.master.element_size())
        if self.on_host:
            found.append(count * 4)
        if self.on_host and not self.slot.is_own:
            found.append(count * self.param.element_size())
        return [aligned(size) for size in found]

    def lay_out(self, room: _Room) -> None:
        """Place the state's tensors in a buffer, in the order of `sizes`."""
        self.state = {name: room.like(tensor) for name, tensor in self.host_state.items()}
        if self.on_host or not self.slot.is_own:
            self.master = room.like(self.of(self.slot.master))
        if self.on_host:
            shape = torch.empty(self.stop - self.start, dtype=torch.float32, device="meta")
            self.grad = room.like(shape)
            self.value = None if self.slot.is_own else room.like(self.of(self.param))

    def copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is loaded and stored: pairs of host memory and buffer."""
        yield from zip(self.host_state.values(), self.state.values(), strict=True)
        if self.master is not None:
            yield self.of(self.slot.master), self.master

    def piece(self, grad: Tensor) -> Piece:
        """Return what the rule updates, on the device."""
        if self.grad is not None:
            grad = self.grad.copy_(self.of(grad), non_blocking=True)
        else:
            grad = self.of(grad.contiguous())
        master = self.of(self.param) if self.master is None else self.master
        return Piece(self.slot, master, grad, self.state, self.start)

    def write_back(self) -> None:
        """Round an updated master into its parameter, or into the place from which it is stored."""
        if self.master is not None and not self.slot.is_own:
            (self.of(self.param) if self.value is None else self.value).copy_(self.master)


class _Room:
    """Hands out the memory of a buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._used = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Return the next tensor of this shape and dtype."""
        here = self._buffer[self._used : self._used + tensor.nbytes]
        self._used += aligned(tensor.nbytes)
        return here.view(tensor.dtype).view(tensor.shape)


class HostState:
    """The state of all slots of an optimizer, in host memory.

    `slots` come with their parameters; `on_host` names the parameters that are not on the device.
    """

    def __init__(
        self,
        slots: Sequence[tuple[Slot, Tensor]],
        rule: Rule,
        *,
        device: torch.device,
        on_host: Collection[str] = (),
    ) -> None:
        self.rule = rule
        self._has_weights = bool(on_host)
        parts = [
            _Part(slot, param.detach(), *cut, on_host=slot.name in on_host)
            for slot, param in slots
            for cut in rule.cut(slot, limit=BUCKET_BYTES // _ELEMENT_BYTES)
        ]
        self.buckets = _buckets(parts, BUCKET_BYTES)
        largest = max(sum(map(sum, (part.sizes() for part in b))) for b in self.buckets)
        self._buffers = [
            torch.empty(largest, dtype=torch.uint8, device=device)
            for _ in self.buckets[:NUM_BUFFERS]
        ]
        for number, bucket in enumerate(self.buckets):
            room = _Room(self._buffers[number % NUM_BUFFERS])
            for part in bucket:
                part.lay_out(room)
        self._inward, self._outward = SideStream(device), SideStream(device)
        for buffer in self._buffers:
            # Copies may still be running when the last reference to the buffers is gone.
            self._inward.uses(buffer)
            self._outward.uses(buffer)
        # Buffer -> the bucket that it holds or is about to hold, and the event after that copy.
        self._held: dict[int, tuple[int, Any]] = {}
        self._stored: Any = None

    @property
    def device_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(len(buffer) for buffer in self._buffers)

    def update(
        self, grads: Mapping[str, Tensor], *, learning_rate: float, measure: bool
    ) -> dict[str, Tensor]:
        """Update all slots that have a gradient; with `measure`, return the norms of updates."""
        squares: dict[str, list[Tensor]] = {}
        for number, bucket in enumerate(self.buckets):
            self._require(number)
            here = [part for part in bucket if part.slot.name in grads]
            pieces = [part.piece(grads[part.slot.name]) for part in here]
            norms = self.rule.update(pieces, learning_rate=learning_rate, measure=measure)
            for part, norm in zip(here, norms, strict=False):
                squares.setdefault(part.slot.name, []).append(norm)
            for part in here:
                part.write_back()
            self._store(here)
            if number + NUM_BUFFERS < len(self.buckets):
                self._load(number + NUM_BUFFERS)
        if self._has_weights:
            # The next pass copies weights from host memory on streams that know nothing of these.
            self.settle()
        self.prefetch()
        return {n: torch.linalg.vector_norm(torch.stack(found)) for n, found in squares.items()}

    def prefetch(self) -> None:
        """Begin to load the first buckets."""
        for number in range(len(self._buffers)):
            self._load(number)

    def forget(self) -> None:
        """Load everything again, because other code wrote to host memory."""
        self.settle()
        self._held.clear()

    def settle(self) -> None:
        """Wait until everything is stored in host memory."""
        self._outward.finish(self._stored)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parts of all masters on the device, each valid until the next is asked for."""
        self.forget()
        for bucket in self.buckets:
            for part in bucket:
                master = part.of(part.param) if part.master is None else part.master
                if part.master is not None:
                    part.master.copy_(part.of(part.slot.master), non_blocking=True)
                yield part.slot.name, master
        self.prefetch()

    def _require(self, number: int) -> None:
        """Let the device wait for a bucket."""
        self._load(number)
        self._inward.wait(self._held[number % NUM_BUFFERS][1])

    def _load(self, number: int) -> None:
        if self._held.get(number % NUM_BUFFERS, (None,))[0] == number:
            return
        pairs = [pair for part in self.buckets[number] for pair in part.copies()]
        event = self._inward.run(lambda: _copy_all((b, h) for h, b in pairs), after=self._stored)
        self._held[number % NUM_BUFFERS] = number, event

    def _store(self, parts: Sequence[_Part]) -> None:
        pairs = [pair for part in parts for pair in part.copies()]
        values = [(p.of(p.param), p.value) for p in parts if p.value is not None]
        self._stored = self._outward.run(lambda: _copy_all([*pairs, *values]))


def _buckets(parts: Sequence[_Part], limit: int) -> list[list[_Part]]:
    """Fill buckets in order: a part that is larger than the limit has its own bucket."""
    buckets: list[list[_Part]] = [[]]
    used = 0
    for part in parts:
        size = sum(part.sizes())
        if buckets[-1] and used + size > limit:
            buckets.append([])
            used = 0
        buckets[-1].append(part)
        used += size
    return buckets


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
