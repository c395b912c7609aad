"""Save sampled completions for people to read, one Parquet file per step.

    completions/step_00000012.parquet

There is one row per completion: its origin (step, prompt_id, group, sample), prompt and answer as
text (messages and the data's own columns as JSON text), why it ended, and its rewards
(`reward/<name>` per function, null if a function does not apply or failed). `failed` names the
functions that failed, as a JSON list, and is null if none did. `token_ids` are the completion's
tokens; `logp_difference` is the trainer's log-prob of each less the engine's, to about three
digits, NaN for tokens that were not compared, and null if none was.

Nothing is computed from these files, so a failure to write them is an OSError that the run
survives. pyarrow is imported only when needed, so that the doctor starts without it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray
from homeostat.errors import RunDirError
from homeostat.json_text import parse_json
from homeostat.observe.durable import write_atomically
from homeostat.types import RolloutGroup, Sample

Row = dict[str, Any]

_NAME = re.compile(r"step_(\d{8})\.parquet")
# Column -> Arrow type.
COLUMNS = {
    "step": "int64",
    "prompt_id": "int64",
    "group": "int32",
    "sample": "int32",
    "prompt": "string",
    "completion": "string",
    "num_tokens": "int32",
    "stop_reason": "string",
    "policy_version": "int64",
    "reward": "float64",
    "advantage": "float64",
    "columns": "string",
}
# Files of earlier versions do not have this column.
LATER_COLUMNS = {"failed": "string"}
# Lists of numbers: of their items.
LATER_LISTS = {"token_ids": "int32", "logp_difference": "float32"}
REWARD_PREFIX = "reward/"
# Values that a reward function passed to log_extra, as JSON text.
EXTRA_PREFIX = "extra/"


def write_completions(
    folder: Path,
    step: int,
    groups: Sequence[RolloutGroup],
    *,
    advantages: Sequence[Sequence[float | None]],
    logp_differences: Sequence[Sequence[FloatArray | None]] | None = None,
    max_rows: int | None = None,
) -> Path:
    """Write the first `max_rows` completions of a step (None: all). Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = _rows(step, groups, advantages)[:max_rows]
    if logp_differences is not None:
        flat = [one for of_group in logp_differences for one in of_group]
        for row, difference_T in zip(rows, flat, strict=False):
            row["logp_difference"] = _rounded(difference_T)
    names = dict.fromkeys(name for row in rows for name in row)
    rewards = [name for name in names if name.startswith(REWARD_PREFIX)]
    extras = [name for name in names if name.startswith(EXTRA_PREFIX)]
    types = (
        COLUMNS
        | LATER_COLUMNS
        | dict.fromkeys(rewards, "float64")
        | dict.fromkeys(extras, "string")
    )
    fields = [(name, pa.type_for_alias(kind)) for name, kind in types.items()]
    fields += [(name, pa.list_(pa.type_for_alias(kind))) for name, kind in LATER_LISTS.items()]
    schema = pa.schema(fields)
    stream = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, stream, write_page_checksum=True, compression="zstd")
    folder.mkdir(parents=True, exist_ok=True)
    path = completions_file(folder, step)
    write_atomically(path, stream.getvalue().to_pybytes())
    return path


def _rows(
    step: int, groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float | None]]
) -> list[Row]:
    rows = []
    for number, (group, of_group) in enumerate(zip(groups, advantages, strict=True)):
        prompt = group.prompt.prompt
        shared = {
            "step": step,
            "prompt_id": group.prompt.prompt_id,
            "group": number,
            "prompt": _clean(prompt if isinstance(prompt, str) else _json(prompt)),
            "columns": _clean(_json(dict(group.prompt.columns))),
        }
        for place, (sample, advantage) in enumerate(zip(group.samples, of_group, strict=True)):
            rows.append(shared | {"sample": place, "advantage": advantage} | _own(sample))
    return rows


def _own(sample: Sample) -> Row:
    completion = sample.completion
    versions = completion.policy_versions_T.tolist()
    return {
        "completion": _clean(sample.text),
        "num_tokens": completion.num_policy_tokens,
        "token_ids": completion.tokens_T,
        "stop_reason": str(completion.stop_reason),
        # The oldest version: it shows how far a completion is behind the policy.
        "policy_version": min(versions, default=None),
        "reward": sample.reward,
        "failed": _json(sorted(sample.failed)) if sample.failed else None,
        **{f"{REWARD_PREFIX}{name}": value for name, value in sample.rewards.items()},
        **{f"{EXTRA_PREFIX}{name}": _clean(_json(value)) for name, value in sample.extras.items()},
    }


def _rounded(difference_T: FloatArray | None) -> FloatArray | None:
    """Keep the digits that a person reads: a file with fewer distinct bits is half as large."""
    if difference_T is None:
        return None
    with np.errstate(over="ignore"):
        return difference_T.astype(np.float16).astype(np.float32)


def _json(value: Any) -> str:
    # Parquet has types that JSON lacks, such as dates.
    return json.dumps(value, ensure_ascii=False, default=str)


def _clean(text: str) -> str:
    """Replace lone surrogates, which are not valid Unicode text and which Arrow refuses."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def completions_file(folder: Path, step: int) -> Path:
    """Return the path of the file of a step."""
    return folder / f"step_{step:08d}.parquet"


def completion_steps(folder: Path) -> list[int]:
    """Return the steps that have a file. Raises RunDirError if the folder cannot be listed."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunDirError(f"{folder}: cannot be read: {error.strerror}.") from None
    found = map(_NAME.fullmatch, names)
    return sorted(int(match.group(1)) for match in found if match)


def read_completions(folder: Path, step: int | None = None) -> list[Row]:
    """Return the rows of a step, or of the newest step with a file. Raises RunDirError."""
    steps = completion_steps(folder)
    if not steps or (step is not None and step not in steps):
        there = f"Steps there: {_spans(steps)}." if steps else "Only RL runs write them."
        which = "" if step is None else f" of step {step}"
        raise RunDirError(f"{folder}: holds no completions{which}. {there}")
    path = completions_file(folder, steps[-1] if step is None else step)
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        # Opening a pipe would wait for its writer without end.
        raise RunDirError(f"{path}: is not a plain file.")
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        # Invalid text or offsets must be detected before any cell is read.
        table.validate(full=True)
        rows = table.to_pylist()
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunDirError(f"{path}: not a whole Parquet file: {reason[:200]}") from None
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise RunDirError(f"{path}: holds no column {missing[0]!r}: not a file of completions.")
    return rows


def failed_rewards(row: Row) -> frozenset[str]:
    """Return the functions that failed on a completion."""
    try:
        return frozenset(map(str, parse_json(row.get("failed") or "[]")))
    except (ValueError, TypeError):
        return frozenset()


def _spans(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:4]))} ... {', '.join(map(str, steps[-2:]))}"


def best_and_worst(rows: Sequence[Row], n: int) -> tuple[list[Row], list[Row]]:
    """Return up to `n` rows of highest reward and `n` others of lowest, each in that order.

    Rows without a reward are in neither list.
    """
    scored = [row for row in rows if row["reward"] is not None and not math.isnan(row["reward"])]
    scored.sort(key=lambda row: -row["reward"])
    return scored[:n], scored[max(n, len(scored) - n) :][::-1]
