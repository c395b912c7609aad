"""Predicates about how far a run got: data still prepared, sizes of kernels still tried."""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice

from homeostat.health.view import RunView

# Bars of preparing data, and what is printed where training begins.
_PREPARES = (
    "running tokenizer on", "tokenizing ", "map (num_proc=", "preprocessing dataset",
    "packing train dataset", "generating train split",
)  # fmt: skip
_TRAINS = (
    "***** Running training", "Total optimization steps", "Number of trainable parameters",
    "trainable params: && all params",
)  # fmt: skip
# Triton has no room for a block, and what torch.compile says where it only tried that block.
_NO_ROOM = (
    "out of resource: ", "OutOfResources", "No valid triton configs", "too much shared data",
)  # fmt: skip
_TRIES = ("ignoring this choice", "for benchmark choice", "torch/_inductor/select_algorithm.py")
_MAX_TRIES, _LINES_OF_TRY = 2_000, 3


def preparation_goes_on(view: RunView) -> bool:
    """Return whether data is still prepared, or was not prepared in this log.

    It has ended where its last bar is at 100 %, and training begins below it.
    """
    bars = [line for text in _PREPARES for line in islice(view.log.find(text), _MAX_TRIES)]
    newest = max(bars, key=lambda line: line.number, default=None)
    if newest is None or "100%|" not in newest.text:
        return True
    begun = view.log.last(*_TRAINS)
    return begun is None or begun.number < newest.number


def is_not_only_tuning(view: RunView) -> bool:
    """Return whether a kernel had no room for its blocks otherwise than while sizes were tried.

    torch.compile tries many sizes, says which of them do not fit, and leaves these out.
    """
    lines = view.log.lines
    for line in (one for text in _NO_ROOM for one in islice(view.log.find(text), _MAX_TRIES)):
        at = bisect_left(lines, line.number, key=lambda one: one.number)
        near = [one.text.lower() for one in lines[at : at + _LINES_OF_TRY]]
        if not any(words in text for text in near for words in _TRIES):
            return True
    return False
