"""Checks, before a run, that autofit's loss is that of transformers' own logits, for architectures no test covers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autofit.catalog.models import Model, architecture
from autofit.catalog.quiet import errors_only
from autofit.techniques.losses.cross_entropy import full_cross_entropy
from autofit.training.loss_module import LossModule

ROWS = 64
"""Vocabulary size in this check: how logits are post-processed does not depend on it."""


@cache
def why_another_loss(model: Model) -> str | None:
    """Why a training step's loss is not that of the model's own logits, in one sentence; None if it is.

    The same random hidden states go through `LossModule` and through whatever transformers applies after the decoder.
    The decoder itself stays on the meta device: only the weights after it are created, for a small vocabulary.
    """
    try:
        module_loss, logits_loss = _losses(model)
    except Exception as error:
        # An unusual architecture may fail anywhere, with any exception.
        difference = f"they cannot be compared, {type(error).__name__}: {' '.join(str(error).split())}"
    else:
        # Summation order may make that difference in fp32; a softcap of 50 makes ten times as much.
        if abs(module_loss - logits_loss) <= 1e-4 * abs(logits_loss):
            return None
        difference = f"with random values a loss of {logits_loss:.4f} nats instead of {module_loss:.4f}"
    kind = model.config["model_type"]
    return (
        f"{model.name} would be trained with a loss other than its own: transformers computes something else from the "
        f"hidden states of a {kind} decoder than autofit does ({difference})"
    )


class _Decoded:
    """Stands in for a decoder's output: only the hidden states are set, every other attribute is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


@torch.no_grad()
def _losses(model: Model) -> tuple[float, float]:
    """The mean loss that `LossModule` computes, and the mean loss of transformers' logits."""
    generator = torch.Generator().manual_seed(0)
    causal_lm = _meta_model(model)
    module = LossModule(causal_lm, full_cross_entropy)
    _fill(causal_lm, generator, but=module.decoder)
    tokens = torch.randint(ROWS, (2, 8), generator=generator)
    labels = torch.randint(ROWS, (2, 8), generator=generator)
    width = causal_lm.get_output_embeddings().weight.shape[-1]
    hidden = torch.randn(*tokens.shape, width, generator=generator)

    def decode(*args: torch.Tensor, **kwargs: Any) -> _Decoded:
        if not torch.equal(args[0] if args else kwargs["input_ids"], tokens):
            raise ValueError("its decoder is given other tokens")
        return _Decoded(hidden)

    for part in _wrapped(module.decoder):
        part.forward = decode
    module_loss = module(tokens, labels) / labels.numel()
    logits = causal_lm(input_ids=tokens, use_cache=False).logits
    return float(module_loss), float(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def _wrapped(decoder: nn.Module) -> Iterator[nn.Module]:
    """The decoder, and what it merely wraps, as in OPT: `LossModule` calls the first, transformers maybe the second."""
    yield decoder
    children = list(decoder.children())
    if len(children) == 1 and not decoder._parameters:
        yield from _wrapped(children[0])


@errors_only()
def _meta_model(model: Model) -> Any:
    """The causal language model with a small vocabulary, on the meta device."""
    from transformers import AutoModelForCausalLM

    config = architecture(model)
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = ROWS, 0
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _fill(causal_lm: nn.Module, generator: torch.Generator, *, but: nn.Module) -> None:
    """Give all tensors of `causal_lm` random values on the CPU, except those in its submodule `but`."""
    excluded = set(but.modules())
    for module in causal_lm.modules():
        if module not in excluded:
            kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in kinds:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = _random_like(tensor, generator)


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # Logits so wide that softcaps, which are 15 or more, have an effect.
    std = 5.0 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 1.0
    values = torch.randn(tensor.shape, generator=generator) * std
    return nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values
