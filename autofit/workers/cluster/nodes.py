"""The nodes of a Ray cluster as they are now: what each has, what of it is free, and what could be added."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autofit.catalog.hardware import Card, cards, matching_cards

HARDWARE_LABEL = "autofit.io/hardware"
"""The node label by which an administrator says which card of the catalog (`a100-80g`) a node has: Ray's own types do
not tell apart cards of one chip, such as A100 of 40 and 80 GB or H100 SXM and PCIe."""
NODE_LABEL = "ray.io/node-id"
TYPE_LABEL = "ray.io/accelerator-type"
TYPE_RESOURCE = "accelerator_type:"
"""The prefix of a resource that every node with an accelerator of a type has, after it Ray's name for the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node that is up."""

    node_id: str
    host: str
    """What its machine calls itself."""
    cpus: float
    """What Ray may give to workers; a cluster's head often has none."""
    gpus: float
    free_cpus: float
    """What no worker has now."""
    free_gpus: float
    hardware: str | None
    """The card that its administrator says it has; None where nothing is said."""
    types: frozenset[str]
    """Ray's names for its accelerators."""
    is_type_resource: bool
    """Whether a type is a resource of the node, as Ray itself makes it, and not only a label that somebody gave it."""


def nodes(ray: Any) -> list[Node]:
    """The nodes that are up, in Ray's order."""
    free: Mapping[str, Mapping[str, float]] | None = None
    with suppress(Exception):  # of an interface that is not public, and that Ray's client lacks
        free = ray._private.state.available_resources_per_node()
    alive = [entry for entry in ray.nodes() if entry["Alive"]]
    # Of a node that has just joined, what is free may not be known yet.
    return [_node(entry, (free or {}).get(entry["NodeID"], entry["Resources"])) for entry in alive]


def _node(entry: Mapping[str, Any], free: Mapping[str, float]) -> Node:
    resources, labels = entry["Resources"], entry.get("Labels") or {}
    types = {name.removeprefix(TYPE_RESOURCE) for name in resources if name.startswith(TYPE_RESOURCE)}
    label = labels.get(TYPE_LABEL)
    return Node(
        node_id=entry["NodeID"],
        host=entry.get("NodeManagerHostname") or entry.get("NodeManagerAddress") or entry["NodeID"],
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        hardware=labels.get(HARDWARE_LABEL) or None,
        types=frozenset(types or ({label} if label else ())),
        is_type_resource=bool(types),
    )


def could_be_added(ray: Any) -> Mapping[str, float]:
    """The most of each resource that an autoscaler may give the cluster; empty without one that says so."""
    with suppress(Exception):  # of an interface that is not public: without it, less is known
        return ray._private.state.state.get_max_resources_from_cluster_config() or {}
    return {}


def is_type_of(name: str, card: Card) -> bool:
    """Whether a card of the catalog may be what Ray calls `name` (`A100`, `GeForce-RTX-4090`)."""
    return name == card.ray_accelerator_type or card in matching_cards(name)


def kind(node: Node) -> str:
    """The name of the card that a node with GPUs has. Raises `ValueError` where it does not say which."""
    if node.hardware is not None:
        return node.hardware
    names = [card.name for card in cards() for name in node.types if is_type_of(name, card)]
    if len(names) != 1:
        problem = f"may have {' or '.join(names)}" if names else "has a GPU of a type that is not known"
        raise ValueError(f"{node.host} {problem}")
    return names[0]
