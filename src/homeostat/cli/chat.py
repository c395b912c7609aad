"""`homeostat chat`: talk to a model in the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from homeostat.cli import generation_options as opts
from homeostat.errors import DataError
from homeostat.observe.safe_text import safe_text

if TYPE_CHECKING:
    from homeostat.generation.conversation import Conversation

HELP = """/new          start again, without the messages so far
/system TEXT  start again with this system message
/retry        sample another answer to the last question
/help         these commands
/exit         leave (also Ctrl-D); Ctrl-C breaks off an answer"""


def chat(
    model: opts.Model,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message.")
    ] = None,
    max_new_tokens: opts.MaxNewTokens = 1024,
    temperature: opts.Temperature = 0.7,
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
) -> None:
    """Talk to any checkpoint, adapter, GGUF file or run.

    Answers appear as they are sampled. Type /help for the commands.
    """
    text_model, name = opts.load(
        model,
        base=base,
        step=step,
        tokenizer=tokenizer,
        template=chat_template,
        device=device,
        precision=precision,
    )
    from homeostat.generation.conversation import Conversation
    from homeostat.generation.loading import open_engine
    from homeostat.generation.prompting import SamplingOptions

    text_model.tokenizer.require_chat_template(wanted_by="chat")
    options = SamplingOptions(max_new_tokens, temperature, top_p, top_k)
    engine = open_engine(text_model, context=context, max_concurrency=1)
    talk = Conversation(engine, text_model.tokenizer, options, seed=seed)
    talk.restart(system)
    typer.echo(f"{safe_text(name)}. Type /help for commands, /exit to leave.", err=True)
    _loop(talk)


def _loop(talk: Conversation) -> None:
    while (line := _read_line()) is not None:
        word, _, rest = line.strip().partition(" ")
        if not word:
            continue
        if word in ("/exit", "/quit"):
            return
        if word == "/help":
            typer.echo(HELP)
        elif word == "/new":
            talk.restart()
        elif word == "/system":
            talk.restart(rest or None)
        elif word == "/retry":
            if talk.forget_answer():
                _show(talk, None)
            else:
                typer.echo("There is no answer yet.", err=True)
        elif word.startswith("/"):
            typer.echo(f"There is no command {word}. Type /help for the commands.", err=True)
        else:
            _show(talk, line)


def _read_line() -> str | None:
    """Return the next line, or None at the end of the input."""
    shown = "you> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(shown)
        except EOFError:
            return None
        except KeyboardInterrupt:
            # At the prompt there is nothing to break off.
            typer.echo("\nType /exit or press Ctrl-D to leave.", err=True)


def _show(talk: Conversation, question: str | None) -> None:
    started = time.perf_counter()
    try:
        for piece in talk.answer() if question is None else talk.ask(question):
            typer.echo(safe_text(piece), nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        # Raised inside the iterator, which has ended the request by now.
        pass
    except DataError as error:
        typer.echo(f"error: {safe_text(str(error))}", err=True)
        return
    seconds = time.perf_counter() - started
    rate = talk.last_tokens / seconds if seconds > 0 else 0.0
    typer.echo()
    note = {"length": ", cut at the limit", "aborted": ", broken off"}.get(
        str(talk.last_reason), ""
    )
    typer.echo(f"[{talk.last_tokens} tokens, {rate:.0f} a second{note}]", err=True)
