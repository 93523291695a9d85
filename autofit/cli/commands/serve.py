"""The command that serves the HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autofit.cli import options


def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.", min=0, max=65535)] = 8000,
    store: options.Store = None,
    with_runner: Annotated[bool, typer.Option("--runner/--no-runner", help="Also run the searches asked for.")] = True,
    models: Annotated[
        Path | None, typer.Option("--models", help="A folder of further models that clients may name.")
    ] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Write a line of JSON for each request to standard error.")
    ] = False,
) -> None:
    """Serve recommendations, frontiers and trials over HTTP, and run the searches that are asked for.

    \b
    Examples:
      autofit serve
      curl 'http://127.0.0.1:8000/v1/recommendation?model=llama-3.1-8b&memory_limit=24GiB'

    What starts a search needs a bearer token: one of `autofit token create`, or the operator's own in the environment
    variable AUTOFIT_TOKEN. On an address other than loopback, every request does.
    """
    from autofit.api.server import serve as run

    run(host=host, port=port, store=store, with_runner=with_runner, log_requests=log_requests, models=models)
