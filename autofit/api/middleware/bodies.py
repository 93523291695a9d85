"""Bodies of requests and answers: how large one may be, and that HEAD has none."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES = 64 * 1024
"""The largest body of a request: a search and an estimate are asked for in some hundred bytes."""


class LimitedBody:
    """Ends the reading of a body that is too large, whatever its length was said to be. FastAPI's own `max_body_size`
    does so too, but answers without a problem document."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_BYTES:
                raise HTTPException(413, f"a request's body may have {BODY_BYTES:,} bytes")
            return message

        await self._app(scope, counted, send)


class HeadAsGet:
    """Answers HEAD as GET, without the body (RFC 9110, section 9.3.2). Not for a stream of events, which would
    hold the connection to its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"].endswith("/events"):
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_head)
