"""`homeostat chat`: talk to a model in the terminal."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from homeostat.cli import generation_options as opts
from homeostat.errors import DataError
from homeostat.observe.safe_text import safe_text

if TYPE_CHECKING:
    from homeostat.generation.conversation import Conversation

HELP = """/new            start again, without the messages so far
/system TEXT    start again with this system message; without TEXT, with none
/retry          sample another answer to the last question
/temperature T  sample at this temperature from now on; 0 takes the likeliest token
/help           these commands
/exit           leave (also Ctrl-D); Ctrl-C breaks off an answer
A space before / sends the line as it is. A line that ends with \\ goes on in the next one."""
_PROMPT, _MORE = "you> ", "...> "


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
    revision: opts.Revision = None,
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
        revision=revision,
        tokenizer=tokenizer,
        template=chat_template,
        device=device,
        precision=precision,
    )
    from homeostat.generation.conversation import Conversation
    from homeostat.generation.loading import open_engine
    from homeostat.generation.prompting import SamplingOptions, require_template

    require_template(text_model.tokenizer, wanted_by="chat")
    options = SamplingOptions(max_new_tokens, temperature, top_p, top_k)
    engine = open_engine(text_model, context=context, max_concurrency=1)
    talk = Conversation(engine, text_model.tokenizer, options, seed=seed)
    talk.restart(system)
    _note(f"{safe_text(name)}; /help lists commands, /exit or Ctrl-D leaves")
    _loop(talk)


def _loop(talk: Conversation) -> None:
    while (line := _read_message()) is not None:
        word, _, rest = line.rstrip().partition(" ")
        if word in ("/exit", "/quit"):
            return
        if word.startswith("/"):
            _obey(talk, word, rest.strip())
        elif line.strip():
            _show(talk, line.strip())


def _obey(talk: Conversation, word: str, rest: str) -> None:
    """Obey a command, and say what it changed, so that users can see the state of the chat."""
    if word == "/help":
        typer.echo(HELP)
    elif word == "/new":
        talk.restart()
        _note("a new chat")
    elif word == "/system":
        talk.restart(rest or None)
        _note("a new chat, " + ("with this system message" if rest else "without one"))
    elif word == "/retry":
        if talk.forget_answer():
            _show(talk, None)
        else:
            _note("there is no answer yet")
    elif word == "/temperature":
        _set_temperature(talk, rest)
    else:
        _note(f"no command is {safe_text(word)}; /help lists them, a space before / sends it")


def _set_temperature(talk: Conversation, text: str) -> None:
    from homeostat.rollout.checks import MIN_TEMPERATURE

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value == 0.0 or MIN_TEMPERATURE <= value < math.inf):
        _note(f"temperature {talk.options.temperature:g}; to change it: /temperature 0.7")
        return
    talk.options = replace(talk.options, temperature=value)
    _note(f"temperature {value:g}")


def _note(text: str) -> None:
    """Write a remark that is no part of the chat."""
    line = f"[{text}]"
    typer.echo(typer.style(line, dim=True) if sys.stderr.isatty() else line, err=True)


def _read_message() -> str | None:
    """Return the next message, or None at the end of the input."""
    lines: list[str] = []
    while (line := _read_line(_MORE if lines else _PROMPT)) is not None:
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line.removesuffix("\\"))
    return "\n".join(lines) if lines else None


def _read_line(shown: str) -> str | None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        _edit_lines()
        # Readline does not count what is between \1 and \2 when it computes the width.
        shown = f"\1\x1b[1;36m\2{shown}\1\x1b[0m\2"
    while True:
        try:
            return input(shown if is_terminal else "")
        except EOFError:
            if is_terminal:
                # The shell's own prompt begins on a new line.
                typer.echo()
            return None
        except KeyboardInterrupt:
            # At the prompt there is no answer that could be interrupted.
            typer.echo()
            _note("Ctrl-D or /exit leaves")


def _edit_lines() -> None:
    """Let users edit lines and recall earlier ones. Without it a line has 4096 bytes at most,
    which is the limit of the system's own input."""
    with suppress(ImportError):
        import readline

        readline.set_auto_history(True)


def _show(talk: Conversation, question: str | None) -> None:
    started = time.perf_counter()
    try:
        for piece in talk.answer() if question is None else talk.ask(question):
            typer.echo(safe_text(piece), nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        # The error was raised inside the iterator, which has already ended the request.
        pass
    except DataError as error:
        _note(f"{safe_text(str(error))} /new starts again")
        return
    seconds = time.perf_counter() - started
    rate = talk.last_tokens / seconds if seconds > 0 else 0.0
    typer.echo()
    ended = {"length": ", cut at the limit", "aborted": ", broken off"}
    count = f"{talk.last_tokens} token{'' if talk.last_tokens == 1 else 's'}"
    _note(f"{count}, {rate:.0f} a second{ended.get(str(talk.last_reason), '')}")
