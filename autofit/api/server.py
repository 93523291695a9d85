"""Starts the HTTP server, and refuses to if that would expose it without protection."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.api.middleware.loopback import TOKEN_VARIABLE, is_loopback
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.store import NoStore, Store

if TYPE_CHECKING:
    from autofit.operations.service.runner import Runner


def serve(
    *,
    host: str,
    port: int,
    store: str | None,
    with_runner: bool = True,
    log_requests: bool = False,
    models: Path | None = None,
) -> None:
    """Serve until interrupted, and print the address on standard error; port 0 picks a free one. A runner drives the
    searches, unless there is to be none. With `log_requests`, each request is a line of JSON on standard error. Runners
    must have the folder `models` at the same place. Raises `EnvironmentLacks` beyond loopback without a token, and
    `UsageError` if nothing can listen there."""
    import uvicorn

    from autofit.api.app import create_app

    if models is not None and not models.is_dir():
        raise UsageError(f"--models {models} is not a folder")
    token, loopback = os.environ.get(TOKEN_VARIABLE) or None, is_loopback(host)
    if token is None and not loopback and not _has_token(store):
        raise EnvironmentLacks(
            f"a server on {host} can be reached from other machines and would not ask for a token",
            remedy=f"autofit token create NAME, set {TOKEN_VARIABLE} to a secret, or use --host 127.0.0.1",
        )
    with ExitStack() as stack:
        opened = stack.enter_context(Store.open(store, create=with_runner))
        listening = stack.enter_context(_listening(host, port))
        runner = stack.enter_context(_runner(opened)) if with_runner else None
        app = create_app(
            opened,
            token=token,
            loopback=loopback,
            closed=token is not None or not loopback,
            runner=runner,
            models=models,
        )
        where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        print(
            f"autofit: serving on {where}, API described at {where}/openapi.json; Ctrl-C stops it",
            file=sys.stderr,
            flush=True,
        )
        if log_requests:
            _log_to_standard_error()
        # Streams of events have no end of their own.
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
        with suppress(KeyboardInterrupt):  # a service that is told to end has not failed
            uvicorn.Server(config).run(sockets=[listening])


def _has_token(store: str | None) -> bool:
    try:
        with Store.open(store, create=False) as opened:
            return opened.access.any_valid()
    except NoStore:
        return False


@contextmanager
def _runner(store: Store) -> Iterator[Runner | None]:
    """The server's own runner; None on a machine without a device that trials can use."""
    from autofit.operations.service.runner import Runner, running

    try:
        runner = Runner(store)
    except EnvironmentLacks as error:
        print(f"autofit: searches wait for another runner: {error}", file=sys.stderr, flush=True)
        yield None
        return
    with running([runner]):
        yield runner


def _log_to_standard_error() -> None:
    from autofit.api.middleware.metrics import LOG

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there, on a free port if it is 0: who connects from now on is answered. Raises `UsageError`
    if none can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = error.strerror if error.errno is None else os.strerror(error.errno)
        raise UsageError(f"cannot listen on {host} port {port}: {why}") from error
