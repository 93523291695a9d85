"""Where the ranks of one trial meet, and which rank this process is."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from autofit.core.document import Document

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous(Document):
    """One rank's place in its group. Rank 0 listens, the others connect to it."""

    rank: int
    """0 to `ranks` - 1."""
    ranks: int
    """Processes that train together, one per device."""
    ranks_here: int
    """How many of them are on this rank's machine, which share its cores; 1 to `ranks`."""
    host: str
    """IPv4 address of rank 0's machine: loopback where all ranks are on one machine."""
    port: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks, "a rank is one of its group"
        assert 1 <= self.ranks_here <= self.ranks, "a rank is on its own machine"


def listening(host: str, port: int = 0) -> socket.socket:
    """A socket listening at `host`, on a free port unless one is given. Raises `OSError`."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen()
    except BaseException:
        opened.close()
        raise
    return opened
