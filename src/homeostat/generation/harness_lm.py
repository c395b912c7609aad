"""Evaluate by lm-evaluation-harness (the extra `eval`) through the native engine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from homeostat.errors import DataError, MissingDependencyError
from homeostat.generation.harness import Harness

_TASK = re.compile(r"^task:\s*(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a result."""

    task: str
    metric: str
    value: float
    stderr: float | None
    num_samples: int | None


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Names of tasks, and the folders in which those that are not built in are defined."""

    names: tuple[str, ...]
    folders: tuple[Path, ...]


def require_harness() -> Any:
    """Return the package lm_eval, or raise the error that names its extra."""
    try:
        import lm_eval
    except ImportError:
        raise MissingDependencyError.of(
            "lm_eval", extra="eval", needed_for="homeostat eval (lm-evaluation-harness)"
        ) from None
    return lm_eval


def read_tasks(words: Sequence[str], *, include: Path | None) -> TaskFiles:
    """Return names of tasks; a word that is a YAML file stands for the task that it defines."""
    names: list[str] = []
    folders = [] if include is None else [include]
    for word in words:
        file = Path(word)
        if file.suffix not in (".yaml", ".yml"):
            names.append(word)
            continue
        if not file.is_file():
            raise DataError(f"--tasks: {file} does not exist.")
        found = _TASK.search(file.read_text(encoding="utf-8"))
        if found is None:
            raise DataError(f"--tasks: {file} has no line `task: NAME`.")
        names.append(found.group(1))
        folders.append(file.parent)
    if include is not None and not include.is_dir():
        raise DataError(f"--include: {include} is no folder.")
    return TaskFiles(tuple(names), tuple(dict.fromkeys(folders)))


def evaluate_tasks(
    harness: Harness,
    tasks: TaskFiles,
    *,
    name: str,
    num_fewshot: int | None = None,
    limit: int | None = None,
    as_chat: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Run the tasks and return the harness's own results."""
    package = require_harness()
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(folder) for folder in tasks.folders] or None)
    _require_known(tasks.names, manager.all_tasks)
    try:
        found = package.simple_evaluate(
            model=harness_lm(harness, name=name),
            tasks=list(tasks.names),
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=as_chat,
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except OSError as error:
        # Mostly a data set that is not on this disk while no hub can be reached.
        raise DataError(f"the tasks {', '.join(tasks.names)} cannot be read: {error}") from None
    assert found is not None, "only ranks above 0 get None"
    return found


def _require_known(names: Sequence[str], known: Sequence[str]) -> None:
    missing = [name for name in names if name not in known]
    if missing:
        near = difflib.get_close_matches(missing[0], known, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise DataError(
            f"--tasks: lm-evaluation-harness has no task {', '.join(missing)}.{hint} "
            "Name your YAML file, or its folder with --include."
        )


def harness_lm(harness: Harness, *, name: str) -> Any:
    """Return an LM of lm-evaluation-harness. Its base class exists only where that is installed."""
    from lm_eval.api.model import TemplateLM

    class HomeostatLM(TemplateLM):
        """The native engine behind the interface of lm-evaluation-harness."""

        tokenizer_name = f"homeostat:{name}"
        max_length = harness.max_length
        eot_token_id = harness.tokenizer.eos_id
        prefix_token_id = harness.prefix_id

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return harness.encode(string, opened=add_special_tokens is not False)

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, **_: Any
        ) -> list[tuple[float, bool]]:
            scored = harness.score([(context, rest) for _, context, rest in requests])
            return [(one.logprob, one.is_greedy) for one in scored]

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[float]:
            return [harness.score_whole(request.args[0]) for request in requests]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return harness.generate([request.args for request in requests])

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return harness.chat(chat_history, opens_answer=add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return harness.tokenizer.chat_template if chat_template else None

    return HomeostatLM()


def result_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the numbers of a result in the order of its tasks."""
    counts = found.get("n-samples", {})
    for task, numbers in found["results"].items():
        for key, value in numbers.items():
            metric, comma, filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = numbers.get(f"{metric}_stderr,{filter}")
            label = metric if filter == "none" else f"{metric} ({filter})"
            stderr = float(error) if isinstance(error, int | float) else None
            samples = counts.get(task, {}).get("effective")
            yield Row(task, label, float(value), stderr, samples)


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the numbers for programs."""
    return [asdict(row) for row in rows]
