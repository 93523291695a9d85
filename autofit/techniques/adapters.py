"""LoRA adapters, added by peft to a model that is still on the meta device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from autofit.catalog.models import Model, architecture
from autofit.errors import UsageError
from autofit.techniques.technique import Plan

if TYPE_CHECKING:
    from torch import nn


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


@cache
def why_not(model: Model, targets: str, lora_dropout: float) -> str | None:
    """Why peft has no adapters for `model`, in its own words and one line; None where it has.

    Found by laying them out on the meta device: peft refuses by its own list of architectures (0.21: some of Mamba's
    projections), which changes from version to version. None, too, where it is not installed: who trains has it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # Peft imports bitsandbytes, which warns then of kernels that it could fetch: nothing is computed here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    plan = Plan(device=torch.device("meta"), trained_dtype=torch.float32, compute_dtype=torch.bfloat16)
    plan.rank, plan.targets, plan.lora_dropout = 8, targets, lora_dropout
    factory: Any = AutoModelForCausalLM
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the build that counts is the trial's
            with torch.device("meta"):
                skeleton = factory.from_config(architecture(model), dtype=plan.compute_dtype)
            add(skeleton, plan)
    except ImportError:
        return None
    except Exception as error:
        # The adapters' constructors raise whatever they please.
        return " ".join(str(error).split()) or type(error).__name__
    return None


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
