"""What a Ray cluster offers to searches that wait for a runner."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context

from autofit.catalog.hardware import Card, cards, matching_cards
from autofit.core.device.hardware import Hardware
from autofit.core.errors import EnvironmentLacks
from autofit.trial.machine.detection import detect
from autofit.workers.cluster.connection import connect
from autofit.workers.cluster.demand import DeviceRequest
from autofit.workers.cluster.nodes import TYPE_RESOURCE, could_be_added, is_type_of, kind, nodes
from autofit.workers.watch import end_with


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Hardware by name."""

    possible: frozenset[str]
    """What a node has or may have, or an autoscaler may add."""
    cards: tuple[str, ...]
    """The cards of the catalog that nodes surely have, in alphabetical order."""
    unclear: tuple[str, ...]
    """Why it is not known which card a node has, for each such node."""
    here: Hardware | None
    """This machine's device where no catalog has it: a driver takes only its own by such a name."""


def look(address: str, device: str) -> Offer:
    """As `look_here`, in a process of its own: Ray ends a process that loses its head."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (os.getpid(),)) as process:
        try:
            return process.submit(look_here, address, device).result()
        except BrokenProcessPool:
            raise EnvironmentLacks("Ray's head was lost while it was asked", remedy="check `ray status`") from None


def _begin(asker: int) -> None:
    end_with(asker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the caller decides


def look_here(address: str, device: str) -> Offer:
    """What the cluster at `address` offers now. Raises `EnvironmentLacks` where it cannot be reached."""
    connection = connect(address)
    try:
        up, addable = nodes(connection.ray), could_be_added(connection.ray)
    finally:
        connection.close()
    wanted = (DeviceRequest(ranks=1, uses_gpus=True, card=card) for card in cards())
    possible = {w.card.name for w in wanted if w.card is not None and (w.suitable(up) or _may_add(w.card, addable))}
    sure, unclear = set[str](), []
    for node in (node for node in up if node.gpus >= 1):
        try:
            sure.add(kind(node))
        except ValueError as error:
            unclear.append(str(error))
    here = _here(device, has_gpus=any(node.gpus for node in up) or bool(addable.get("GPU")))
    named = set() if here is None else {here.name}
    return Offer(possible=frozenset(possible | named), cards=tuple(sorted(sure)), unclear=tuple(unclear), here=here)


def _here(device: str, *, has_gpus: bool) -> Hardware | None:
    """This machine's device, where no catalog has it and trials of the cluster would use its like."""
    with suppress(EnvironmentLacks):  # whoever asks a cluster need not be able to run trials
        here = detect(device)[0]
        if not matching_cards(here.name) and (here.kind != "cpu" or device == "cpu" or not has_gpus):
            return here
    return None


def _may_add(card: Card, addable: Mapping[str, float]) -> bool:
    """Whether an autoscaler may add it: one that says nothing of types may add any."""
    types = [name.removeprefix(TYPE_RESOURCE) for name in addable if name.startswith(TYPE_RESOURCE)]
    return bool(addable.get("GPU")) and (not types or any(is_type_of(name, card) for name in types))
