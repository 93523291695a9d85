"""Has decoder layers run in a trace as torch.compile would have them run on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from autofit.core.lattice import Config
from autofit.estimate.compiled.fused_graph import FusedGraph
from autofit.estimate.memory.symbolic_sizes import SymbolicSizes
from autofit.estimate.tracing.recorder import Recorder
from autofit.techniques.axes.checkpointing import within_budget
from autofit.techniques.axes.compilation import VARIANTS
from autofit.techniques.selective import budget


@contextmanager
def compiled(layers: Sequence[Any], recorder: Recorder, config: Config) -> Iterator[None]:
    """Inside, each of the `layers` runs the graphs that torch.compile makes of it, up to where Inductor would generate
    code: torch itself decides what a forward keeps for the backward, and what it fuses is `FusedGraph`'s. `config` says
    within which budget, and at which micro-batch and rank that is decided.

    What this process has compiled is forgotten, before and after: a caller's own is compiled again.
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch.utils._triton
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx
    from torch._inductor.utils import get_donated_idxs
    from torch._inductor.virtualized import V

    def of_graph(graph: Any, operands: Any, **options: Any) -> FusedGraph:
        # A backward is compiled when it first runs, under the recorder.
        unseen = _pop_mode_temporarily() if _get_current_dispatch_mode() is recorder else nullcontext()
        with unseen, V.set_fake_mode(detect_fake_mode(operands)):
            _recursive_post_grad_passes(graph, is_inference=bool(options.get("is_inference")))
        donated = get_donated_idxs() if options.get("is_backward") else None
        return FusedGraph(graph, recorder, donated=donated or ())

    def backend(graph: Any, operands: Any) -> Any:
        return compile_fx(graph, operands, inner_compile=cast("Any", of_graph))

    share = budget(config)
    sized = _as_large_as(config) if share < 1 else nullcontext()

    # Dynamo would ask each card that is there for its random state, and so take memory of it.
    unseen_cards = patch.object(torch.cuda, "is_available", lambda: False)
    # Nothing is read from or left in the caches of real compilations.
    unkept = torch._dynamo.config.patch(
        recompile_limit=VARIANTS,
        automatic_dynamic_shapes=False,
        automatic_dynamic_local_pgo=False,
        automatic_dynamic_remote_pgo=False,
    )
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with unseen_cards, unkept, uncached, _without_remarks(), sized:
        torch._dynamo.reset()
        budgeted = within_budget(share, backend)
        for layer in layers:
            layer.compile(backend=budgeted)
        try:
            yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            torch._dynamo.reset()
            torch.utils._triton.has_triton.cache_clear()  # which has asked whether there are cards


@contextmanager
def _as_large_as(config: Config) -> Iterator[None]:
    """Inside, torch weighs what to keep by sizes at the micro-batch and rank of `config`, not at the primes of a trace.
    Both functions are named so in torch/_functorch/partitioners.py, 2.11 to 2.13."""
    from torch._functorch import partitioners

    def scaled(measure: Callable[..., float]) -> Callable[..., int]:
        def at_size(*measured: Any) -> int:
            seen = SymbolicSizes.of([int(measure(*measured))])
            return int(seen.at(config.number("micro_batch"), int(config.get("rank") or 1))[0])

        return at_size

    with (
        patch.object(partitioners, "_tensor_nbytes", scaled(partitioners._tensor_nbytes)),
        patch.object(partitioners, "estimate_runtime", scaled(partitioners.estimate_runtime)),
    ):
        yield


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Keep torch's remarks on what it compiles, which trials print where they apply, off the screen."""
    names = ("torch._logging._internal", "torch._dynamo", "torch._higher_order_ops", "torch._inductor")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
