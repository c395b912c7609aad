"""`homeostat generate`: sample answers to prompts from any model, adapter, GGUF file or run."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homeostat.cli import generation_options as opts
from homeostat.cli.options import Format, OutputFormat
from homeostat.cli.output_file import LineFile
from homeostat.errors import DataError
from homeostat.observe.safe_text import safe_text

if TYPE_CHECKING:
    from homeostat.generation.loading import TextModel
    from homeostat.generation.prompt_file import FilePrompt
    from homeostat.generation.sampling_run import Answer, SamplingRun


Prompt = Annotated[
    str | None,
    typer.Argument(metavar="[PROMPT]", help="The prompt; - reads it from standard input."),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Prompts: JSON lines with `prompt` or `messages`, or one text per line.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="FILE", help="Write the answers to this file, as JSON lines."
    ),
]
Raw = Annotated[
    bool | None,
    typer.Option(
        "--raw/--chat",
        help="--raw: continue the text of the prompt. --chat: treat the prompt as a message and "
        "answer it. Default: for a run, as it was trained; for other models --chat if there is a "
        "chat template.",
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")
]
Samples = Annotated[
    int, typer.Option("--samples", "-n", min=1, help="Number of answers to each prompt.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Text that ends an answer. May be repeated."),
]


def generate(
    model: opts.Model,
    prompt: Prompt = None,
    file: File = None,
    out: Out = None,
    raw: Raw = None,
    system: System = None,
    samples: Samples = 1,
    stop: Stop = None,
    max_new_tokens: opts.MaxNewTokens = 512,
    temperature: opts.Temperature = 1.0,
    top_p: opts.TopP = 1.0,
    top_k: opts.TopK = None,
    seed: opts.Seed = 0,
    base: opts.Base = None,
    step: opts.Step = None,
    revision: opts.Revision = None,
    tokenizer: opts.Tokenizer = None,
    chat_template: opts.Template = None,
    context: opts.Context = None,
    device: opts.Device = opts.DeviceName.AUTO,
    precision: opts.Precision = opts.PrecisionName.AUTO,
    format: OutputFormat = Format.TEXT,
) -> None:
    """Generate answers with any checkpoint, adapter, GGUF file or run.

    The answer to a single prompt appears in the terminal while it is sampled. For a file of prompts
    the command writes JSON lines, one per prompt, in the same order. The same seed gives the same
    answers.
    """
    if (prompt is None) == (file is None):
        raise DataError("say one prompt, or name a file of prompts with --file.")
    text_model, name = opts.load(
        model,
        base=base,
        step=step,
        revision=revision,
        tokenizer=tokenizer,
        template=chat_template,
        device=device,
        precision=precision,
    )
    from homeostat.generation.loading import open_engine
    from homeostat.generation.prompting import SamplingOptions
    from homeostat.generation.sampling_run import SamplingRun

    prompts = _prompts(text_model, prompt, file, raw=raw, system=system)
    run = SamplingRun(
        open_engine(text_model, context=context),
        text_model.tokenizer,
        [one.tokens_T for one in prompts],
        SamplingOptions(max_new_tokens, temperature, top_p, top_k, stop=tuple(stop or ())),
        samples=samples,
        seed=seed,
    )
    if file is None and samples == 1 and format is Format.TEXT and out is None:
        _stream(run)
        return
    typer.echo(f"model: {name}", err=True)
    _write(run, prompts, out=out)


def _prompts(
    model: TextModel, prompt: str | None, file: Path | None, *, raw: bool | None, system: str | None
) -> list[FilePrompt]:
    """Return the prompt of the command line or of standard input, or those of the file."""
    from homeostat.generation.prompt_file import FilePrompt, read_prompts
    from homeostat.generation.prompting import prompt_tokens

    as_chat = model.answers_chats if raw is None else not raw
    if system is not None and not as_chat:
        raise DataError("--system needs a chat, and this is a plain text: leave it out.")
    if file is not None:
        return read_prompts(file, model.tokenizer, as_chat=as_chat, system=system)
    typed = sys.stdin.read() if prompt == "-" else prompt
    assert typed is not None, "checked above"
    tokens_T = prompt_tokens(typed, model.tokenizer, as_chat=as_chat, system=system)
    return [FilePrompt(typed, tokens_T)]


def _stream(run: SamplingRun) -> None:
    """Show the answer on the terminal while it is sampled."""
    for piece in run.pieces():
        typer.echo(safe_text(piece), nl=False)
    typer.echo()


def _write(run: SamplingRun, prompts: list[FilePrompt], *, out: Path | None) -> None:
    """Write one JSON line per prompt, in order, each as soon as it and those before it are done."""
    started, num_tokens = time.perf_counter(), 0
    with LineFile(out) if out is not None else nullcontext(sys.stdout) as stream:
        for number, answers in run.answers():
            num_tokens += sum(answer.num_tokens for answer in answers)
            line = json.dumps(_record(prompts[number].shown, answers), ensure_ascii=False)
            stream.write(line + "\n")
            stream.flush()
            if out is not None:
                typer.echo(f"\r{number + 1} of {len(prompts)} prompts", err=True, nl=False)
    seconds = time.perf_counter() - started
    rate = num_tokens / seconds if seconds > 0 else 0.0
    lead = "\r" if out is not None else ""
    typer.echo(f"{lead}{len(prompts)} prompts, {num_tokens} tokens, {rate:.0f} a second", err=True)


def _record(shown: Any, answers: list[Answer]) -> dict[str, Any]:
    return {
        "prompt": shown,
        "answers": [
            {
                "text": answer.text,
                "tokens": answer.num_tokens,
                "logprob": answer.logprob,
                "stop_reason": str(answer.stop_reason),
            }
            for answer in answers
        ],
    }
