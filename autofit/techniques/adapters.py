"""LoRA adapters, which peft adds to a model that is still on the meta device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

from autofit.catalog.models import Model, architecture
from autofit.catalog.quiet import errors_only
from autofit.core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn


def alpha(rank: int) -> int:
    """LoRA's scaling numerator: twice the rank, a common choice that affects neither memory nor speed."""
    return 2 * rank


def unwrap(model: Any) -> Any:
    """The transformers model inside a peft model; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attention_projections(model: Any) -> list[str]:
    """Last components of the names of Linear layers in attention modules: q_proj, k_proj, v_proj, o_proj in Llama."""
    from torch import nn

    names = {
        name.rsplit(".", 1)[-1]
        for module in model.modules()
        if type(module).__name__.endswith("Attention")
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }
    if not names:
        raise UsageError(f"targets=attention: {type(model).__name__} has no Linear layers in attention modules")
    return sorted(names)


def add(model: Any, *, rank: int, targets: str, dropout: float, dtype: torch.dtype) -> Any:
    """`model` with frozen base weights and trainable adapters of `dtype`, all on the meta device; `targets` is a value
    of that axis."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha(rank),
        lora_dropout=dropout,
        target_modules=attention_projections(model) if targets == "attention" else "all-linear",
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.filterwarnings("ignore", message=".*meta.*")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")  # peft's own, for experts
        # low_cpu_mem_usage moves the adapters to the meta device; the context creates them there.
        wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            module.lora_A.to(dtype)
            module.lora_B.to(dtype)
    return wrapped


@cache
@errors_only()
def unsupported(model: Model, targets: str, lora_dropout: float) -> str | None:
    """Why peft cannot add adapters to `model`, in its own words, on one line; None if it can.

    Found by adding them on the meta device: peft goes by its own list of architectures (0.21 refuses some of Mamba's
    projections), which changes from version to version. Also None if peft is not installed here: a machine that trains
    has it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # peft imports bitsandbytes, which then warns about kernels that it could fetch; nothing is computed here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    factory: Any = AutoModelForCausalLM
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # only the trial's build matters
            with torch.device("meta"):
                skeleton = factory.from_config(architecture(model), dtype=torch.bfloat16)
            add(skeleton, rank=8, targets=targets, dropout=lora_dropout, dtype=torch.float32)
    except ImportError:
        return None
    except Exception as error:
        # The adapters' constructors may raise anything.
        return " ".join(str(error).split()) or type(error).__name__
    return None


def initialise(model: Any, whole: Callable[[Iterable[nn.Module]], AbstractContextManager[None]]) -> None:
    """Initialise adapters as usual, A random and B zero, which peft could not do on the meta device.

    `whole` returns a context in which the given modules' sharded parameters are whole.
    """
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            for name in module.lora_A:
                with whole((module.lora_A[name], module.lora_B[name])):
                    module.reset_lora_parameters(name, True)
