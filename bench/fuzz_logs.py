"""Claim: no mutated log or metric file ever gives the doctor a traceback.

Cases are sound files of every format (fuzz_log_seeds.py), mutated one to four times: bytes flipped,
cut, doubled; lines shuffled, repeated, mixed with another format's; numbers made huge, negative or
none; nesting, NUL bytes, invalid UTF-8. Each goes through `open_run`, all rules and both
renderings, in this process, under a limit of address space. Outcomes:

    read       a diagnosis came out, in JSON that a strict parser takes and in text
    refused    a HomeostatError said what is wrong
    violation  anything else: an exception, or more than TIMEOUT_S seconds of CPU time

A violation holds the index that makes it again: `--only INDEX`.

    python bench/fuzz_logs.py --cases 20000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from fuzz_log_seeds import FORMATS, Files

from homeostat.errors import HomeostatError
from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.formats.as_text import as_text
from homeostat.health.readers import open_run
from homeostat.health.registry import RULES

MAX_BYTES = 8 * 2**30
TIMEOUT_S = 10.0
MAX_MUTATIONS = 4
_NUMBERS = [
    b"1e400", b"-1e308", b"nan", b"Infinity", b"9" * 400, b"0x1F", b"1_000", b"--5", b"1e", b"-",
    b"99999999999999999999", b"1.7976931348623157e308", b"5e-324", b"\xd9\xa3", b"None", b"true",
]  # fmt: skip
_JUNK = [
    b"\0" * 64, b"\xff\xfe\xfa", b"\xed\xa0\x80", b"\x1b[2J\x1b]0;x\x07", b"{" * 3000, b"[" * 3000,
    b'{"a":' * 500, b"'" * 999, b'"', b"\\", b"\r", b"%", b"step:" * 200, b" - " * 500, b"\xe2\x80",
    b"--lr " * 50, b"!!python/object/apply:os.system ['true']", b"&a [*a, *a]", b"=" * 5000,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a case."""

    index: int
    format: str
    mutations: tuple[str, ...]
    outcome: str
    seconds: float
    why: str = ""


def _spot(data: bytes, rng: random.Random) -> int:
    return rng.randrange(len(data)) if data else 0


def flip(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randint(1, 20) if data else 0):
        found[_spot(data, rng)] = rng.randrange(256)
    return bytes(found)


def cut_end(data: bytes, rng: random.Random) -> bytes:
    return data[: _spot(data, rng)]


def cut_middle(data: bytes, rng: random.Random) -> bytes:
    at = _spot(data, rng)
    return data[:at] + data[at + rng.randint(1, 400) :]


def junk(data: bytes, rng: random.Random) -> bytes:
    at = _spot(data, rng)
    return data[:at] + rng.choice(_JUNK) + data[at:]


def numbers(data: bytes, rng: random.Random) -> bytes:
    """Some numbers become what no number should be."""

    share, others = rng.choice([0.02, 0.2, 1.0]), rng.choices(_NUMBERS, k=3)
    return re.sub(
        rb"\d+(?:\.\d+)?(?:e-?\d+)?",
        lambda found: rng.choice(others) if rng.random() < share else found.group(),
        data,
    )


def shuffle(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    rng.shuffle(lines)
    return b"\n".join(lines)


def repeat(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    some = rng.choices(lines, k=rng.randint(1, 60))
    return b"\n".join([*lines, *some] if rng.random() < 0.5 else [*lines, *lines])


def join_lines(data: bytes, rng: random.Random) -> bytes:
    end = rng.choice([b"", b"\r", b" ", b"\0", b"\x85", b"\xe2\x80\xa8"])
    return data.replace(b"\n", end, rng.choice([1, 5, -1]))


def swap_quotes(data: bytes, rng: random.Random) -> bytes:
    return data.translate(bytes.maketrans(b"'\"" if rng.random() < 0.5 else b",:", b"\"':,"[:2]))


def mix(data: bytes, rng: random.Random) -> bytes:
    """Lines of another format between those of this one."""
    other = FORMATS[rng.choice(list(FORMATS))](rng)
    lines = data.split(b"\n") + rng.choice(list(other.values())).split(b"\n")
    if rng.random() < 0.5:
        rng.shuffle(lines)
    return b"\n".join(lines)


def nest(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice([3, 60, 2000])
    opened, closed = rng.choice([(b"[", b"]"), (b'{"a": ', b"}"), (b"(", b")")])
    at = _spot(data, rng)
    return data[:at] + opened * depth + b"1" + closed * depth + data[at:]


def recode(data: bytes, rng: random.Random) -> bytes:
    text = data.decode("utf-8", errors="replace")
    return text.encode(rng.choice(["utf-16", "utf-16-be", "utf-8-sig", "utf-32"]))


def empty(data: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"", b"\n", b"{}", b"[]", b"null", b"\0"])


def rename_steps(data: bytes, rng: random.Random) -> bytes:
    return data.replace(b"step", rng.choice([b"Step", b"STEP", b"", b"loss", b"step step"]))


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip, cut_end, cut_middle, junk, numbers, shuffle, repeat, join_lines, swap_quotes, mix, nest,
    recode, empty, rename_steps,
)  # fmt: skip


def make_case(folder: Path, *, seed: int, index: int) -> tuple[str, tuple[str, ...], Path]:
    """Write the case. Returns its format, what was done to it, and the path to give the doctor."""
    rng = random.Random(f"{seed}-{index}")
    name = rng.choice(list(FORMATS))
    files: Files = dict(FORMATS[name](rng))
    done = []
    for _ in range(rng.randint(1, MAX_MUTATIONS)):
        mutate, victim = rng.choice(MUTATIONS), rng.choice(list(files))
        files[victim] = mutate(files[victim], rng)
        done.append(mutate.__name__)
    if len(files) > 1 and rng.random() < 0.2:
        del files[rng.choice(list(files))]
        done.append("remove")
    shutil.rmtree(folder, ignore_errors=True)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    [*_, last] = files
    whole = len(files) > 1 or rng.random() < 0.1
    return name, tuple(done), folder if whole else folder / last


def _examine(path: Path) -> str:
    try:
        view = open_run(path)
    except HomeostatError as error:
        if not str(error).strip():
            raise AssertionError("a refusal without words") from error
        return "refused"
    diagnosis = diagnose(view, RULES)
    json.loads(json.dumps(as_json(diagnosis, view), allow_nan=False))
    text = as_text(diagnosis, view, width=80, verbose=True)
    assert text.isascii() or text.encode("utf-8"), "text that cannot be written"
    assert all(char == "\n" or char.isprintable() for char in text), "text that steers a terminal"
    return "read"


def run_case(folder: Path, *, seed: int, index: int) -> Verdict:
    name, done, path = make_case(folder, seed=seed, index=index)
    # CPU seconds: what else the machine does is not the doctor's fault.
    started = time.process_time()
    try:
        outcome, why = _examine(path), ""
    # Any exception is what is looked for; an interrupt is not one.
    except Exception:
        outcome, why = "violation", traceback.format_exc()
    seconds = time.process_time() - started
    if seconds > TIMEOUT_S and outcome != "violation":
        outcome, why = "violation", f"took {seconds:.1f} s"
    return Verdict(index, name, done, outcome, seconds, why)


def run_all(indices: Sequence[int], *, seed: int) -> list[Verdict]:
    verdicts = []
    with tempfile.TemporaryDirectory() as root:
        for index in indices:
            verdicts.append(run_case(Path(root) / "case", seed=seed, index=index))
            if len(verdicts) % 1000 == 0:
                print(f"{len(verdicts)} of {len(indices)}", file=sys.stderr)
    return verdicts


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    seconds = sorted(verdict.seconds for verdict in verdicts)
    return {
        "cases": len(verdicts),
        "outcomes": dict(Counter(verdict.outcome for verdict in verdicts)),
        "formats": dict(Counter(verdict.format for verdict in verdicts)),
        "mutations": dict(Counter(name for verdict in verdicts for name in verdict.mutations)),
        "cpu_seconds_per_case": {
            "mean": round(statistics.fmean(seconds), 4),
            "p99": round(seconds[int(0.99 * (len(seconds) - 1))], 4),
            "max": round(seconds[-1], 4),
        },
        "violations": [asdict(verdict) for verdict in verdicts if verdict.outcome == "violation"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutated logs: never a traceback.")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="make this case again, and show how it ends")
    chosen = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    if chosen.only is not None:
        [verdict] = run_all([chosen.only], seed=chosen.seed)
        print(json.dumps(asdict(verdict), indent=2))
        sys.exit(verdict.outcome == "violation")
    started = time.perf_counter()
    found = summary(run_all(range(chosen.cases), seed=chosen.seed))
    result = {
        "claim": "no mutated log or metric file gives a traceback",
        "holds": not found["violations"],
        **common.machine(["numpy"]),
        "seed": chosen.seed,
        "rules": len(RULES),
        "seconds": round(time.perf_counter() - started, 1),
        **found,
    }
    common.write_result("fuzz_logs", result)
    sys.exit(not result["holds"])


if __name__ == "__main__":
    main()
