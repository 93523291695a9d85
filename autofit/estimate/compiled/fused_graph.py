"""Runs a compiled graph as Inductor's code would: what it stores comes and goes when that does."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._prims import rng_prims
from torch.fx import GraphModule, Node, map_arg
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from autofit.estimate.compiled.fusion import Fusion, Unit
from autofit.estimate.compiled.realized import format_of
from autofit.estimate.time.op_costs import fused
from autofit.estimate.tracing.recorder import NotTraced, Recorder

_ATEN = torch.ops.aten
_INTO_BUFFERS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default)
"""Products that Inductor's code has write into its buffers (extern_kernels): a checkpoint around the layer does not
take these for those that it keeps."""


class FusedGraph:
    """A graph of aten operations, run on fake tensors under a recorder, as `Fusion` plans it."""

    def __init__(self, graph: GraphModule, recorder: Recorder, *, donated: Sequence[int] = ()) -> None:
        """`donated` are the places among the operands of those that may be written over."""
        self._boxed_call = True  # torch hands over the operands in a list, which is emptied so that they can be freed
        self._graph = graph
        self._recorder = recorder
        self._plan = Fusion(graph, donated)
        self._costs = {
            unit: fused(map(format_of, unit.read), map(format_of, self._plan.stored(unit)))
            for unit in self._plan.units
            if unit.shape
        }

    def __call__(self, operands: list[Any]) -> Any:
        values: dict[Node, Any] = dict(zip(self._plan.operands, operands, strict=True))
        operands.clear()
        for unit in self._plan.units:
            self._run(unit, values)
            for node in self._plan.freed[unit]:
                values.pop(node, None)
        return map_arg(self._plan.result, lambda node: self._value(node, values))

    def _run(self, unit: Unit, values: dict[Node, Any]) -> None:
        if unit.shape is None:
            self._call(unit, values)
            return
        self._recorder.count(self._costs[unit])
        for node in self._plan.stored(unit):
            like, donor = format_of(node), self._plan.donors.get(node)
            values[node] = (
                self._recorder.make(like)
                if donor is None
                else torch.as_strided(self._value(donor, values), like.shape, like.stride(), 0)
            )

    def _call(self, unit: Unit, values: dict[Node, Any]) -> None:
        node, *parts = unit.results
        values[node] = self._called(node.target, *self._arguments(node, values))
        for part in parts:
            values[part] = values[part.all_input_nodes[0]][part.args[1]]
        for several in [n for n in unit.results if not isinstance(values[n], torch.Tensor)]:
            del values[several]

    def _called(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives. The state of random numbers that are drawn again is kept on the host."""
        if target in _INTO_BUFFERS:
            with ExitStack() as unseen:
                while _get_current_dispatch_mode() is not self._recorder:
                    unseen.enter_context(_pop_mode_temporarily())
                return target(*args, **kwargs)
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
            kind = self._plan.kinds[node]
            if kind == "attribute":
                values[node] = operator.attrgetter(str(node.target))(self._graph)
            elif kind == "view":
                args, kwargs = self._arguments(node, values)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            else:
                raise NotTraced(f"{node.target} was read before it was computed, or after it was freed")
        return values[node]

    def _arguments(self, node: Node, values: dict[Node, Any]) -> tuple[Any, Any]:
        """The positional and the named ones."""
        args, kwargs = (map_arg(given, lambda n: self._value(n, values)) for given in (node.args, node.kwargs))
        return args, kwargs
