"""What Inductor makes of a graph: which operations share a kernel, which results are stored, and over what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import GraphModule, Node, map_arg

from autofit.estimate.compiled.realized import Realized, format_of, reduces, sums_rows

LONGEST_IN_REGISTERS = 1024
"""A kernel that sums over rows of up to so many elements holds a row in registers, and else loops over it
(`should_use_persistent_reduction` of torch/_inductor/choices.py)."""


@dataclass(eq=False, slots=True)
class Unit:
    """What runs as one: a call, or a kernel of fused operations."""

    results: list[Node]
    """The results that it computes."""
    read: dict[Node, None]
    """What it reads of what is computed apart, in order."""
    shape: tuple[int, bool] | None = None
    """Over how many elements a kernel runs, and whether it sums over anything but the last dimension; None for a
    call."""
    after: set[Unit] = field(default_factory=set)
    """The units whose results it reads."""

    def follows(self, other: Unit) -> bool:
        """Whether it reads, directly or not, what `other` makes."""
        seen, left = set(self.after), list(self.after)
        while left and other not in seen:
            new = left.pop().after - seen
            seen |= new
            left += new
        return other in seen


class Fusion:
    """The calls and kernels that a graph of aten operations becomes, and the life of each of their results: as for a
    GPU, as code for a processor is taken to be alike.

    What is computed apart over as many elements from the same operands shares a kernel; it gets a storage unless it is
    read within its kernel alone. What is read for the last time is freed, or written over by a result of its format.
    """

    def __init__(self, graph: GraphModule, donated: Sequence[int]) -> None:
        """`donated` are the places among the operands of those that may be written over."""
        self._realized = Realized(graph)
        (self.result,) = next(node for node in graph.graph.nodes if node.op == "output").args
        self.kinds = self._realized.kinds
        self.operands = [node for node in self._realized.nodes if self.kinds[node] == "operand"]
        self._donated = {self.operands[place] for place in donated}
        self.units = _in_order(self._kernels())
        """In the order in which they run."""
        kernels = [unit for unit in self.units if unit.shape]
        self._unstored = {node for unit in kernels for node in unit.results if self._is_local(node, unit)}
        self._ends = self._last_reads()
        self.donors: dict[Node, Node] = {}
        """For results that are written over an operand, that operand."""
        for unit in self.units:
            for node in self.stored(unit):
                donor = self._written_over(node, unit)
                if donor is not None:
                    self.donors[node] = donor
        together: dict[Node, list[Node]] = {}
        for node, owner in self._realized.owner.items():
            together.setdefault(owner, []).append(node)
        self.freed = {unit: [node for owner in ends for node in together[owner]] for unit, ends in self._ends.items()}
        """For each unit, what nothing needs after it, views included."""

    def stored(self, unit: Unit) -> list[Node]:
        """The results of a kernel that get a storage."""
        return [node for node in unit.results if unit.shape and node not in self._unstored]

    def _parts(self, node: Node) -> Iterable[Node]:
        for user in node.users:
            if self.kinds.get(user) == "part":
                yield user
                yield from self._parts(user)

    def _kernels(self) -> list[Unit]:
        """Calls and kernels in the graph's order."""
        units: list[Unit] = []
        makers: dict[Node, Unit] = {}
        for node in self._realized.nodes:
            if self.kinds[node] == "call":
                read = dict.fromkeys(i for i in node.all_input_nodes if i in self._realized.owner)
                unit = Unit([node, *self._parts(node)], read)
            elif self.kinds[node] == "fused" and node in self._realized.owner:
                read = dict.fromkeys(self._realized.sources[node])
                numel = max(format_of(n).numel() for n in (node, *read))
                unit = Unit([node], read, (numel, sums_rows(node)))
            else:
                continue
            unit.after = {makers[owner] for owner in map(self._realized.owner.__getitem__, read) if owner in makers}
            joined = next((kernel for kernel in units if unit.shape and _may_join(unit, kernel)), None)
            if joined is None:
                units.append(unit)
            else:
                joined.results += unit.results
                joined.read.update(read)
                joined.after |= unit.after - {joined}
            makers.update(dict.fromkeys(unit.results, joined or unit))
        return units

    def _is_local(self, node: Node, unit: Unit) -> bool:
        """Whether a kernel computes a result for itself alone. Unless it is a row's sum, it has to be stored if another
        loop over the row reads it."""
        outside = any(node in map(self._realized.owner.get, other.read) for other in self.units if other is not unit)
        if outside or node in self._leaving:
            return False
        if reduces(node) or not format_of(node).dim() or format_of(node).shape[-1] <= LONGEST_IN_REGISTERS:
            return True
        loop = self._loop(node, unit)
        return all(self._loop(other, unit) == loop for other in unit.results if self._realized.is_read_by(other, node))

    def _loop(self, node: Node, unit: Unit) -> int:
        """In which of a kernel's loops over rows a result is computed: after those of the sums that it reads."""
        read = [source for source in self._realized.sources[node] if source in unit.results]
        return max((self._loop(source, unit) + reduces(source) for source in read), default=0)

    @cached_property
    def _leaving(self) -> set[Node]:
        """What the graph's results lie in."""
        owners: set[Node] = set()
        map_arg(self.result, lambda node: owners.add(self._realized.owner[node]))
        return owners

    def _last_reads(self) -> dict[Unit, list[Node]]:
        """For each unit, the storages that nothing needs after it."""
        last = {self._realized.owner[node]: unit for unit in self.units for node in (*unit.results, *unit.read)}
        freed: dict[Unit, list[Node]] = {unit: [] for unit in self.units}
        for owner, unit in last.items():
            if owner not in self._leaving:
                freed[unit].append(owner)
        return freed

    def _written_over(self, node: Node, unit: Unit) -> Node | None:
        """The operand whose storage a kernel's result takes: one of the same format, read at the same places, that
        nothing reads later and only what the result itself needs reads before (`decide_inplace_update` of
        torch/_inductor/scheduler.py)."""
        read = [self._realized.owner[source] for source in self._realized.sources[node]]
        for owner in dict.fromkeys(read):
            like = [(t.dtype, t.nbytes) for t in map(format_of, (owner, node))]
            others = [n for n in unit.results if n is not node and self._realized.is_read_by(n, owner)]
            if (
                owner in self._ends[unit]
                and owner not in self._unstored
                and owner not in self.donors.values()
                and (self.kinds[owner] != "operand" or owner in self._donated)
                and like[0] == like[1]
                and read.count(owner) == 1
                and all(self._realized.needs(node, other) for other in others)
            ):
                return owner
        return None


def _may_join(unit: Unit, kernel: Unit) -> bool:
    """Whether a new unit may become part of a kernel: it runs over as many elements, or over a sum that this makes,
    reads something that this reads or makes, and nothing outside that needs what this makes."""
    if kernel.shape is None or unit.shape is None or kernel.shape[1] != unit.shape[1]:
        return False
    of_sums = [format_of(n).numel() for n in kernel.results if n in unit.read and reduces(n)]
    if unit.shape[0] not in (kernel.shape[0], *of_sums):
        return False
    if not any(n in kernel.read or n in kernel.results for n in unit.read):
        return False
    return not any(other is not kernel and other.follows(kernel) for other in unit.after)


def _in_order(units: list[Unit]) -> list[Unit]:
    """Each unit after those whose results it reads, else in the given order."""
    ordered: dict[Unit, None] = {}

    def visit(unit: Unit) -> None:
        if unit not in ordered:
            for before in sorted(unit.after, key=place.__getitem__):
                visit(before)
            ordered[unit] = None

    place = {unit: index for index, unit in enumerate(units)}
    for unit in units:
        visit(unit)
    return list(ordered)
