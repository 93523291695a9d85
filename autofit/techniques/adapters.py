"""LoRA adapters, added by peft to a model that is still on the meta device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from autofit.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from autofit.techniques.technique import Plan


def alpha(rank: int) -> int:
    """LoRA's scaling numerator. Twice the rank, a common choice; it changes neither memory nor speed."""
    return 2 * rank


def attention_projections(model: Any) -> list[str]:
    """Last name components of the Linear layers inside attention modules: q_proj, k_proj, v_proj, o_proj in Llama."""
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


def add(model: Any, plan: Plan) -> Any:
    """`model` with frozen base weights and trainable adapters of `plan.trained_dtype`, all on the meta device."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    targets = attention_projections(model) if plan.targets == "attention" else "all-linear"
    rank = cast(int, plan.rank)
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha(rank),
        lora_dropout=plan.lora_dropout,
        target_modules=targets,
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
            module.lora_A.to(plan.trained_dtype)
            module.lora_B.to(plan.trained_dtype)
    return wrapped


def initialise(model: Any, whole: Callable[[Iterable[nn.Module]], AbstractContextManager[None]]) -> None:
    """Give adapters their usual start, A random and B zero: peft could not, on the meta device.

    Inside of `whole`, what modules hold is whole, where it is sharded.
    """
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            for name in module.lora_A:
                with whole((module.lora_A[name], module.lora_B[name])):
                    module.reset_lora_parameters(name, True)
