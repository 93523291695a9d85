"""Answers that hold until a trial comes: kept here for the next who asks, and named by a tag, so that a client that has
the newest is told so (RFC 9110, section 13)."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from autofit import __version__
from autofit.core.units import KIB, MIB
from autofit.core.workload import Workload
from autofit.operations.recommendation import WorkloadQuestion, find_hardware, search_command
from autofit.store import Store

MOST_BYTES = 32 * MIB
"""Of answers that are kept: some hundreds of them."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a response is made from: responses themselves are changed on their way out."""

    body: bytes | str
    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that it takes here, with a kilobyte for all that is not its body."""
        return len(self.body) + KIB

    @classmethod
    def json(cls, document: Any) -> Content:
        return cls(bytes(JSONResponse(document).body), "application/json")


class Answers:
    """The latest answers, by their tags."""

    def __init__(self) -> None:
        self._by_tag: OrderedDict[str, Content] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, tag: str) -> Content | None:
        with self._lock:
            if tag in self._by_tag:
                self._by_tag.move_to_end(tag)
            return self._by_tag.get(tag)

    def keep(self, tag: str, content: Content) -> None:
        with self._lock:
            if tag in self._by_tag or content.size > MOST_BYTES:
                return  # somebody else asked at the same time, or it would drive out all others
            self._by_tag[tag] = content
            self._bytes += content.size
            while self._bytes > MOST_BYTES:
                self._bytes -= self._by_tag.popitem(last=False)[1].size


class Tagged:
    """An answer that holds until its version changes, under a tag by which clients ask whether it has."""

    def __init__(self, request: Request, version: str) -> None:
        whole = f"{__version__} {version} {request.scope['path']}?{request.scope['query_string']!r}"
        self._tag = f'"{hashlib.sha256(whole.encode()).hexdigest()[:32]}"'
        self._answers: Answers = request.app.state.answers
        tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        self._client_has_it, self._client_has_any = self._tag in tags, "*" in tags

    async def answer(self, make_content: Callable[[], Content]) -> Response:
        """304 to a client that has it. Its content is made, in a thread, only if nobody has asked for it lately."""
        # It may be kept, and must be asked about before it is used again.
        headers = {"ETag": self._tag, "Cache-Control": "private, no-cache"}
        if self._client_has_it:
            return Response(status_code=304, headers=headers)
        content = self._answers.get(self._tag)
        if content is None:
            content = await run_in_threadpool(make_content)
            self._answers.keep(self._tag, content)
        if self._client_has_any:
            return Response(status_code=304, headers=headers)
        return Response(content.body, media_type=content.media_type, headers={**content.headers, **headers})


def of_question(request: Request, question: WorkloadQuestion, hardware: str, store: Store) -> Tagged:
    """The tag of what is read off the trials of one workload on one hardware. Raises as `find_hardware` does."""
    workload = question if isinstance(question, Workload) else question.resolve()[1]
    key = find_hardware(hardware, store, partial(search_command, question)).key
    return Tagged(request, store.version(hardware_key=key, workload_key=workload.key))
