"""Conditional requests (RFC 9110, section 13): who has the newest answer is told so, and nothing is computed."""

from __future__ import annotations

import hashlib

from fastapi import Request, Response

from autofit import __version__
from autofit.core.workload import Workload
from autofit.operations.recommendation import Asked, find_hardware
from autofit.store import Store


class NotModified(Exception):
    """The client has the newest answer, whose tag this is."""

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.tag = tag


class Tagged:
    """The tag of an answer, by which a client asks whether it has changed."""

    def __init__(self, request: Request, version: str) -> None:
        """Raises `NotModified` if the request names the present tag."""
        whole = f"{__version__} {version} {request.url.path}?{request.url.query}"
        self._tag = f'"{hashlib.sha256(whole.encode()).hexdigest()[:32]}"'
        known = request.headers.get("if-none-match", "")
        if self._tag in (tag.strip().removeprefix("W/") for tag in known.split(",")) or known.strip() == "*":
            raise NotModified(self._tag)

    def of(self, response: Response) -> Response:
        """The response with its tag."""
        response.headers.update(headers(self._tag))
        return response


def headers(tag: str) -> dict[str, str]:
    """What an answer with this tag carries: it may be kept, and must be asked about before it is used again."""
    return {"ETag": tag, "Cache-Control": "private, no-cache"}


def of_question(request: Request, asked: Asked, hardware: str, store: Store) -> Tagged:
    """The tag of what is read off the trials of one workload on one hardware. Raises as `find_hardware` does."""
    workload = asked if isinstance(asked, Workload) else asked.resolve()[1]
    key = find_hardware(hardware, store).key
    return Tagged(request, store.version(hardware_key=key, workload_key=workload.key))


def of_trials(request: Request, store: Store) -> Tagged:
    """The tag of a page of trials: any new trial may change it."""
    return Tagged(request, store.version())
