"""The root module of a training step: tokens and labels in, the loss out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autofit.techniques.adapters import unwrap
from autofit.techniques.axes.checkpointing import within_budget
from autofit.techniques.axes.compilation import VARIANTS
from autofit.techniques.technique import Head
from autofit.training.decoder import decoder_layers
from autofit.training.rows import Rows

if TYPE_CHECKING:
    from autofit.techniques.technique import LossKernel


class LossModule(nn.Module):
    """A causal language model together with its loss.

    It is the root that a sharding engine wraps, so that all parameters, including the head's, are used within a single
    forward.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossKernel,
        evaluated: LossKernel | None = None,
        *,
        masks_padding: bool = False,
        rows: Rows | None = None,
        without_kernels: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`evaluated` is the kernel of evaluation, where it is another. `BuildPlan` explains the other arguments."""
        super().__init__()
        self.model = model
        self._loss = loss
        self._evaluated = evaluated or loss
        self._masks_padding = masks_padding
        self.rows = rows or Rows()
        self._without_kernels = without_kernels
        self._is_compiled = False
        causal_lm = unwrap(model)
        decoder = getattr(causal_lm, causal_lm.base_model_prefix, None) or causal_lm.model
        self._decoder = [decoder]  # in a list, so that it is registered only once, within `model`
        self.config = causal_lm.config.get_text_config()
        """transformers' config of the text model."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, plain: LossKernel | None = None) -> torch.Tensor:
        """Summed cross-entropy in nats, fp32 scalar. tokens, labels [sequences, seq_len]; labels are already shifted.

        If `plain` is given, that kernel replaces this module's own and the layers run uncompiled, by torch's own
        operations, for comparison; each row is then one sequence.
        """
        arguments = self.rows.decoder_arguments(tokens) if plain is None else {"input_ids": tokens}
        eagerly = plain is not None and self._is_compiled
        with (
            torch.compiler.set_stance("force_eager") if eagerly else nullcontext(),
            nullcontext() if plain is None else self._without_kernels(),
        ):
            # Held until the loss is computed, as in transformers.
            decoded = self.decoder(**arguments, attention_mask=self._mask(tokens), use_cache=False)
        hidden: torch.Tensor = decoded.last_hidden_state
        kernel = plain or (self._loss if self.training else self._evaluated)
        return kernel(hidden.reshape(-1, hidden.shape[-1]), self.head(), labels.reshape(-1))

    def _mask(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """The mask that a trainer gives for padded sequences, [sequences, seq_len]. It leaves out the last token of
        every sequence but the first; no label is there, so that the loss does not change."""
        if not self._masks_padding or len(tokens) == 1:
            return None
        mask = torch.ones_like(tokens)
        mask[1:, -1] = 0
        return mask

    @property
    def decoder(self) -> Any:
        """The part of the model that produces the hidden states."""
        return self._decoder[0]

    def head(self) -> Head:
        """The projection to logits, with the scale and softcap given in the architecture's config."""
        projection: Any = unwrap(self.model).get_output_embeddings()
        scale = float(getattr(self.config, "logit_scale", None) or 1.0)
        divisor = float(getattr(self.config, "logits_scaling", None) or 1.0)
        return Head(
            weight=projection.weight,
            bias=getattr(projection, "bias", None),
            softcap=getattr(self.config, "final_logit_softcapping", None),
            scale=scale / divisor,
        )

    def compile_layers(self, *, budget: float = 1.0, **options: Any) -> None:
        """Compile each decoder layer in place, with torch.compile's `options`; all else stays eager. Layers of one kind
        run the same code, which is compiled once. Each may keep the share `budget` of its activations."""
        import torch._dynamo  # in a trial that compiles: it takes a second

        torch._dynamo.config.recompile_limit = VARIANTS
        self._is_compiled = True
        if budget < 1:
            backend = torch._dynamo.lookup_backend(options.get("backend", "inductor"))
            options["backend"] = within_budget(budget, backend)
        for layer in decoder_layers(self.model):
            layer.compile(**options)
