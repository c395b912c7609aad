"""Parse rows of libraries whose lines name no step, or whose numbers need the line's place.

Epoch 2/15                                                       Keras, below a header
3125/3125 [======] - 758s 242ms/step - loss: 3.2 - val_loss: 3   (or with a drawn bar, Keras 3)
EPOCH 42 done: loss 3.9541 - lr 0.0250                           flair
DEV : loss 2.5562 - score 1.0
epoch 43 - iter 6/15 - loss 4.6974 - samples/sec: 0.35
Iter 1: Val loss 2.381, Val took 16.942s                         mlx-lm
250 val 3.2856                                                   build-nanogpt, train_gpt2.py
s:250 trl:3.2856 lr:0.000600 norm:1.02                           llm.c
Progress on:train 1.2kit/10kit rate:2.1it/s ... postfix:loss:2.3 levanter, whose counts are rounded
Ep. 1 : Up. 100 : Sen. 6,400 : Cost 8.31 * 1,200 @ 12 after 9 :  Marian
wandb: Run summary:                                              W&B, at the end of a run
wandb:      loss 0.52

Keras and flair print the mean since the epoch began: within an epoch it starts again and is moved
by single batches, so only the one at the end of an epoch is a row. A mean that is not finite is
one at once, because it stays so.
"""

from __future__ import annotations

import re
from math import isfinite

from homeostat.health.readers.rows.row import Row, RowKind
from homeostat.health.readers.values.numbers import NUMBER, VALUE, decimals_of, number

SUMMARY_FORM = "wandb summary"
_MAX_CHARS = 2_000
_KERAS_EPOCH = re.compile(r"Epoch (?P<epoch>\d{1,9})/(?P<total>\d{1,9})\s*+")
_KERAS = re.compile(
    r"(?P<count>\d{1,12})/(?P<total>\d{1,12}|Unknown)\s++(?:\[[=>.\s]*+\]|[━╸╺\s]++)?"
    r"(?P<rest>[^|]*+)"
)
_KERAS_TIME = re.compile(r"\d(?:s|ms|us)(?:/(?:step|epoch|sample))?(?=\s|$)|\bETA: ")
_KERAS_PAIR = re.compile(rf"- (?P<name>[A-Za-z_][\w./-]{{0,80}}+): (?P<value>{NUMBER})(?=\s|$)")
_FLAIR_EPOCH = re.compile(
    rf"\bEPOCH (?P<epoch>\d{{1,9}}) done: loss (?P<loss>{NUMBER})(?: - lr:? ?(?P<lr>{NUMBER}))?"
)
_FLAIR_DEV = re.compile(rf"\bDEV\s*+: loss (?P<loss>{NUMBER}) - (?P<rest>.*)")
_FLAIR_ITER = re.compile(
    rf"\bepoch \d{{1,9}} - iter (?P<count>\d{{1,9}})/(?P<total>\d{{1,9}}) - loss (?P<loss>{NUMBER})"
    r" - (?:samples/sec|time \(sec\))"
)
_MLX_VAL = re.compile(rf"Iter (?P<step>\d{{1,12}}): Val loss (?P<loss>{NUMBER}), Val took ")
_NANOGPT = re.compile(rf"(?P<step>\d{{1,12}}) (?P<name>train|val|hella) (?P<value>{VALUE})\s*+")
_LLM_C = re.compile(
    rf"s:(?P<step>\d{{1,12}}) (?P<name>trl|tel|eval):(?P<value>{NUMBER})"
    rf"(?: lr:(?P<lr>{NUMBER}))?(?: norm:(?P<norm>{NUMBER}))?\s*+"
)
_LEVANTER = re.compile(
    rf"\bProgress on:(?P<what>train|eval)\b.{{0,200}}? postfix:loss[:=](?P<loss>{NUMBER})"
)
_MARIAN = re.compile(
    rf"\bEp\. \d{{1,9}} : Up\. (?P<step>\d{{1,12}}) : .{{0,80}}?Cost (?P<loss>{NUMBER}) "
)
_NAMES = {
    "train": "loss", "trl": "loss", "val": "val_loss", "tel": "val_loss",
    "hella": "hellaswag_accuracy", "eval": "hellaswag_accuracy",
}  # fmt: skip
_WANDB = "wandb:"
_WANDB_PAIR = re.compile(rf"wandb:\s++(?P<name>[A-Za-z_][\w./-]{{0,80}}+)\s++(?P<value>{NUMBER})")
_WANDB_STEPS = ("_step", "train/global_step", "trainer/global_step", "global_step")


class LibraryRows:
    """Parse these rows; remember Keras' epoch and whether W&B's summary is being printed."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._is_in_summary = False

    def note(self, body: str) -> bool:
        """Note a line that says what the next ones are. Return whether it does."""
        if body.startswith(_WANDB):
            self._is_in_summary = "Run summary:" in body or (
                self._is_in_summary and _WANDB_PAIR.match(body) is not None
            )
            return self._is_in_summary
        found = _KERAS_EPOCH.fullmatch(body) if body.startswith("Epoch ") else None
        if found:
            self._epoch = int(found["epoch"])
        return found is not None

    def row(self, body: str) -> tuple[Row | None, bool]:
        """Return a line's row, and whether the line has nothing else that is of use."""
        if len(body) > _MAX_CHARS and "\b" not in body:
            return None, False
        if "/step" in body or " - ETA: " in body or "s - loss: " in body:
            return self._keras(body.rpartition("\b")[2])
        if "Cost " in body or "Progress on:" in body:
            row = _counted_otherwise(body)
            return row, row is not None
        if "loss" in body:
            row, is_read = _flair(body) if " - " in body else (_mlx_val(body), False)
            return row, is_read or row is not None
        row = _gpt2(body) if body[:1].isdigit() or body.startswith("s:") else None
        return row, row is not None

    def summary(self, body: str) -> Row | None:
        """Return a line of W&B's summary as a row of the last step."""
        found = _WANDB_PAIR.match(body) if self._is_in_summary else None
        value = number(found["value"]) if found else None
        if found is None or value is None or found["name"] in _WANDB_STEPS:
            return None
        return Row({found["name"]: value}, form=SUMMARY_FORM)

    def _keras(self, body: str) -> tuple[Row | None, bool]:
        found = _KERAS.match(body.lstrip())
        if found is None or not _KERAS_TIME.search(found["rest"]):
            return None, False
        row = Row({}, self._epoch, form="keras")
        for pair in _KERAS_PAIR.finditer(found["rest"]):
            _put(row, pair["name"], pair["value"])
        if not row.values:
            return None, False
        is_whole = found["total"] in ("Unknown", found["count"]) and " - ETA: " not in body
        is_row = is_whole or not all(map(isfinite, row.values.values()))
        return (row if is_row else None), True


def _flair(body: str) -> tuple[Row | None, bool]:
    """Return the row of a line of flair, and whether flair printed the line."""
    found = _FLAIR_EPOCH.search(body)
    if found:
        row = Row({}, int(found["epoch"]), form="flair")
        _put(row, "loss", found["loss"])
        _put(row, "lr", found["lr"] or "")
        return row, True
    found = _FLAIR_DEV.search(body)
    if found:
        row = Row({}, kind=RowKind.EVAL, form="flair")
        _put(row, "dev_loss", found["loss"])
        return row, True
    found = _FLAIR_ITER.search(body)
    if found is None:
        return None, False
    row = Row({}, form="flair")
    _put(row, "loss", found["loss"])
    return (row if not all(map(isfinite, row.values.values())) else None), True


def _counted_otherwise(body: str) -> Row | None:
    """Return the row of a line of levanter, whose counts are rounded, or of Marian."""
    found = _LEVANTER.search(body)
    if found:
        is_eval = found["what"] == "eval"
        row = Row({}, form="levanter")
        if is_eval:
            row.kind = RowKind.EVAL
        _put(row, "eval_loss" if is_eval else "loss", found["loss"])
        return row
    found = _MARIAN.search(body)
    if found is None:
        return None
    row = Row({}, int(found["step"]), form="marian")
    _put(row, "loss", found["loss"])
    return row


def _mlx_val(body: str) -> Row | None:
    found = _MLX_VAL.match(body)
    if found is None:
        return None
    row = Row({}, int(found["step"]), kind=RowKind.EVAL, form="mlx")
    _put(row, "val_loss", found["loss"])
    return row


def _gpt2(body: str) -> Row | None:
    found = _NANOGPT.fullmatch(body) or _LLM_C.fullmatch(body)
    if found is None:
        return None
    name = _NAMES[found["name"]]
    row = Row({}, int(found["step"]), form="gpt2")
    if name != "loss":
        row.kind = RowKind.EVAL
    _put(row, name, found["value"])
    parts = found.groupdict()
    _put(row, "lr", parts.get("lr") or "")
    _put(row, "grad_norm", parts.get("norm") or "")
    return row


def _put(row: Row, name: str, text: str) -> None:
    value = number(text)
    if value is None:
        return
    row.values[name] = value
    count = decimals_of(text)
    if count is not None:
        row.fixed[name] = count
