"""Runs a graph that torch.compile has made as its compiled code would allocate: fused operations make only what others
need."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._prims import rng_prims
from torch.fx import GraphModule, Node, map_arg
from torch.utils._python_dispatch import _pop_mode_temporarily

from autofit.estimate.time.op_costs import fused
from autofit.estimate.tracing.recorder import NotTraced, Recorder

MOST_READS, MOST_READS_OF_SEVERAL, MOST_OPERATIONS = 8, 4, 30
"""A result that reads more operands than the first is stored, and so is one with several users that reads more than the
second or is computed by more operations than the third (`_realize_acc_reads_threshold_default`,
`realize_reads_threshold` and `_realize_opcount_threshold_default` of torch/_inductor/config.py)."""
LONGEST_IN_REGISTERS = 1024
"""A kernel that sums over rows of up to so many elements holds a row in registers, and else loops over it
(`should_use_persistent_reduction` of torch/_inductor/choices.py)."""
_ATEN = torch.ops.aten
_CALLED = {
    *(_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN._grouped_mm, _ATEN.convolution),
    *(_ATEN.index_put, _ATEN._unsafe_index_put, _ATEN.scatter, _ATEN.scatter_add, _ATEN.scatter_reduce),
    *(_ATEN.cumsum, _ATEN.cumprod, _ATEN.sort, _ATEN.topk),
}
"""What Inductor has a rule for that calls a library or fuses with nothing."""
_VIEWS = {_ATEN._unsafe_view.default, _ATEN.reshape.default}
"""Views that their schema does not declare."""


@dataclass(eq=False, slots=True)
class Unit:
    """What runs as one: a call, or a kernel of fused operations."""

    made: list[Node]
    """The results that it computes."""
    read: dict[Node, None]
    """What it reads of what is computed apart, in order."""
    shape: tuple[int, bool] | None = None
    """Of a kernel, over how many elements it runs, and whether it sums over anything but the last dimension; None of a
    call."""
    after: set[Unit] = field(default_factory=set)
    """The units whose results it reads."""

    def follows(self, other: Unit) -> bool:
        """Whether it reads, directly or not, what `other` makes."""
        return other in self.after or any(unit.follows(other) for unit in self.after)


class FusedGraph:
    """A graph of aten operations, run on fake tensors under a recorder.

    Inductor calls matrix products, attention and whatever it cannot generate code for. All else it fuses. A result is
    computed apart if it leaves the graph, if a call reads it, if it is a sum, or if it takes too much to be computed
    again by each reader. What is computed apart over as many elements from the same operands shares a kernel; it gets
    a storage unless it is read within its kernel alone. What is read for the last time is freed, or overwritten by a
    result of its format. All of this is as for a GPU: code for a processor is taken to be alike.
    """

    def __init__(self, graph: GraphModule, recorder: Recorder, *, donated: Sequence[int] = ()) -> None:
        """`donated` are the places among the operands of those that may be written over."""
        self._boxed_call = True  # torch hands over the operands in a list, which is emptied so that they can be freed
        self._recorder = recorder
        self._graph = graph
        self._nodes = [node for node in graph.graph.nodes if node.op != "output"]
        (self._result,) = next(node for node in graph.graph.nodes if node.op == "output").args
        self._place = {node: place for place, node in enumerate(graph.graph.nodes)}
        self._kinds = {node: _kind(node) for node in self._nodes}
        self._operands = [node for node in self._nodes if self._kinds[node] == "operand"]
        self._donated = {self._operands[place] for place in donated}
        for node in self._nodes:
            if self._kinds[node] == "attribute":
                node.meta.setdefault("val", operator.attrgetter(str(node.target))(graph))
        self._owner: dict[Node, Node] = {}
        """For each node that is computed apart, itself; for a view of one, that one."""
        self._apart_from: dict[Node, int] = {}
        """From which place in the graph on those that read a fused operation's result find it computed."""
        self._sources: dict[Node, tuple[Node, ...]] = {}
        """What computing a fused operation reads of what is computed apart."""
        self._inlined: dict[Node, frozenset[Node]] = {}
        """The fused operations that computing one includes."""
        for node in self._nodes:
            self._describe(node)
        self._units = _in_order(self._kernels())
        self._unstored = {
            node for unit in self._units if unit.shape for node in unit.made if self._is_local(node, unit)
        }
        self._freed = self._last_reads()
        self._donors: dict[Node, Node] = {}
        """For results that are written over an operand, that operand."""
        for unit in self._units:
            for node in self._stored(unit):
                donor = self._written_over(node, unit)
                if donor is not None:
                    self._donors[node] = donor
        self._costs = {
            unit: fused(map(_format, unit.read), map(_format, self._stored(unit))) for unit in self._units if unit.shape
        }

    def __call__(self, operands: list[Any]) -> Any:
        """The graph's results."""
        values: dict[Node, Any] = dict(zip(self._operands, operands, strict=True))
        operands.clear()
        for unit in self._units:
            self._run(unit, values)
            for gone in self._freed[unit]:
                for node in self._together[gone]:
                    values.pop(node, None)
        return map_arg(self._result, lambda node: self._value(node, values))

    def _run(self, unit: Unit, values: dict[Node, Any]) -> None:
        if unit.shape is None:
            self._call(unit, values)
            return
        self._recorder.count(self._costs[unit])
        for node in self._stored(unit):
            like, donor = _format(node), self._donors.get(node)
            values[node] = (
                self._recorder.make(like)
                if donor is None
                else torch.as_strided(self._value(donor, values), like.shape, like.stride(), 0)
            )

    def _call(self, unit: Unit, values: dict[Node, Any]) -> None:
        node, *parts = unit.made
        values[node] = self._called(node.target, *self._arguments(node, values))
        for part in parts:
            values[part] = values[part.all_input_nodes[0]][part.args[1]]
        for several in [n for n in unit.made if not isinstance(values[n], torch.Tensor)]:
            del values[several]

    def _called(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives. The state of random numbers that are drawn again is kept on the host."""
        if not isinstance(target, HigherOrderOperator):
            return target(*args, **kwargs)
        if target is rng_prims.run_and_save_rng_state:
            with _pop_mode_temporarily():
                state = torch.get_rng_state()
            return state, args[0](*args[1:], **kwargs)
        if target is rng_prims.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        raise NotTraced(f"compiled code contains {target}, whose memory is not known")

    def _value(self, node: Node, values: dict[Node, Any]) -> Any:
        if node not in values:
            if self._kinds[node] == "attribute":
                values[node] = operator.attrgetter(str(node.target))(self._graph)
            elif self._kinds[node] == "view":
                args, kwargs = self._arguments(node, values)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            else:
                raise NotTraced(f"{node.target} was read before it was computed, or after it was freed")
        return values[node]

    def _arguments(self, node: Node, values: dict[Node, Any]) -> tuple[Any, Any]:
        """The positional and the named ones."""
        args, kwargs = (map_arg(given, lambda n: self._value(n, values)) for given in (node.args, node.kwargs))
        return args, kwargs

    def _stored(self, unit: Unit) -> list[Node]:
        """The results of a kernel that get a storage."""
        return [node for node in unit.made if unit.shape and node not in self._unstored]

    def _describe(self, node: Node) -> None:
        kind, inputs = self._kinds[node], node.all_input_nodes
        if kind in ("operand", "attribute", "call", "part"):
            self._owner[node] = node
            return
        if kind == "view" and inputs[0] in self._owner:
            self._owner[node] = self._owner[inputs[0]]
            return
        read: dict[Node, None] = {}
        inlined = {node} if kind == "fused" else set()
        for given in inputs:
            owner = self._owner.get(given, given)
            if given in self._owner and self._apart_from.get(owner, 0) < self._place[node]:
                read[given] = None
            else:
                read.update(dict.fromkeys(self._sources[owner]))
                inlined |= self._inlined[owner]
        self._sources[node], self._inlined[node] = tuple(read), frozenset(inlined)
        places = self._places(node) if kind == "fused" and isinstance(node.meta["val"], torch.Tensor) else []
        if places:
            self._owner[node], self._apart_from[node] = node, min(places)

    def _places(self, node: Node) -> list[int]:
        """The places in the graph from which on a fused operation's result would be computed apart (`run_node` of
        torch/_inductor/graph.py): its own, or that of what asks for it."""
        from torch._inductor.lowering import needs_realized_inputs

        found = []
        reads = len({self._owner[source] for source in self._sources[node]})
        costly = reads > MOST_READS_OF_SEVERAL or reads + len(self._inlined[node]) > MOST_OPERATIONS
        if _reduces(node) or reads > MOST_READS or (costly and len(node.users) > 1):
            found.append(self._place[node])
        for view in self._views(node):
            for user in view.users:
                asks = user.op == "output" or user.target in needs_realized_inputs
                if asks and len(view.users) > 1:
                    found.append(self._place[view])
                elif user.op == "output" or self._kinds[user] == "call":
                    found.append(self._place[user])
        return found

    def _views(self, node: Node) -> Iterable[Node]:
        """A node and its views."""
        yield node
        for user in node.users:
            if user.op != "output" and self._kinds[user] == "view":
                yield from self._views(user)

    def _parts(self, node: Node) -> Iterable[Node]:
        for user in node.users:
            if self._kinds.get(user) == "part":
                yield user
                yield from self._parts(user)

    def _kernels(self) -> list[Unit]:
        """Calls and kernels in the graph's order."""
        units: list[Unit] = []
        makers: dict[Node, Unit] = {}
        for node in self._nodes:
            if self._kinds[node] == "call":
                read = dict.fromkeys(i for i in node.all_input_nodes if i in self._owner)
                unit = Unit([node, *self._parts(node)], read)
            elif self._kinds[node] == "fused" and node in self._owner:
                read = dict.fromkeys(self._sources[node])
                numel = max(_format(n).numel() for n in (node, *read))
                unit = Unit([node], read, (numel, _sums_rows(node)))
            else:
                continue
            unit.after = {makers[owner] for owner in map(self._owner.__getitem__, read) if owner in makers}
            joined = next((known for known in units if unit.shape and _may_join(unit, known)), None)
            if joined is None:
                units.append(unit)
            else:
                joined.made += unit.made
                joined.read.update(read)
                joined.after |= unit.after - {joined}
            makers.update(dict.fromkeys(unit.made, joined or unit))
        return units

    def _is_local(self, node: Node, unit: Unit) -> bool:
        """Whether a kernel computes a result for itself alone. One that it reads in another loop over a row than that
        which computes it has to be stored, unless it is a row's sum."""
        readers = [user for view in self._views(node) for user in view.users if user.op != "output"]
        outside = any(node in map(self._owner.get, other.read) for other in self._units if other is not unit)
        if outside or node in self._leaving:
            return False
        is_long = bool(readers) and _format(node).dim() > 0 and _format(node).shape[-1] > LONGEST_IN_REGISTERS
        own = self._loop(node, unit)
        return (
            not is_long
            or _reduces(node)
            or all(self._loop(other, unit) == own for other in unit.made if self._is_read_by(other, node))
        )

    def _loop(self, node: Node, unit: Unit) -> int:
        """In which of a kernel's loops over rows a result is computed: after those of the sums that it reads."""
        read = [source for source in self._sources[node] if source in unit.made]
        return max((self._loop(source, unit) + _reduces(source) for source in read), default=0)

    @cached_property
    def _leaving(self) -> set[Node]:
        """What the graph's results lie in."""
        found: set[Node] = set()
        map_arg(self._result, lambda node: found.add(self._owner[node]))
        return found

    def _last_reads(self) -> dict[Unit, list[Node]]:
        """For each unit, what nothing needs after it."""
        self._together: dict[Node, list[Node]] = {}
        for node, owner in self._owner.items():
            self._together.setdefault(owner, []).append(node)
        last = {self._owner[node]: unit for unit in self._units for node in (*unit.made, *unit.read)}
        freed: dict[Unit, list[Node]] = {unit: [] for unit in self._units}
        for owner, unit in last.items():
            if owner not in self._leaving:
                freed[unit].append(owner)
        return freed

    def _written_over(self, node: Node, unit: Unit) -> Node | None:
        """The operand whose storage a kernel's result takes: one of the same format, read at the same places, that
        nothing reads later and only what the result itself needs reads before (`decide_inplace_update` of
        torch/_inductor/scheduler.py)."""
        read = [self._owner[source] for source in self._sources[node]]
        for owner in dict.fromkeys(read):
            like = [(t.dtype, t.nbytes) for t in map(_format, (owner, node))]
            others = [made for made in unit.made if made is not node and self._is_read_by(made, owner)]
            if (
                owner in self._freed[unit]
                and owner not in self._unstored
                and owner not in self._donors.values()
                and (self._kinds[owner] != "operand" or owner in self._donated)
                and like[0] == like[1]
                and read.count(owner) == 1
                and all(self._needs(node, other) for other in others)
            ):
                return owner
        return None

    def _is_read_by(self, node: Node, owner: Node) -> bool:
        return any(self._owner[source] is owner for source in self._sources[node])

    def _needs(self, node: Node, other: Node) -> bool:
        """Whether computing a node reads another's result, directly or not."""
        read = [self._owner[source] for source in self._sources.get(node, ())]
        return other in read or any(self._needs(source, other) for source in read)


def _may_join(unit: Unit, kernel: Unit) -> bool:
    """Whether a new unit may become part of a kernel: it runs over as many elements, or over a sum that the kernel
    makes, reads something that the kernel reads or makes, and nothing outside of it that needs what it makes."""
    if kernel.shape is None or unit.shape is None or kernel.shape[1] != unit.shape[1]:
        return False
    of_sums = [_format(n).numel() for n in kernel.made if n in unit.read and _reduces(n)]
    if unit.shape[0] not in (kernel.shape[0], *of_sums):
        return False
    if not any(n in kernel.read or n in kernel.made for n in unit.read):
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


def _kind(node: Node) -> str:
    """`operand`, `attribute`, `view`, `call`, `part` of a call's results, or `fused`, for which code is generated."""
    from torch._inductor.lowering import fallbacks, lowerings

    if node.op != "call_function":
        return {"placeholder": "operand", "get_attr": "attribute"}[node.op]
    target = node.target
    if target is operator.getitem:
        of = _kind(node.all_input_nodes[0])
        return of if of in ("view", "fused") else "part"
    if not isinstance(target, torch._ops.OpOverload):
        return "call"
    if target.is_view or target in _VIEWS:
        return "view"
    if target._schema.is_mutable or target.overloadpacket in _CALLED or target in fallbacks or target not in lowerings:
        return "call"
    return "fused" if isinstance(node.meta["val"], torch.Tensor) or _reduces(node) else "call"


def _reduces(node: Node) -> bool:
    """Whether it sums, or is a part of what several sums give."""
    of = node.all_input_nodes[0] if node.target is operator.getitem else node
    return torch.Tag.reduction in getattr(of.target, "tags", ())


def _sums_rows(node: Node) -> bool:
    """Whether a reduction leaves the last dimension, as that of a gradient over all tokens does."""
    if not _reduces(node):
        return False
    of = node.all_input_nodes[0] if node.target is operator.getitem else node
    before, after = _format(of.all_input_nodes[0]), _format(node)
    return after.dim() > 0 and before.shape[-1] == after.shape[-1] != 1


def _format(node: Node) -> torch.Tensor:
    """A tensor like the node's; of several, the first."""
    value = node.meta["val"]
    return value if isinstance(value, torch.Tensor) else next(v for v in value if isinstance(v, torch.Tensor))
