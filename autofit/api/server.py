"""Starts the HTTP server, and refuses to if that would expose it without protection."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from autofit.api.loopback import TOKEN_VARIABLE, is_loopback
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.store import Store

GRACE_SECONDS = 3
"""How long requests may take to end once the server is told to: streams of events have no end of their own."""


def serve(*, host: str, port: int, store: str | None, with_runner: bool = True) -> None:
    """Serve until interrupted, and print the address on standard error; port 0 picks a free port. A runner drives the
    searches that are asked for, unless there is to be none.

    Raises `EnvironmentLacks` if `host` is not a loopback address and the environment sets no token, and `UsageError` if
    nothing can listen there.
    """
    import uvicorn

    from autofit.api.app import create_app

    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not is_loopback(host):
        raise EnvironmentLacks(
            f"a server on {host} can be reached from other machines and would not ask for a token",
            remedy=f"set {TOKEN_VARIABLE} to a secret, or use --host 127.0.0.1",
        )
    with Store.open(store, create=with_runner) as opened, ExitStack() as stack:
        port = _free(host, port)
        app = create_app(opened, token=token, loopback=is_loopback(host))
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(
            f"autofit: serving on {where}, API described at {where}/openapi.json; Ctrl-C stops it",
            file=sys.stderr,
            flush=True,
        )
        if with_runner:
            stack.enter_context(_runner(store))
        uvicorn.run(
            app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS
        )


@contextmanager
def _runner(store: str | None) -> Iterator[None]:
    """A runner in a thread, which drives in processes of their own."""
    from autofit.operations.service.runner import Runner

    try:
        runner = Runner(store)
    except EnvironmentLacks as error:
        print(f"autofit: searches wait for another runner: {error}", file=sys.stderr, flush=True)
        yield
        return
    thread = threading.Thread(target=runner.run, name="autofit-runner")
    thread.start()
    try:
        yield
    finally:
        runner.stop()
        thread.join()


def _free(host: str, port: int) -> int:
    """`port`, or a free port if it is 0. Raises `UsageError` if nothing can listen there; uvicorn would log that and
    exit with status 1."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return int(probe.getsockname()[1])
        except OSError as error:
            raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from error
