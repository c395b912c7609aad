"""Open a run's inputs for training: show progress, and record how many rows were kept."""

from __future__ import annotations

import logging
from pathlib import Path

from homeostat.config.parts import InputSettings
from homeostat.data.copies import row_facts
from homeostat.data.inputs import (
    Inputs,
    Part,
    choose_rows,
    parts_of,
    prepare_prompt_part,
    prepare_row_part,
    require_known_tokens,
    require_turn_end,
)
from homeostat.data.prompts import PromptSet
from homeostat.data.store import PrepareReport, RowStore
from homeostat.data.template_probe import probe_template, uses_chat
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.observe import format as fmt
from homeostat.run.session.session import Session
from homeostat.run.session.waiting import progress_of

log = logging.getLogger(__name__)


def open_rows(
    config: InputSettings, tokenizer: ChatTokenizer, session: Session
) -> Inputs[RowStore]:
    """Tokenise the rows that a run trains on."""
    cache = config.data.cache_dir
    cache_dir = session.run_dir.path / "data" if cache is None else Path(cache)
    parts: dict[Part, RowStore] = {}
    for part in parts_of(config.data):
        with progress_of(f"tokenising {part} rows", session.console) as progress:
            rows = prepare_row_part(
                config.data, tokenizer, part, cache_dir=cache_dir, progress=progress
            )
        report = rows.report
        log.info(
            "%s rows: %d of %d kept (%d overlong dropped, %d cut, %d unusable), %s tokens, %.0f %% "
            "of them trained",
            part,
            report.kept,
            report.seen,
            report.dropped_overlong,
            report.truncated,
            report.num_bad,
            fmt.count(report.tokens),
            100 * report.trained_tokens / report.tokens,
        )
        _record(session, part, report)
        parts[part] = rows
    _compare(config, tokenizer, session, parts["train"], parts.get("validation"))
    return choose_rows(config, parts["train"], parts.get("validation"))


def open_prompts(
    config: InputSettings, tokenizer: ChatTokenizer, session: Session
) -> Inputs[PromptSet]:
    """Tokenise the prompts of an RL run."""
    parts: dict[Part, PromptSet] = {}
    for part in parts_of(config.data):
        with progress_of(f"tokenising {part} prompts", session.console) as progress:
            prompts = prepare_prompt_part(config, tokenizer, part, progress=progress)
        require_turn_end(config, tokenizer, prompts, part)
        log.info("%s prompts: %d of %d kept", part, prompts.report.kept, prompts.report.seen)
        _record(session, part, prompts.report)
        parts[part] = prompts
    _compare(config, tokenizer, session, parts["train"], parts.get("validation"))
    return choose_rows(config, parts["train"], parts.get("validation"))


def require_vocabulary(inputs: Inputs[RowStore] | Inputs[PromptSet], *, vocab_size: int) -> None:
    """Require that the model knows every token of the inputs."""
    require_known_tokens(inputs.train.rows, "train", vocab_size=vocab_size)
    if inputs.evaluation is not None:
        require_known_tokens(inputs.evaluation.rows, "validation", vocab_size=vocab_size)


def _record(session: Session, part: Part, report: PrepareReport) -> None:
    counts = {name: value for name, value in report.to_json().items() if "examples" not in name}
    session.event("data_prepared", session.start_step, which=part, **counts)


def _compare(
    config: InputSettings,
    tokenizer: ChatTokenizer,
    session: Session,
    train: RowStore | PromptSet,
    held_out: RowStore | PromptSet | None,
) -> None:
    """Record what only the rows and the tokenizer can tell: copies, overlap, and the template."""
    if held_out is not None:
        session.event("rows_compared", session.start_step, **row_facts(train, held_out))
    probed = probe_template(tokenizer) if uses_chat(config.data) else None
    if probed is not None:
        session.event("chat_template_probed", session.start_step, **probed)
