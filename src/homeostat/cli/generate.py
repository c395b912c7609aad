"""`homeostat generate`: sample answers to prompts from any model, adapter, GGUF file or run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homeostat.cli import generation_options as opts
from homeostat.cli.options import Format, OutputFormat
from homeostat.errors import DataError
from homeostat.observe.safe_text import safe_text

if TYPE_CHECKING:
    from homeostat.generation.prompt_file import FilePrompt
    from homeostat.generation.sampling_run import Answer, SamplingRun


def generate(
    model: opts.Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The prompt; - reads it from standard input."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Prompts: JSON lines with `prompt` or `messages`, or one text per line.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write JSON lines there.")
    ] = None,
    raw: Annotated[
        bool | None,
        typer.Option(
            "--raw/--chat",
            help="--raw: continue the text. --chat: answer it as a message. Default: as a run was "
            "trained; for other models a chat if there is a template.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, help="Answers for each prompt.")
    ] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Text that ends an answer; may be repeated."),
    ] = None,
    max_new_tokens: opts.MaxNewTokens = 512,
    temperature: opts.Temperature = 1.0,
    top_p: opts.TopP = 1.0,
    top_k: opts.TopK = None,
    seed: opts.Seed = 0,
    base: opts.Base = None,
    step: opts.Step = None,
    tokenizer: opts.Tokenizer = None,
    chat_template: opts.Template = None,
    context: opts.Context = None,
    device: opts.Device = opts.DeviceName.AUTO,
    precision: opts.Precision = opts.PrecisionName.AUTO,
    format: OutputFormat = Format.TEXT,
) -> None:
    """Generate answers with any checkpoint, adapter, GGUF file or run.

    One prompt is answered on the terminal as it is sampled; a file of prompts becomes JSON lines,
    one per prompt and in its order. The same seed gives the same answers.
    """
    if (prompt is None) == (file is None):
        raise DataError("say one prompt, or name a file of prompts with --file.")
    typed = sys.stdin.read() if prompt == "-" else prompt
    text_model, name = opts.load(
        model,
        base=base,
        step=step,
        tokenizer=tokenizer,
        template=chat_template,
        device=device,
        precision=precision,
    )
    from homeostat.generation.loading import open_engine
    from homeostat.generation.prompt_file import FilePrompt, read_prompts
    from homeostat.generation.prompting import SamplingOptions, prompt_tokens
    from homeostat.generation.sampling_run import SamplingRun

    as_chat = text_model.answers_chats if raw is None else not raw
    if system is not None and not as_chat:
        raise DataError("--system needs a chat, and this is a plain text: leave it out.")
    if file is not None:
        prompts = read_prompts(file, text_model.tokenizer, as_chat=as_chat, system=system)
    else:
        assert typed is not None, "checked above"
        tokens_T = prompt_tokens(typed, text_model.tokenizer, as_chat=as_chat, system=system)
        prompts = [FilePrompt(typed, tokens_T)]
    options = SamplingOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=tuple(stop or ()),
    )
    run = SamplingRun(
        open_engine(text_model, context=context),
        text_model.tokenizer,
        [one.tokens_T for one in prompts],
        options,
        samples=samples,
        seed=seed,
    )
    streams = file is None and samples == 1 and format is Format.TEXT and out is None
    if streams:
        for piece in run.pieces():
            typer.echo(safe_text(piece), nl=False)
        typer.echo()
        return
    typer.echo(f"model: {name}", err=True)
    _write(run, prompts, out=out)


def _write(run: SamplingRun, prompts: list[FilePrompt], *, out: Path | None) -> None:
    """Write one JSON line per prompt, in order, each as soon as it and those before it are done."""
    started, num_tokens = time.perf_counter(), 0
    stream = out.open("w", encoding="utf-8") if out is not None else sys.stdout
    try:
        for number, answers in run.answers():
            num_tokens += sum(answer.num_tokens for answer in answers)
            line = json.dumps(_record(prompts[number].shown, answers), ensure_ascii=False)
            stream.write(line + "\n")
            stream.flush()
            if out is not None:
                typer.echo(f"\r{number + 1} of {len(prompts)} prompts", err=True, nl=False)
    finally:
        if out is not None:
            stream.close()
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
