"""Which results of a graph Inductor computes apart, and which it computes anew wherever they are read."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

MOST_READS, MOST_READS_OF_SEVERAL, MOST_OPERATIONS = 8, 4, 30
"""A result that reads more operands than the first is stored, as is one with several users that reads more than the
second or takes more operations than the third (`_realize_acc_reads_threshold_default`, `realize_reads_threshold` and
`_realize_opcount_threshold_default` of torch/_inductor/config.py)."""
_ATEN = torch.ops.aten
_CALLED = {
    *(_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN._grouped_mm, _ATEN.convolution),
    *(_ATEN.index_put, _ATEN._unsafe_index_put, _ATEN.scatter, _ATEN.scatter_add, _ATEN.scatter_reduce),
    *(_ATEN.cumsum, _ATEN.cumprod, _ATEN.sort, _ATEN.topk),
}
"""What Inductor has a rule for that calls a library or fuses with nothing."""
_VIEWS = {_ATEN._unsafe_view.default, _ATEN.reshape.default}
"""Views that their schema does not declare."""


class Realized:
    """The nodes of a graph of aten operations, and what computing each of them reads.

    Inductor calls matrix products, attention and whatever it cannot generate code for, and fuses all else. A fused
    result is computed apart ("realized") if it leaves the graph, if a call reads it, if it is a sum, or if it takes too
    much to be computed again by each reader. Readers before the place from which on that is known compute it.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.nodes = [node for node in graph.graph.nodes if node.op != "output"]
        self.kinds = {node: _kind(node) for node in self.nodes}
        """The kind of each node, by the names of `_kind`."""
        for node in self.nodes:
            if self.kinds[node] == "attribute":
                node.meta.setdefault("val", operator.attrgetter(str(node.target))(graph))
        self._place = {node: place for place, node in enumerate(graph.graph.nodes)}
        self.owner: dict[Node, Node] = {}
        """For each node that is computed apart, itself; for a view of one, that one."""
        self.sources: dict[Node, tuple[Node, ...]] = {}
        """What computing a fused operation reads of what is computed apart."""
        self._apart_from: dict[Node, int] = {}
        """From which place in the graph on a fused operation's readers find it computed."""
        self._inlined: dict[Node, frozenset[Node]] = {}
        """The fused operations that computing one includes."""
        for node in self.nodes:
            self._describe(node)

    def is_read_by(self, node: Node, owner: Node) -> bool:
        return any(self.owner[source] is owner for source in self.sources[node])

    def needs(self, node: Node, other: Node) -> bool:
        """Whether computing a node reads another's result, directly or not."""
        read = [self.owner[source] for source in self.sources.get(node, ())]
        return other in read or any(self.needs(source, other) for source in read)

    def _describe(self, node: Node) -> None:
        kind, inputs = self.kinds[node], node.all_input_nodes
        if kind in ("operand", "attribute", "call", "part"):
            self.owner[node] = node
            return
        if kind == "view" and inputs[0] in self.owner:
            self.owner[node] = self.owner[inputs[0]]
            return
        read: dict[Node, None] = {}
        inlined = {node} if kind == "fused" else set()
        for source in inputs:
            owner = self.owner.get(source, source)
            if source in self.owner and self._apart_from.get(owner, 0) < self._place[node]:
                read[source] = None
            else:
                read.update(dict.fromkeys(self.sources[owner]))
                inlined |= self._inlined[owner]
        self.sources[node], self._inlined[node] = tuple(read), frozenset(inlined)
        places = self._places(node) if kind == "fused" and isinstance(node.meta["val"], torch.Tensor) else []
        if places:
            self.owner[node], self._apart_from[node] = node, min(places)

    def _places(self, node: Node) -> list[int]:
        """The places in the graph from which on a fused operation's result would be computed apart (`run_node` of
        torch/_inductor/graph.py): its own, or that of what asks for it."""
        from torch._inductor.lowering import needs_realized_inputs

        places = []
        reads = len({self.owner[source] for source in self.sources[node]})
        costly = reads > MOST_READS_OF_SEVERAL or reads + len(self._inlined[node]) > MOST_OPERATIONS
        if reduces(node) or reads > MOST_READS or (costly and len(node.users) > 1):
            places.append(self._place[node])
        for view in self.views(node):
            for user in view.users:
                asks = user.op == "output" or user.target in needs_realized_inputs
                if asks and len(view.users) > 1:
                    places.append(self._place[view])
                elif user.op == "output" or self.kinds[user] == "call":
                    places.append(self._place[user])
        return places

    def views(self, node: Node) -> Iterable[Node]:
        yield node
        for user in node.users:
            if user.op != "output" and self.kinds[user] == "view":
                yield from self.views(user)


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
    return "fused" if isinstance(node.meta["val"], torch.Tensor) or reduces(node) else "call"


def reduces(node: Node) -> bool:
    """Whether it sums, or is a part of what several sums give."""
    of = node.all_input_nodes[0] if node.target is operator.getitem else node
    return torch.Tag.reduction in getattr(of.target, "tags", ())


def sums_rows(node: Node) -> bool:
    """Whether a reduction leaves the last dimension, as that of a gradient over all tokens does."""
    if not reduces(node):
        return False
    of = node.all_input_nodes[0] if node.target is operator.getitem else node
    before, after = format_of(of.all_input_nodes[0]), format_of(node)
    return after.dim() > 0 and before.shape[-1] == after.shape[-1] != 1


def format_of(node: Node) -> torch.Tensor:
    """A tensor like the node's; of several, the first."""
    value = node.meta["val"]
    return value if isinstance(value, torch.Tensor) else next(v for v in value if isinstance(v, torch.Tensor))
