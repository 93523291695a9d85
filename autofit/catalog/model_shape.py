"""What an architecture amounts to in numbers: the counts that memory floors and FLOP formulas need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
MOST_LAYERS = 10_000
"""Ten times as many as any published model has: building more would take minutes, for nothing but a slip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts of one architecture. Parameters are counted as numbers, not bytes, and shared ones once."""

    layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    attention_width: int
    """Query heads times head dimension: the width of attention's inner products; often, not always, `hidden_size`.
    Where it differs between layers (Gemma 4), their mean, rounded down; 0 for a model without attention."""
    vocabulary_size: int
    """Rows of the input embedding."""
    parameters: int
    """All distinct parameters."""
    embedding_parameters: int
    """Those of the input embedding."""
    tied_embeddings: bool
    """Whether the output head is the input embedding."""
    head_bias: bool
    """Whether the output head has a bias."""
    sdpa: bool
    """Whether torch's fused attention computes this architecture's attention."""
    linear_parameters: int
    """Weights (not biases) of all `nn.Linear` inside decoder layers: what 4-bit quantisation replaces. The output
    head is not among them, nor are experts, which transformers keeps as stacked tensors."""
    experts: int
    """Routed experts per mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int
    """Routed experts that work on one token; 0 for a dense model."""
    expert_parameters: int
    """Those of all routed experts of all layers; 0 for a dense model."""
    active_matmul_parameters: int
    """Weights that one token is multiplied with: every matrix, the output head among them, of the routed experts only
    the chosen share; not the look-up in the input embedding, norms or biases. The N of 6N in FLOP formulas."""
    checkpointable: bool = True
    """Whether transformers can recompute the activations of its layers in the backward pass."""
    dropout: bool = False
    """Whether it drops activations at random in training, by itself (`drops_out`)."""


def drops_out(config: Any) -> bool:
    """Whether the text model of a transformers config drops activations at random in training, or jitters them, so that
    its loss is not that of evaluation: GPT-2's `attn_pdrop`, OPT's `dropout`, PhiMoE's `router_jitter_noise`. Not what
    heads for other tasks would: GPT-NeoX's `classifier_dropout`, GPT-2's `summary_first_dropout`."""
    fields = config.get_text_config().to_dict().items()
    random, other_heads = ("drop", "jitter"), ("classif", "summary")
    return any(
        isinstance(value, float) and value > 0 and any(w in name for w in random) and not name.startswith(other_heads)
        for name, value in fields
    )


def measure(config: PretrainedConfig, origin: str) -> ModelShape:
    """The shape of the causal language model of `config`, built on the meta device: no memory, a fraction of a second.

    Raises `UsageError`, naming `origin`, if no model can be built from `config`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    try:
        layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 0
        if layers > MOST_LAYERS:
            raise ValueError(f"it has {layers:,} layers, and {MOST_LAYERS:,} are the most")
        with torch.device("meta"):
            model = factory.from_config(config)
        return _counted(model, config)
    except Exception as error:
        # Inconsistent fields surface anywhere in a model's constructor, as whatever exception arises there; and some
        # architectures lack what others all have (BLT's config has no hidden_size).
        raise UsageError(f"{origin}: no model can be built from it: {' '.join(str(error).split())}") from error


def _counted(model: Any, config: Any) -> ModelShape:
    from transformers.modeling_layers import GradientCheckpointingLayer

    text = config.get_text_config()
    embedding = model.get_input_embeddings().weight
    for what, size in (("layers", text.num_hidden_layers), ("tokens in its vocabulary", embedding.shape[0])):
        if size < 1:
            raise ValueError(f"it has {size} {what}")
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    parameters = dict(model.named_parameters())
    routed = {name for name in parameters if "experts" in name.split(".")}
    experts = _first(text, _EXPERT_COUNTS) if routed else 0
    per_token = (_first(text, _EXPERTS_PER_TOKEN) or experts) if experts else 0
    expert_parameters = sum(parameters[name].numel() for name in routed)
    matrices = sum(p.numel() for name, p in parameters.items() if p.dim() >= 2 and name not in routed)
    lookup = 0 if tied else embedding.numel()
    return ModelShape(
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        attention_width=_attention_width(text),
        vocabulary_size=embedding.shape[0],
        parameters=sum(p.numel() for p in parameters.values()),
        embedding_parameters=embedding.numel(),
        tied_embeddings=tied,
        head_bias=getattr(head, "bias", None) is not None,
        # Fused kernels have no softcap; releases of transformers before 5.23 would leave it out in silence.
        sdpa=bool(getattr(model, "_supports_sdpa", False)) and not getattr(text, "attn_logit_softcapping", None),
        linear_parameters=_linear_weights(model, text.num_hidden_layers),
        experts=experts,
        experts_per_token=per_token,
        expert_parameters=expert_parameters,
        active_matmul_parameters=matrices - lookup + (expert_parameters * per_token // experts if experts else 0),
        checkpointable=any(isinstance(m, GradientCheckpointingLayer) for m in model.modules()),
        dropout=drops_out(config),
    )


def _attention_width(text: Any) -> int:
    """Query heads times head dimension, the mean over layers where transformers says that they differ."""

    def width(layer: Any) -> int:
        heads = int(getattr(layer, "num_attention_heads", None) or 0)
        return heads * int(getattr(layer, "head_dim", None) or text.hidden_size // max(heads, 1))

    # A config whose layers differ refuses to name what differs.
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    return sum(width(layer) for layer in layers) // len(layers)


def _linear_weights(model: nn.Module, layers: int) -> int:
    """Weights of `nn.Linear` in the stack of decoder layers, which is the list with one module per layer."""
    from torch import nn

    stack = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers), nn.ModuleList())
    return sum(m.weight.numel() for m in stack.modules() if isinstance(m, nn.Linear))


def _first(config: Any, keys: tuple[str, ...]) -> int:
    """The first of `keys` that `config` has a number for; 0 if none."""
    return next((int(value) for key in keys if isinstance(value := getattr(config, key, None), int)), 0)
