"""Liger's kernels in a model's decoder layers, and the same model without them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from autofit.techniques.adapters import unwrap

ROTARY = "apply_rotary_pos_emb"
"""What the module of each of these architectures calls to rotate queries and keys."""
_ORIGINAL: dict[str, Any] = {}
"""The original rotary function of each architecture's module."""


class LigerLayers:
    """A transformers or peft model in which Liger's kernels have replaced the norms, rotary embeddings and the MLP's
    gate. The rotary embeddings are replaced for all models of its architecture in this process."""

    def __init__(self, model: Any) -> None:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        causal_lm = unwrap(model)
        self._code = sys.modules[type(causal_lm).__module__]
        self._rotary = _ORIGINAL.setdefault(self._code.__name__, getattr(self._code, ROTARY))
        definitions = dict(vars(self._code))
        patched = {module for module in causal_lm.modules() if "forward" in vars(module)}
        _apply_liger_kernel_to_instance(model=causal_lm, cross_entropy=False, fused_linear_cross_entropy=False)
        self._replaced = [m for m in causal_lm.modules() if "forward" in vars(m) and m not in patched]
        # Liger also replaces the classes of norms and MLPs, which models to come are made of.
        vars(self._code).update(definitions | {ROTARY: getattr(self._code, ROTARY)})

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Inside, the model computes as without Liger."""
        liger = [vars(module).pop("forward") for module in self._replaced]
        try:
            with patch.object(self._code, ROTARY, self._rotary):
                yield
        finally:
            for module, forward in zip(self._replaced, liger, strict=True):
                vars(module)["forward"] = forward
