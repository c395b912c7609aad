"""The entry point of the command line. Verbs that must start fast load nothing else."""

from __future__ import annotations

import itertools
import json
import os
import sys

import typer

from homeostat.cli import doctor, explain, rules
from homeostat.cli.app import new_app
from homeostat.cli.packages import missing
from homeostat.cli.quick import arguments_of
from homeostat.errors import ConfigError, HomeostatError, OutputError
from homeostat.observe.durable import OUT_OF_SPACE, not_written
from homeostat.observe.outlet import open_missing_streams
from homeostat.observe.redact import Scrubber, mask_text
from homeostat.observe.safe_text import safe_text

QUICK_VERBS = {"doctor": doctor.doctor, "explain": explain.explain, "rules": rules.rules}


def main() -> None:
    """Run the command line; an error that the user can fix is a message, never a traceback."""
    open_missing_streams()
    try:
        _require_folder()
        _run(sys.argv)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except HomeostatError as error:
        _show_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        known = missing(error.name, needed_for=f"homeostat {sys.argv[1]}")
        if known is None:
            raise
        _show_error(known)
        sys.exit(known.exit_code)
    except BrokenPipeError:
        # The reader of our output closed it (`| head`), which is not an error.
        _drop_output()
        sys.exit(0)
    except OSError as error:
        if error.errno not in OUT_OF_SPACE or not _is_output_full():
            raise
        _drop_output()
        # Never as JSON, which goes to the output.
        _show_text(OutputError(not_written("the output", error)))
        sys.exit(OutputError.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _is_output_full() -> bool:
    """Return whether the disk under the standard output takes no more."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Let nothing be written any more, because Python's own flush at the end would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _require_folder() -> None:
    """Refuse a deleted current folder, which relative paths and imported libraries need."""
    try:
        os.getcwd()
    except OSError as error:
        raise HomeostatError(
            f"the current folder cannot be used ({error.strerror}): it was deleted or is out of "
            "reach. Change to a folder that exists (cd), and start again."
        ) from None


def _run(argv: list[str]) -> None:
    """Run the verb with as few imports as it needs: config classes alone take half a second."""
    verb = QUICK_VERBS.get(argv[1]) if len(argv) > 1 else None
    if verb is None:
        from homeostat.cli.verbs import app

        return app()
    arguments = arguments_of(verb, argv[2:])
    if arguments is not None:
        return verb(**arguments)
    app = new_app()
    for one in QUICK_VERBS.values():
        app.command()(one)
    return app()


def _show_error(error: HomeostatError) -> None:
    if _wants_json(sys.argv):
        typer.echo(json.dumps({"error": Scrubber().tree(as_json(error))}, indent=2))
    else:
        _show_text(error)


def _show_text(error: HomeostatError) -> None:
    text = mask_text(str(error))
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        text = f"{len(error.problems)} problems:\n" + "\n".join(f"  {x}" for x in text.split("\n"))
    typer.echo(f"error: {safe_text(text)}", err=True)


def _wants_json(argv: list[str]) -> bool:
    return "--format=json" in argv or any(
        flag == "--format" and value == "json" for flag, value in itertools.pairwise(argv)
    )


def as_json(error: HomeostatError) -> dict[str, object]:
    """Return an error as JSON."""
    fields: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, ConfigError):
        fields["file"] = error.file
        fields["problems"] = [
            {"place": p.place, "line": p.line, "message": p.message, "hint": p.hint}
            for p in error.problems
        ]
    return fields
