"""Which layers are checkpointed, and which of their results are kept. Exported scripts hold the contexts verbatim."""

from __future__ import annotations

from typing import Any

from autofit.core.lattice import Config

SAVE_ATTENTION = "save-attention"
SELECTIVE = (SAVE_ATTENTION, "selective")
"""The values of `checkpointing` under which a layer is recomputed operation by operation, and some results are kept."""
BUDGETS = {"budget-75": 0.75, "budget-50": 0.5, "budget-25": 0.25}
"""The share that a compiled layer may keep of what `none` keeps of it, its inputs and weights left aside."""


def interval(config: Config) -> int:
    """Every how many decoder layers one is checkpointed, beginning with the first; 0 where none is."""
    value = config.text("checkpointing")
    if value == "none" or value in BUDGETS:
        return 0
    return int(value.removeprefix("every-")) if value.startswith("every-") else 1


def budget(config: Config) -> float:
    """The share of its activations that a compiled layer may keep: 1 where torch chooses freely."""
    return BUDGETS.get(config.text("checkpointing"), 1.0)


def keeps_results(config: Config) -> bool:
    """Whether checkpointing is selective."""
    return config["checkpointing"] in SELECTIVE


def selective_contexts(*, products: bool = True, adapters: bool = False) -> Any:
    """Contexts for a checkpoint that keeps the output of attention and, with `products`, of every second product with a
    weight.

    Both are torchtitan's policy: about half of the arithmetic for a third of the memory. Attention alone is trl's: its
    time grows with the square of the sequence, and its output is about as small as a layer's input. With `adapters` the
    base is frozen, and products with an adapter's weight are neither kept nor counted: they are cheap to recompute, and
    their outputs can be as large as the base's.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    attention = {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_scaled_dot_product_attention_math_for_mps",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
    # The position of the weight among each product's arguments.
    weight_of = {"aten::mm": 1, "aten::addmm": 2, "aten::_grouped_mm": 1, "bitsandbytes::gemm_4bit": 1}
    counts = {False: 0, True: 0}  # of products in the forward pass, and in its recomputation

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        name = operation.name()
        if name in attention:
            return CheckpointPolicy.MUST_SAVE
        if not products or name not in weight_of or (adapters and is_trained(args[weight_of[name]])):
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += 1
        odd = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def is_trained(weight: Any) -> bool:
    """Whether `weight` is a trained parameter, transposed or in another format.

    An expert's weight with an adapter's added needs a gradient, too, but comes from both: it is the base's.
    """
    if not weight.requires_grad:
        return False
    node = weight.grad_fn
    while node is not None and node.next_functions:
        if len(node.next_functions) > 1:
            return False
        node = node.next_functions[0][0]
    return True
