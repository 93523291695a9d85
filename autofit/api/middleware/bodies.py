"""How large the body of a request may be."""

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
