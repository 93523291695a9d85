"""The commands that go on until they are stopped: one serves the HTTP API, one drives queued searches."""

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

    _log_searches()
    run(host=host, port=port, store=store, with_runner=with_runner, log_requests=log_requests, models=models)


def runner(
    store: options.Store = None,
    ray_address: options.RayAddress = None,
    workers: options.Workers = None,
    in_place: options.InPlace = False,
) -> None:
    """Run the searches that others have queued, until it is stopped.

    \b
    Examples:
      autofit runner
      autofit runner --store postgresql://db/autofit --ray-address auto
      autofit runner --store postgresql://db/autofit --ray-address auto --workers 8

    Without --ray-address it takes searches for this machine's device only. A search whose runner is stopped goes on
    with the next one. Each search that begins or ends is a line on standard error. `autofit serve` has a runner of its
    own.
    """
    import signal

    from autofit.operations.service.runner import Runner

    _log_searches()
    service = Runner(store, ray_address=ray_address, in_place=in_place, workers=workers)
    # A service that is told to end has not failed. No exception, which could come while a driver is being started.
    stop_signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(signal_number, lambda number, frame: service.stop()) for signal_number in stop_signals]
    try:
        service.run()
    finally:
        for signal_number, earlier in zip(stop_signals, before, strict=True):
            signal.signal(signal_number, earlier or signal.SIG_DFL)


def _log_searches() -> None:
    """Have warnings, and each search that begins or ends, be a line on standard error."""
    import logging

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("autofit.operations.service").setLevel(logging.INFO)
