"""The processes that train together: how they find each other, and how they agree on decisions."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from autofit.core.errors import lines_of
from autofit.training.distributed.rendezvous import LOOPBACK, Rendezvous, listening

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class NoMeeting(Exception):
    """The ranks could not find each other; not the fault of the config to be trained."""


class Ranks:
    """The group in which this process trains; by default it trains alone. Used from one thread.

    All ranks must call the same methods in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def gathered(self, values: Sequence[float]) -> list[tuple[float, ...]]:
        """For each of `values`, the values of all ranks in rank order; NaN counts as infinite.

        Waits for the slowest rank; with a single rank nothing is communicated.
        """
        numbers = [math.inf if math.isnan(value) else float(value) for value in values]
        if self.size == 1:
            return [(value,) for value in numbers]
        tensor = torch.tensor(numbers, dtype=torch.float64)  # in host memory: does not queue behind the device's work
        of_ranks = [torch.empty_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(of_ranks, tensor)
        return list(zip(*(of_rank.tolist() for of_rank in of_ranks), strict=True))

    def largest(self, values: Sequence[float]) -> list[float]:
        """The element-wise maximum over ranks, the same on all of them; otherwise like `gathered`."""
        return [max(of_ranks) for of_ranks in self.gathered(values)]

    def close(self) -> None:
        """Leave the process group once all ranks are done: a rank that left earlier would look as if it had died."""
        if not torch.distributed.is_initialized():
            return
        with suppress(RuntimeError):  # the others are done as well, and may be gone
            self.largest([0.0])
            torch.distributed.destroy_process_group()


def join(kind: str, rendezvous: Rendezvous | None, *, timeout_seconds: float, listener: int | None = None) -> Ranks:
    """Create this process's default process group: NCCL for tensors on `cuda`, gloo for those in host memory, which
    FSDP has when parameters are offloaded.

    Without a rendezvous the group consists of this process alone, which DeepSpeed needs too, and no socket is opened.
    `listener` is the descriptor of the socket listening at the rendezvous, if rank 0 was given one. Nothing waits
    longer than `timeout_seconds`, here or in a collective. Raises `NoMeeting` if the ranks cannot find each other.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    store: Store
    alone = rendezvous is None
    place = rendezvous or Rendezvous(rank=0, ranks=1, ranks_here=1, host=LOOPBACK, port=0)
    try:
        _set_environment(place)
        store = dist.HashStore() if alone else _store(place, timeout, listener)  # type: ignore[attr-defined]
        on_gpus = kind == "cuda" and place.ranks > 1
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timeout,
            device_id=torch.device("cuda", 0) if on_gpus else None,  # makes the communicator now, not in the first step
        )
    except (OSError, RuntimeError) as error:
        if "out of memory" in str(error).lower():
            raise  # NCCL's buffers are part of what training needs
        lines = lines_of(error)
        detail = f" ({lines[-1]})" if len(lines) > 1 else ""  # where NCCL names what it lacks, such as room in /dev/shm
        raise NoMeeting(f"the ranks cannot meet: {lines[0]}{detail}") from error
    return Ranks(place.rank, place.ranks)


def _set_environment(place: Rendezvous) -> None:
    """Set the environment variables that libraries look for, as torchrun does."""
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_RANK": "0",  # every rank sees only its own device
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
    }
    # If set, DeepSpeed creates a shared-memory segment per rank, which training never uses and nothing removes.
    os.environ.pop("LOCAL_SIZE", None)
    address = LOOPBACK if place.host == LOOPBACK else _route_address(place)
    interface = _interface(address)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        if address == LOOPBACK:  # between machines NCCL finds the fastest route by itself
            os.environ["NCCL_SOCKET_IFNAME"] = interface


def _route_address(rendezvous: Rendezvous) -> str:
    """This machine's address on the route to rank 0; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, rendezvous.port))
        return str(probe.getsockname()[0])


def _interface(address: str) -> str | None:
    """The name of the network interface that has the IPv4 `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                # SIOCGIFADDR of netdevice(7): an interface's IPv4 address.
                reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def _store(rendezvous: Rendezvous, timeout: timedelta, listener: int | None) -> Store:
    """Where the ranks find each other. Rank 0 listens at the rendezvous address only; by default it would on all."""
    serves = rendezvous.rank == 0
    if serves and listener is None:
        listener = listening(rendezvous.host, rendezvous.port).detach()
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        rendezvous.host,
        rendezvous.port,
        world_size=rendezvous.ranks,
        is_master=serves,
        timeout=timeout,
        master_listen_fd=listener,
    )
