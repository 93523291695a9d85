"""Which kinds of card a Ray cluster has."""

from __future__ import annotations

from autofit.catalog.hardware import cards
from autofit.core.errors import EnvironmentLacks
from autofit.workers.cluster.connection import connect
from autofit.workers.cluster.demand import is_type_of
from autofit.workers.cluster.nodes import HARDWARE_LABEL, Node, nodes


def kinds(address: str) -> list[str]:
    """The names of the cards that the nodes of the cluster at `address` have, in alphabetical order.

    Raises `EnvironmentLacks` where the cluster cannot be reached, has no GPU that is up, or does not say which it has.
    """
    connection = connect(address)
    try:
        with_gpus = [node for node in nodes(connection.ray) if node.gpus >= 1]
    finally:
        connection.close()
    if not with_gpus:
        raise EnvironmentLacks(
            "no node of Ray's that is up has a GPU", remedy="name the kinds of card that an autoscaler may add"
        )
    return sorted({_kind(node) for node in with_gpus})


def _kind(node: Node) -> str:
    if node.hardware is not None:
        return node.hardware
    names = [card.name for card in cards() for name in node.types if is_type_of(name, card)]
    if len(names) != 1:
        problem = f"may have {' or '.join(names)}" if names else "has a GPU of a type that is not known"
        raise EnvironmentLacks(
            f"{node.host} {problem}", remedy=f"name the kinds with --hardware, or label the node: {HARDWARE_LABEL}=NAME"
        )
    return names[0]
