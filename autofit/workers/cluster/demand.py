"""What the workers of one trial ask of Ray, and on which of a cluster's nodes they may run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autofit.catalog.hardware import Card
from autofit.core.errors import EnvironmentLacks
from autofit.workers.cluster.nodes import HARDWARE_LABEL, NODE_LABEL, TYPE_LABEL, TYPE_RESOURCE, Node, is_type_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one trial's workers ask of Ray: the same for each rank."""

    ranks: int
    bundle: Mapping[str, float]
    """Resources of each rank."""
    selector: Mapping[str, str]
    """Labels that each rank's node must have."""
    strategy: str
    """How Ray places the ranks: `PACK` or `STRICT_PACK`."""


@dataclass(slots=True, kw_only=True)
class DeviceRequest:
    """Which devices a pool wants for its trials."""

    ranks: int
    """Ranks of each trial."""
    uses_gpus: bool
    """Whether each rank takes a GPU. If not, a trial takes a whole machine, whose cores its ranks share."""
    card: Card | None = None
    """The one kind of card to use; None for whatever there is."""
    is_packed: bool | None = None
    """Whether the ranks of each trial share a machine, as those of the first slot do; None before that is up."""
    addable: Mapping[str, float] = field(default_factory=dict)
    """The most of each resource that an autoscaler says it may give the cluster."""
    left_out: set[str] = field(default_factory=set)
    """Nodes that have turned out to be of another kind, or on which no worker starts."""

    def __str__(self) -> str:
        if not self.uses_gpus:
            return "machines (on CPUs a trial takes a whole machine)"
        return "GPUs" if self.card is None else f"{self.card.name} GPUs"

    def suitable(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes that may have the workers of this pool, as far as Ray knows them."""
        return [node for node in nodes if node.node_id not in self.left_out and self._suits(node)]

    def _suits(self, node: Node) -> bool:
        if not self.uses_gpus:
            return node.cpus >= 1
        if node.gpus < 1:
            return False
        if self.card is None:
            return True
        if node.hardware is not None:
            return node.hardware == self.card.name
        return not node.types or any(is_type_of(name, self.card) for name in node.types)

    def demand(self, nodes: Collection[Node], used: Collection[str] = ()) -> Demand:
        """What to ask for in a cluster of these nodes. Each trial on CPUs is kept off the nodes `used` by others."""
        suitable = self.suitable(nodes)
        if not self.uses_gpus:
            unused = [node for node in suitable if node.node_id not in used]
            cpus = min((node.cpus for node in unused), default=self.ranks) // self.ranks
            away = _not_on({*self.left_out, *used})
            return Demand(ranks=self.ranks, bundle={"CPU": max(1.0, cpus)}, selector=away, strategy="STRICT_PACK")
        bundle, selector = {"GPU": 1.0, "CPU": cpus_per_gpu(suitable)}, _not_on(self.left_out)
        strategy = self._strategy(suitable)
        if self.card is not None:
            name, labelled = self._type(suitable), [node for node in suitable if node.hardware is not None]
            # Nodes that may have the card without saying so are used only where those that say so have no room for any.
            free = [(node.free_cpus, node.free_gpus) for node in labelled]
            has_room = any(node.node_id in used for node in labelled) or self._fitting(free, bundle["CPU"], strategy)
            if (suitable or name is None) and (labelled == suitable or has_room):
                selector[HARDWARE_LABEL] = self.card.name
            else:
                others = [node for node in nodes if node.gpus >= 1 and node not in suitable]
                selector = _not_on(self.left_out | {n.node_id for n in others if name is None or n.hardware})
                if name is not None and all(node.is_type_resource for node in suitable):
                    bundle[f"{TYPE_RESOURCE}{name}"] = 0.001  # of one such resource, which every node of the type has
                elif name is not None:
                    selector[TYPE_LABEL] = name
        return Demand(ranks=self.ranks, bundle=bundle, selector=selector, strategy=strategy)

    def _strategy(self, suitable: Iterable[Node]) -> str:
        """One machine where any has so many devices, so that trials are alike: between machines ranks are slower."""
        if self.is_packed is None:
            return "STRICT_PACK" if any(node.gpus >= self.ranks for node in suitable) else "PACK"
        return "STRICT_PACK" if self.is_packed else "PACK"

    def _type(self, suitable: Sequence[Node]) -> str | None:
        """Ray's one name for the card; None where its nodes go by several or by none. Where none is up, only an
        autoscaler that knows the name could add one by it."""
        names = {name for node in suitable for name in node.types}
        if not suitable and self.card is not None:
            name = self.card.ray_accelerator_type
            return name if f"{TYPE_RESOURCE}{name}" in self.addable else None
        return names.pop() if len(names) == 1 and all(node.types for node in suitable) else None

    def room(self, nodes: Collection[Node], used: Collection[str] = ()) -> int:
        """How many more trials could run on what is free now."""
        return self._trials({node: (node.free_cpus, node.free_gpus) for node in self.suitable(nodes)}, used)

    def capacity(self, nodes: Collection[Node]) -> int:
        """How many trials could run if nobody else used the cluster."""
        return self._trials({node: (node.cpus, node.gpus) for node in self.suitable(nodes)}, ())

    def _trials(self, resources: Mapping[Node, tuple[float, float]], used: Collection[str]) -> int:
        demand = self.demand(list(resources), used)
        share = demand.bundle["CPU"]
        if not self.uses_gpus:
            whole = [node for node, (cpus, _) in resources.items() if cpus >= share * self.ranks]
            return sum(node.node_id not in used for node in whole)
        return self._fitting(resources.values(), share, demand.strategy)

    def _fitting(self, resources: Iterable[tuple[float, float]], share: float, strategy: str) -> int:
        """How many trials on GPUs these CPUs and GPUs of each node hold, of which each rank takes `share` CPUs."""
        ranks = [int(min(gpus, cpus / share + 1e-6 if share else math.inf)) for cpus, gpus in resources]
        return sum(n // self.ranks for n in ranks) if strategy == "STRICT_PACK" else sum(ranks) // self.ranks


def cpus_per_gpu(nodes: Iterable[Node]) -> float:
    """CPUs that a worker with one GPU may ask of Ray: 1, or less where a node has more GPUs than CPUs, on which Ray
    would otherwise let workers wait for ever."""
    return math.floor(100 * min([1.0, *(node.cpus / node.gpus for node in nodes if node.gpus)])) / 100


def _not_on(node_ids: Collection[str]) -> dict[str, str]:
    return {NODE_LABEL: f"!in({','.join(sorted(node_ids))})"} if node_ids else {}


def check_capacity(wanted: DeviceRequest, nodes: Collection[Node], workers: int = 1) -> None:
    """Raise `EnvironmentLacks` if these nodes could not run `workers` trials at a time, however free they were."""
    suitable = wanted.suitable(nodes)
    if not suitable:
        has = {name for node in nodes if node.gpus for name in ({node.hardware} if node.hardware else node.types)}
        others = f": it has {', '.join(sorted(has))}" if has else ""
        raise EnvironmentLacks(f"Ray has no {wanted}{others}", remedy="check `ray status`, and --hardware")
    gpus, cores = sum(int(node.gpus) for node in suitable), int(max(node.cpus for node in suitable))
    most = gpus if wanted.uses_gpus else cores
    if wanted.ranks > most:
        what = f"{gpus} {wanted} that Ray has" if wanted.uses_gpus else f"{cores} cores that a machine of Ray has"
        raise EnvironmentLacks(
            f"--devices {wanted.ranks} asks for more than the {what}", remedy=f"use --devices {most} or add nodes"
        )
    possible = wanted.capacity(nodes)
    if workers > possible:
        of = f" of {wanted.ranks} devices each" if wanted.ranks > 1 else ""
        available = gpus if wanted.uses_gpus else len(suitable)
        raise EnvironmentLacks(
            f"--workers {workers}{of} asks for more than the {available} {wanted} that Ray has",
            remedy=f"use --workers {possible} or add nodes" if possible else "add CPUs to the nodes",
        )
