"""How large a request may be."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autofit.api import problems

BODY_BYTES = 64 * 1024
"""The largest body of a request: a search and an estimate are asked for in some hundred bytes."""


class LimitedBody:
    """Refuses a body that is too large, whatever its length was said to be, before it is held in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > BODY_BYTES:
                said = f"a request's body may have {BODY_BYTES:,} bytes"
                await problems.problem(413, "Too large", said)(scope, receive, send)
                return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)


def install(app: FastAPI) -> None:
    app.add_middleware(LimitedBody)
