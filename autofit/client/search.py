"""A search that a runner of the server drives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from autofit.client.connection import Connection, Unreachable, nothing_fits
from autofit.core.errors import AutofitError, Interrupted, StoreError

UNDER_WAY = ("queued", "running")
"""States of a search that has not ended."""
LOOK_SECONDS = 0.5
"""Between two looks at a state, and before a stream that has ended is asked for again."""
PATIENCE_SECONDS = 120.0
"""How long a server may be away while its events are followed: restarts are shorter."""


class RemoteSearch:
    """One search on a server. It goes on there, whether or not anybody follows it."""

    def __init__(self, connection: Connection, search_id: str) -> None:
        self.search_id = search_id
        self._connection, self._path = connection, f"/v1/searches/{search_id}"

    def __repr__(self) -> str:
        return f"RemoteSearch({self.search_id!r})"

    def state(self) -> dict[str, Any]:
        """Where it stands, and once it has ended, its `result`."""
        return dict(self._connection.ask("GET", self._path))

    def events(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """What happens, from the event after number `after` to the search's end, without gap or repetition. Reconnects
        if the stream breaks off. Raises `EnvironmentLacks` if the server stays away for two minutes."""
        while True:
            # Before the stream: only of a search that had ended by then is the end of the stream the end of its events.
            over = self._state_once_back()["state"] not in UNDER_WAY
            with suppress(Unreachable, StoreError):
                for event in self._connection.events(f"{self._path}/events", after):
                    after = event["seq"]
                    yield event
                if over:
                    return
            time.sleep(LOOK_SECONDS)

    def cancel(self) -> dict[str, Any]:
        """End it, unless others have asked for the same, and return its state. Needs a token that may cancel it."""
        return dict(self._connection.ask("DELETE", self._path))

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """What it answered, once it has ended, its `recommendation` above all. Raises `TimeoutError` after `timeout`
        seconds, `NothingFits`, `Interrupted` if it was cancelled, and `AutofitError` with the reason if it failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (state := self.state())["state"] in UNDER_WAY:
            remaining = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"search {self.search_id} is {state['state']} after {timeout} s")
            time.sleep(min(remaining, LOOK_SECONDS))
        answer: dict[str, Any] = state["result"] or {}
        if state["state"] == "succeeded":
            return answer
        if state["state"] == "cancelled":
            raise Interrupted(f"search {self.search_id} was cancelled")
        reason = answer.get("reason", f"search {self.search_id} ended as {state['state']}")
        raise nothing_fits(reason, answer) if state["state"] == "nothing_fits" else AutofitError(reason)

    def _state_once_back(self) -> dict[str, Any]:
        gives_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self.state()
            except (Unreachable, StoreError):
                if time.monotonic() > gives_up:
                    raise
            time.sleep(LOOK_SECONDS)
