"""`homeostat serve`: an OpenAI-compatible server for a model, on this machine only."""

from __future__ import annotations

from typing import Annotated

import typer

from homeostat.cli import generation_options as opts
from homeostat.config.cluster import LOOPBACK
from homeostat.errors import EngineError
from homeostat.observe.safe_text import safe_text


def serve(
    model: opts.Model,
    port: Annotated[
        int,
        typer.Option(
            "--port", "-p", min=0, max=65535, help="Port on the loopback address. 0: any free port."
        ),
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the model in responses."),
    ] = None,
    max_concurrency: Annotated[
        int,
        typer.Option("--max-concurrency", min=1, help="Number of answers sampled at a time."),
    ] = 64,
    base: opts.Base = None,
    step: opts.Step = None,
    revision: opts.Revision = None,
    tokenizer: opts.Tokenizer = None,
    chat_template: opts.Template = None,
    context: opts.Context = None,
    device: opts.Device = opts.DeviceName.AUTO,
    precision: opts.Precision = opts.PrecisionName.AUTO,
) -> None:
    """Serve a model over an OpenAI-compatible API, for evaluation harnesses and scripts.

    Paths: /v1/completions (log-probs and echo included), /v1/chat/completions, /v1/models and
    /health. It listens only on the loopback address, and refuses fields that it does not support.
    """
    text_model, shown = opts.load(
        model,
        base=base,
        step=step,
        revision=revision,
        tokenizer=tokenizer,
        template=chat_template,
        device=device,
        precision=precision,
    )
    from homeostat.generation.engine_thread import EngineThread
    from homeostat.generation.loading import open_engine
    from homeostat.generation.server import TextServer, TextService

    engine = open_engine(text_model, context=context, max_concurrency=max_concurrency)
    with EngineThread(engine) as thread:
        service = TextService(thread, text_model.tokenizer, name=name or model.name)
        try:
            server = TextServer(service, port=port)
        except OSError as error:
            raise EngineError(
                f"--port {port}: {error.strerror}. Take another one, or 0 for any that is free."
            ) from None
        typer.echo(f"serving {safe_text(shown)} on http://{LOOPBACK}:{server.port}/v1", err=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
        finally:
            server.server_close()
