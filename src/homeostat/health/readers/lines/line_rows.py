"""Parse rows of metrics in one line that is no mapping.

step:3 - actor/loss:0.1 - ...                                             verl
12:00:01 SUCCESS Step 3 | Time: 40.52s | Reward: 0.4 | ...                prime-rl
 iteration  3/ 100 | elapsed time per iteration (ms): 12.1 | lm loss: 1.0E+01 |   Megatron
step:  3  loss:  7.3000  grad_norm:  1.29  tps: 6,220                     torchtitan
step 3/400, loss: 11.93, grad_norm: 0.00, max_memory: 31.0 GB             and similar
Epoch(train)  [1][100/735]  lr: 1.9e-04  loss: 3.41                       mmengine, xtuner
step=3 loss=0.5 lr=1e-05                                                  and similar
epoch 1/3 step 2/39 loss 0.5 lr 1e-05                                     users' scripts
[step 2/200] rewards=['0.80', '0.01'] loss=-0.0051 lr=3.3e-06             users' scripts
Epoch:[1/3](20/4292), loss: 0.5, lr: 0.00001                              MiniMind
Epoch 1 | iter 10 step 2 | loss train: 1.23, val: n/a | iter time: ...    litgpt
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from homeostat.health.readers.lines.held_out import as_held_out, says_held_out
from homeostat.health.readers.lines.line_parts import is_transition
from homeostat.health.readers.lines.number_names import known_end, known_tail
from homeostat.health.readers.rows.row import Row, RowKind
from homeostat.health.readers.values.common_names import metric_of
from homeostat.health.readers.values.numbers import MAX_CHARS, NUMBER, VALUE, decimals_of, number

_MAX_CHARS = 200_000
# A list of rewards ends within so many characters.
_MAX_LIST = 20_000
_VERL = re.compile(r"(?:^|\s)step:(\d{1,15}) - (?=\S)")
_STEP = re.compile(
    r"(?<![\w/.])(?:global[ _])?(?:step|iteration|iter|batch)s?\s*+(?:[:=#]\s*+)?(?:\[\s*+)?"
    r"(\d{1,15})"
    r"(?:\s*+/\s*+(\d{1,15}))?(?![\d.])",
    re.IGNORECASE,
)
_EPOCH = re.compile(
    r"(?<![\w/.])epoch\s*+(?:[:=#]\s*+)?\[?(\d{1,9})(?:\s*+/\s*+(\d{1,9}))?(?![\d.])", re.IGNORECASE
)
# Epoch:[1/3](20/4292), and in PyTorch's examples Epoch: [0][ 20/391].
_IN_EPOCH = re.compile(
    r"(?<![\w/.])epoch\s*+:?\s*+\[\d{1,9}(?:\s*+/\s*+\d{1,9})?\]\s*+[(\[]\s*+(\d{1,15})\s*+/\s*+"
    r"(\d{1,15})\s*+[)\]]",
    re.IGNORECASE,
)
_PAIR = re.compile(rf"(?P<name>[^:=|]++)[:=]\s*+(?P<value>{VALUE}\s?+[^,|:=]*+)(?::\d++%)?")
# The last pair of a piece with other text before it: epoch 001:  100 / 5000 loss=2.1
_LAST = re.compile(rf"(?<=[\s:])(?P<name>[A-Za-z_][\w./-]{{0,80}}+)=(?P<value>{VALUE})$")
_MMENGINE = re.compile(
    r"\b(?P<unit>Epoch|Iter)\((?P<part>train|val|test)\)\s*(?:\[(?P<epoch>\d{1,9})\])?"
    r"\[\s*(?P<count>\d{1,12})/\s*(?P<total>\d{1,12})\]"
)
_LITGPT = re.compile(
    # Counts are padded to the width of the largest one.
    r"Epoch +(?P<epoch>\d{1,9}) *\| *iter +(?P<iter>\d{1,12}) +step +(?P<step>\d{1,12}) *\| *"
    rf"loss train: +(?P<loss>{VALUE}), *val: +(?P<val>{VALUE}|n/a)"
    rf"(?: *\| *iter time: +(?P<ms>{VALUE}) ms)?"
)
_LITGPT_VAL = re.compile(rf"^iter +(?P<iter>\d{{1,12}}): val loss (?P<val>{VALUE})")
# Printed before a step's row: the number of rollouts with an advantage of 0.
_FILTERED = re.compile(
    r"Detected \d{1,9}/(?P<all>\d{1,9}) rollouts "
    r"\((?:[^()]{0,200}[ ,])?zero_advantage=(?P<zero>\d{1,9})"
)
_PIECES = re.compile(r",\s++|(?:(?<!\s)\s++)?\|\s*+|;\s++|\s{2,}+|\t")
# Pairs separated by spaces, and names separated from their numbers by spaces.
_LOOSE = re.compile(
    rf"(?<![\w.=:/'\"-])(?P<name>[A-Za-z_][\w./-]{{0,80}}+)(?:=|:\s?)(?P<value>{NUMBER})(?=[\s,;|]|$)"
)
_SPACED = re.compile(
    rf"(?P<name>[A-Za-z][\w /]{{0,60}}?)(?<!\s)\s++(?P<value>{NUMBER})(?:\s?[A-Za-z/]{{1,8}})?"
)
# A pair after a step, in lines where only spaces and commas separate names and numbers.
_BARE = re.compile(
    rf"[\s,;|]*+(?P<name>[A-Za-z_][\w./-]{{0,60}}+)\s++(?P<value>{NUMBER})(?=[\s,;|]|$)"
)
# The rewards of a step's samples, one by one.
_SAMPLE = r"['\"]?[-+]?\d{1,9}+(?:\.\d*+)?(?:[eE][-+]?\d++)?['\"]?"
_REWARDS = re.compile(
    rf"(?<![\w.])rewards?\s?[=:]\s?\[\s?(?P<each>{_SAMPLE}(?:(?:,\s?|\s{{1,2}}){_SAMPLE})+)\s?\]",
    re.IGNORECASE,
)
_SAMPLES = re.compile(_SAMPLE)
_BARE_END = re.compile(r"[\s,;|]*+")
_COLON_SPACES = re.compile(r"([:=])\s+")
# A log level ends the prefix of a logger,
_LOGGER = re.compile(
    r"^.{0,160}?\b(?:INFO|SUCCESS|DEBUG|WARNING)\b[\s:>|\])-]*"
    # except that the place in the code may follow, as in loguru: module:function:line -
    r"(?:[\w./<>]{1,120}:(?:[\w<>]{1,80}:)?\d{1,6}\]?\s*(?:[-|]\s+|:\s+))?"
)
# If a line has none of these, none of its names is certainly a metric's.
SPEAKS = (
    "loss", "reward", "grad", "gnorm", "learning", "lr", "kl", "entropy", "clip", "throughput",
    "tps", "tokens_per", "length", "epoch", "step_time", "num_tokens",
)  # fmt: skip


def read_line(body: str) -> Row | None:
    """Return the row of a line, by the first format that fits."""
    if len(body) > _MAX_CHARS:
        return None
    if "(train)" in body or "(val)" in body:
        return _mmengine(body)
    if "iter " in body:
        found = _litgpt(body)
        if found is not None:
            return found
    if ":" in body or "=" in body:
        low = body.lower()
        for word in SPEAKS:
            if word in low:
                return _pairs(body)
        return None
    return _bare(body)


def unknown_row(body: str) -> Row | None:
    """Return the named numbers in a line, whatever the names are; None if it has none."""
    if len(body) > _MAX_CHARS:
        return None
    row = Row({})
    step = _STEP.search(body)
    for name, text in _named(_LOGGER.sub("", body)) or _loose(body, step.end() if step else None):
        _put(row, name, text)
    if step:
        row.step = int(step[1])
        row.values = {n: v for n, v in row.values.items() if not _STEP.fullmatch(f"{n} 1")}
    return row if row.values else None


def ahead_of_row(body: str) -> dict[str, float]:
    """Return the metrics that prime-rl prints before a step's row. The log keeps the line, too."""
    found = _FILTERED.search(body) if "zero_advantage=" in body else None
    if not found or not int(found["all"]):
        return {}
    return {"frac_reward_zero_std": min(1.0, int(found["zero"]) / int(found["all"]))}


class VerlRows:
    """Parse verl's rows. Most rows have the same names as the one before, so only numbers are
    parsed.
    """

    def __init__(self) -> None:
        # For the last row: each name, the text up to its number, and the total length of these
        # texts.
        self._names: list[str] = []
        self._heads: list[str] = []
        self._size_of_heads = 0

    def row(self, body: str) -> Row | None:
        """Return the row of a line that verl printed; None for other lines."""
        found = _VERL.search(body) if len(body) <= _MAX_CHARS else None
        if not found:
            return None
        parts = body[found.end() :].split(" - ")
        row = Row(self._same(parts) or self._values(parts), int(found[1]), form="verl")
        if not row.values:
            return None
        if all(name.startswith("val") for name in row.values):
            row.kind = RowKind.EVAL
        # Older versions print three decimals of every number; newer ones print all decimals.
        ends = map(str.rstrip, parts)
        if all(part[-4:-3] == "." or part.endswith(("nan", "inf")) for part in ends):
            row.fixed = dict.fromkeys(row.values, 3)
        return row

    def _same(self, parts: list[str]) -> dict[str, float] | None:
        """Return the values of a row that has the same names as the last row, else None."""
        texts = list(map(str.removeprefix, parts, self._heads))
        # The total length of the removed texts is right only if every part began with its own text.
        num_removed = sum(map(len, parts)) - sum(map(len, texts))
        if len(parts) != len(texts) or num_removed != self._size_of_heads:
            return None
        if max(map(len, texts)) > MAX_CHARS:
            return None
        try:
            return dict(zip(self._names, map(float, texts), strict=True))
        except ValueError:
            return None

    def _values(self, parts: list[str]) -> dict[str, float]:
        values: dict[str, float] = {}
        heads: list[str] = []
        for part in parts:
            name, sign, text = part.rpartition(":")
            value = number(text.strip())
            if value is not None and name and len(name) < 200:
                values[name.strip()] = value
                heads.append(name + sign)
        if len(values) == len(heads) == len(parts):
            self._names, self._heads = list(values), heads
            self._size_of_heads = sum(map(len, heads))
        return values


def _put(row: Row, name: str, text: str) -> None:
    value = number(text)
    if value is None or not name or len(name) > 200:
        return
    row.values[name] = value
    count = decimals_of(text)
    if count is not None:
        row.fixed[name] = count


def _mmengine(body: str) -> Row | None:
    found = _MMENGINE.search(body)
    if not found:
        return None
    epoch = int(found["epoch"] or 1)
    total, count = int(found["total"]), int(found["count"])
    row = Row({}, form="mmengine")
    if found["part"] == "train":
        row.step = (epoch - 1) * total + count if found["unit"] == "Epoch" else count
        row.total_steps = total if found["unit"] == "Iter" else None
    else:
        row.kind = RowKind.EVAL
    for name, text in _named(body[found.end() :]):
        _put(row, name if row.kind is RowKind.TRAIN else f"val_{name}", text)
    return row if row.values else None


def _litgpt(body: str) -> Row | None:
    found = _LITGPT.search(body)
    if found:
        row = Row({}, int(found["iter"]), form="litgpt")
        _put(row, "loss", found["loss"])
        _put(row, "val_loss", found["val"])
        _put(row, "iter time", found["ms"] or "")
        return row
    found = _LITGPT_VAL.search(body)
    return _val_loss(found) if found else None


def _val_loss(found: re.Match[str]) -> Row:
    row = Row({}, int(found["iter"]), kind=RowKind.EVAL, form="litgpt")
    _put(row, "val_loss", found["val"])
    return row


def _pairs(body: str) -> Row | None:
    """Return the `name: number` pairs of a line. At least one name must certainly be a metric's."""
    if is_transition(body):
        return None
    row = Row({}, form=_form(body))
    step = _IN_EPOCH.search(body) or _STEP.search(body)
    each = _REWARDS.search(body[:_MAX_LIST]) if step else None
    if each:
        body = f"{body[: each.start()].rstrip()} {body[each.end() :].lstrip()}"
    sure = 0
    pairs = _named(_LOGGER.sub("", body)) or list(_loose(body, step.end() if step else None))
    for name, text in pairs:
        known = known_tail(name)
        if not known and (end := known_end(name)) not in row.values:
            known = end
        if known or row.values or step:
            _put(row, known or name, text)
        sure += bool(known) and (known or name) in row.values
    if each:
        row.values |= _of_samples(
            [float(text.strip("'\"")) for text in _SAMPLES.findall(each["each"])]
        )
        sure += 1
    if step:
        _place(row, step, body)
        for name in [name for name in row.values if _STEP.fullmatch(f"{name} 1")]:
            del row.values[name]
    if step is None and row.values.get("num_updates", 0.5).is_integer():
        # fairseq: epoch 001:  100 / 5000 loss=2.1, ..., num_updates=100
        row.step = int(row.values.pop("num_updates"))
    is_held_out = sure >= 1 and says_held_out(_before_first(body, row))
    if is_held_out:
        row = as_held_out(row)
    enough = sure >= 1 and (row.step is not None or sure >= 2 or is_held_out or _is_only(body, row))
    return row if enough and row.values else None


def _before_first(body: str, row: Row) -> str:
    """Return a line, without what a logger put before it, up to the name of its first metric."""
    text = _LOGGER.sub("", body)
    places = [text.find(name) for name in row.values if metric_of(name) not in (None, "epoch")]
    return text[: min((place for place in places if place >= 0), default=0)]


def _of_samples(rewards: list[float]) -> dict[str, float]:
    return {
        "reward": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
    }


def _bare(body: str) -> Row | None:
    """Return the row of a line that consists of a step, names and numbers only."""
    step = _STEP.search(body)
    if step is None or len(body) > 1_000:
        return None
    row = Row({}, form="pairs")
    _place(row, step, body)
    at, is_sure = step.end(), False
    while found := _BARE.match(body, at):
        _put(row, found["name"], found["value"])
        is_sure = is_sure or metric_of(found["name"]) is not None
        at = found.end()
    return row if is_sure and _BARE_END.fullmatch(body, at) else None


def _place(row: Row, step: re.Match[str], body: str) -> None:
    row.step = int(step[1])
    row.total_steps = int(step[2]) if step[2] else None
    epoch = _EPOCH.search(body)
    if epoch:
        row.epoch = int(epoch[1]), int(epoch[2]) if epoch[2] else None


def _form(body: str) -> str:
    if "[titan]" in body:
        return "titan"
    if "SUCCESS Step" in body or " | Throughput: " in body:
        return "prime"
    return "megatron" if "elapsed time per iteration" in body else "pairs"


def _named(text: str) -> list[tuple[str, str]]:
    pairs, others = [], []
    for piece in _PIECES.split(_COLON_SPACES.sub(r"\1", text)):
        if len(piece) > 300:
            continue
        found = _PAIR.fullmatch(piece.strip())
        if found and not found["name"].isspace():
            pairs.append((found["name"].strip(), found["value"].strip()))
        elif last := _LAST.search(piece):
            others.append((last["name"], last["value"]))
    return [*others, *pairs] if pairs else []


def _loose(text: str, after_step: int | None) -> Iterator[tuple[str, str]]:
    """Yield pairs that are separated only by spaces.

    Examples are `step=3 loss=0.5` and, after a step, `Train loss 2.1, Learning Rate 1e-05`.
    """
    found = [(pair["name"], pair["value"]) for pair in _LOOSE.finditer(text[:20_000])]
    if len(found) < 2 and after_step is not None:
        pieces = _PIECES.split(text[after_step:].lstrip(" :|,-")[:20_000])
        matches = [_SPACED.fullmatch(piece.strip()) for piece in pieces if len(piece) < 100]
        spaced = [(one["name"], one["value"]) for one in matches if one]
        found = spaced if sum(bool(known_tail(name)) for name, _ in spaced) >= 2 else found
    yield from found if len(found) >= 2 else ()


def _is_only(body: str, row: Row) -> bool:
    """Return whether a line with a single metric has little other text, so that it is a row."""
    rest = _LOGGER.sub("", body)
    return len(row.values) == 1 and len(rest.split()) <= 4 and not rest.lower().startswith("file ")
