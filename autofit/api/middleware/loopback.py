"""Which addresses and host names refer to this machine, and what others must know."""

from __future__ import annotations

import ipaddress

TOKEN_VARIABLE = "AUTOFIT_TOKEN"
"""The environment variable that holds the bearer token."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(header: str) -> bool:
    """Whether a request's Host header, with or without a port, names this machine."""
    bracketed, closing, port = header.partition("]")
    if closing:
        return bracketed.startswith("[") and port[:1] in ("", ":") and is_loopback(bracketed[1:])
    return is_loopback(header.partition(":")[0].lower())
