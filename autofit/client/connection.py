"""Requests to a server: JSON in, JSON out, and problem documents as the exceptions that they were."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from autofit.core.errors import (
    AutofitError,
    EnvironmentLacks,
    NothingFits,
    NotMeasured,
    Shortfall,
    StoreError,
    UsageError,
)

ANSWER_SECONDS = 330.0
"""How long an answer may take: the server gives up on a prediction after 300 s."""
SILENT_SECONDS = 60.0
"""How long a stream may be silent: the server says something every 15 s."""
REFUSED = {401: "give the client a token, or set AUTOFIT_TOKEN", 403: "ask with a token of a wider scope"}
LACKING: Mapping[str, type[EnvironmentLacks]] = {"Not measured": NotMeasured, "Store unavailable": StoreError}
"""By the title of a problem document."""


class Unreachable(EnvironmentLacks):
    """The server cannot be reached, or has broken off."""


class Connection:
    """Where the server is, and who asks. Every request is a connection of its own, so that threads may share it."""

    def __init__(self, url: str, token: str | None) -> None:
        """Raises `UsageError` for a URL that is not HTTP's, and for a token that no request can carry."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(f"url {url!r} is not understood: write http://host:port or https://host")
        self._url, self._token = url.rstrip("/"), token
        # No proxy can reach this machine's own addresses, whatever http_proxy says.
        self._open = build_opener(*([ProxyHandler({})] if _is_loopback(url) else [])).open
        _check_header("token", token or "")

    def ask(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer's JSON value. Raises `Unreachable`, `UsageError`, and what `problem` returns."""
        for name, value in (headers or {}).items():
            _check_header(name, value)
        target = f"{path}?{urlencode(query)}" if query else path
        with self._opened(verb, target, headers or {}, ANSWER_SECONDS, body) as answer:
            text = answer.read()
        try:
            return json.loads(text)
        except ValueError:
            raise self._unreachable("does not answer in JSON") from None

    def events(self, path: str, after: int) -> Iterator[dict[str, Any]]:
        """The server-sent events after this number, until the stream ends or breaks off. Raises as `ask` does."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        with self._opened("GET", path, headers, SILENT_SECONDS) as answer:
            yield from read_events(answer)

    @contextmanager
    def _opened(
        self, verb: str, path: str, headers: Mapping[str, str], seconds: float, body: Mapping[str, Any] | None = None
    ) -> Iterator[HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, {"Content-Type": "application/json", **headers}, method=verb)
        if self._token is not None:
            # Not for where the server may redirect to.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with self._open(request, timeout=seconds) as answer:
                yield answer
        except HTTPError as error:
            with error:
                raise self._problem(error.code, error.read()) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise self._unreachable(f"cannot be reached: {reason or type(reason).__name__}") from error

    def _problem(self, status: int, text: bytes) -> AutofitError:
        try:
            document = json.loads(text)
            return problem(status, document["title"], document["detail"], document)
        except (ValueError, TypeError, KeyError):
            return self._unreachable(f"answers with status {status}, and does not say why")

    def _unreachable(self, what: str) -> Unreachable:
        return Unreachable(f"the server at {self._url} {what}", remedy="start autofit serve there, or set AUTOFIT_URL")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _check_header(name: str, value: str) -> None:
    """Raise `UsageError` for what no header of HTTP can hold."""
    if not value.isprintable() or any(ord(character) > 255 for character in value):
        raise UsageError(f"{name} holds a character that no request can carry: use letters, digits and signs")


def nothing_fits(reason: str, facts: Mapping[str, Any]) -> NothingFits:
    """The exception that says so, with what came closest where the server's `facts` have it."""
    if "closest" in facts and "memory_limit_bytes" in facts:
        return Shortfall(reason, memory_limit_bytes=facts["memory_limit_bytes"], closest=facts["closest"])
    return NothingFits(reason)


def problem(status: int, title: str, detail: str, facts: Mapping[str, Any] = MappingProxyType({})) -> AutofitError:
    """The exception that a problem document stands for. `facts`: the document's further members."""
    if title == "Nothing fits":
        return nothing_fits(detail, facts)
    if status in REFUSED:
        return EnvironmentLacks(detail, remedy=REFUSED[status])
    if title in LACKING or status in (429, 503):
        message, _, remedy = detail.removesuffix(")").rpartition(" (")
        return LACKING.get(title, EnvironmentLacks)(message or detail, remedy=remedy or "ask again later")
    return UsageError(detail) if status < 500 else AutofitError(detail)


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events; one that has broken off is left out."""
    data: list[str] = []
    for line in lines:
        name, _, value = line.decode().rstrip("\r\n").partition(":")
        if name == "data":
            data.append(value)
        elif not name and not value and data:
            yield json.loads("\n".join(data))
            data = []
