"""An architecture in numbers: the counts that memory lower bounds and FLOP formulas need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.catalog.quiet import errors_only
from autofit.core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"
_SLIDING = ("sliding_attention", "chunked_attention", "hybrid_sliding")
_NOT_QUADRATIC = ("linear_attention", "conv", "mamba", "recurrent", "mlp", "moe")
"""Types of layers, in transformers' words (`layer_types`). Llama 4's chunks count as windows; all other types count as
full attention, those that choose what they attend to among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts of one architecture. Parameters are counted in elements, not bytes, and shared ones only once. The catalog
    leaves out what most architectures have: a dense decoder with full attention."""

    layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    attention_width: int
    """Query heads times head dimension: the width of attention's inner products; often, but not always, `hidden_size`.
    The mean over layers, rounded down, where they differ (Gemma 4); 0 for a model without attention."""
    attention_heads: int
    """Query heads of a layer, each with its own scores; mean and 0 as for `attention_width`."""
    key_heads: int
    """Key heads of a layer: fewer than query heads where several of these share one."""
    full_attention_layers: int
    """Layers whose tokens attend to all that came before."""
    sliding_layers: int = 0
    """Layers whose tokens attend to the last `sliding_window` alone. What is left has linear attention or none."""
    sliding_window: int = 0
    """Tokens; 0 without such layers."""
    vocabulary_size: int
    """Rows of the input embedding."""
    parameters: int
    """All distinct parameters."""
    embedding_parameters: int
    """Parameters of the input embedding."""
    tied_embeddings: bool
    """Whether the output head is the input embedding."""
    head_bias: bool = False
    """Whether the output head has a bias."""
    sdpa: bool = True
    """Whether torch's fused attention kernels can compute this architecture's attention."""
    linear_parameters: int
    """Weights (not biases) of all `nn.Linear` inside decoder layers: what 4-bit quantisation replaces. The output
    head is not included, nor are experts, which transformers keeps as stacked tensors."""
    experts: int = 0
    """Routed experts per mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Routed experts that process each token; 0 for a dense model."""
    expert_parameters: int = 0
    """Parameters of all routed experts of all layers; 0 for a dense model."""
    active_matmul_parameters: int
    """Weights by which each token is multiplied: every matrix, including the output head, but only the chosen share of
    the routed experts; not what embeddings look up, norms or biases. The N of 6N in FLOP formulas."""
    checkpointable: bool = True
    """Whether transformers can recompute its layers' activations in the backward pass."""
    dropout: bool = False
    """Whether the architecture itself drops activations at random in training (`drops_out`)."""


def drops_out(config: Any) -> bool:
    """Whether the text model of a transformers config drops or jitters activations at random in training, so that its
    training loss differs from that in evaluation: GPT-2's `attn_pdrop`, OPT's `dropout`, PhiMoE's
    `router_jitter_noise`. Dropout in heads for other tasks does not count: GPT-NeoX's `classifier_dropout`, GPT-2's
    `summary_first_dropout`."""
    fields = config.get_text_config().to_dict().items()
    random, other_heads = ("drop", "jitter"), ("classif", "summary")
    return any(
        isinstance(value, float) and value > 0 and any(w in name for w in random) and not name.startswith(other_heads)
        for name, value in fields
    )


@errors_only()
def measure(config: PretrainedConfig, origin: str) -> ModelShape:
    """The shape of `config`'s causal language model, built on the meta device in a fraction of a second. Raises
    `UsageError`, naming `origin`, if no model can be built from `config`."""
    import torch
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    try:
        layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 0
        # Ten times as many as any published model has: more can only be a mistake, and would take minutes to build.
        if layers > 10_000:
            raise ValueError(f"it has {layers:,} layers; at most 10,000 are supported")
        with torch.device("meta"):
            model = factory.from_config(config)
        return _shape_of(model, config)
    except Exception as error:
        # Inconsistent fields surface anywhere in a model's constructor, as any kind of exception; and some
        # architectures lack what all others have (BLT's config has no hidden_size).
        raise UsageError(f"{origin}: no model can be built from it: {' '.join(str(error).split())}") from error


def _shape_of(model: Any, config: Any) -> ModelShape:
    from transformers.modeling_layers import GradientCheckpointingLayer

    text = config.get_text_config()
    embedding = model.get_input_embeddings().weight
    for parts, size in (("layers", text.num_hidden_layers), ("tokens in its vocabulary", embedding.shape[0])):
        if size < 1:
            raise ValueError(f"it has {size} {parts}")
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    parameters = dict(model.named_parameters())
    routed = {name for name in parameters if "experts" in name.split(".")}
    experts = _first_integer(text, _EXPERT_COUNTS) if routed else 0
    per_token = (_first_integer(text, _EXPERTS_PER_TOKEN) or experts) if experts else 0
    expert_parameters = sum(parameters[name].numel() for name in routed)
    chosen = expert_parameters * per_token // experts if experts else 0
    matrices = sum(p.numel() for name, p in parameters.items() if p.dim() >= 2 and name not in routed)
    windows = _windows(text)
    layers = [_attention(layer) for layer in _layers(text)]
    heads, key_heads, width = (sum(counts) // len(layers) for counts in zip(*layers, strict=True))
    return ModelShape(
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        attention_width=width,
        attention_heads=heads,
        key_heads=key_heads,
        full_attention_layers=windows[0],
        sliding_layers=windows.total() - windows[0],
        sliding_window=max(windows, default=0),
        vocabulary_size=embedding.shape[0],
        parameters=sum(p.numel() for p in parameters.values()),
        embedding_parameters=embedding.numel(),
        tied_embeddings=tied,
        head_bias=getattr(head, "bias", None) is not None,
        # Fused kernels have no softcap; transformers before 5.23 would silently leave it out.
        sdpa=bool(model._supports_sdpa) and not getattr(text, "attn_logit_softcapping", None),
        linear_parameters=_linear_weights(model, text.num_hidden_layers),
        experts=experts,
        experts_per_token=per_token,
        expert_parameters=expert_parameters,
        active_matmul_parameters=matrices - _looked_up(model, head) + chosen,
        checkpointable=any(isinstance(m, GradientCheckpointingLayer) for m in model.modules()),
        dropout=drops_out(config),
    )


def _looked_up(model: nn.Module, head: Any) -> int:
    """Weights of embeddings, of which each token takes a row; those that are also the output head multiply."""
    from torch import nn

    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(table.numel() for table in tables if head is None or table is not head.weight)


def _windows(text: Any) -> Counter[int]:
    """How many layers attend to so many tokens at most; 0 stands for all that came before."""
    layers = _layers(text)
    windows = [_first_integer(layer, ("sliding_window", "attention_chunk_size")) for layer in layers]
    types = getattr(text, "layer_types", None) or [_SLIDING[0] if window else "full_attention" for window in windows]
    kinds = zip(windows, types, strict=False)
    return Counter({0: 0}) + Counter(
        window * (kind in _SLIDING) for window, kind in kinds if kind not in _NOT_QUADRATIC
    )


def _layers(text: Any) -> list[Any]:
    """The config of each layer. One whose layers differ refuses to give the fields that differ."""
    return list(text.per_layer_config) if text.is_heterogeneous else [text] * text.num_hidden_layers


def _attention(layer: Any) -> tuple[int, int, int]:
    """A layer's query heads, its key heads, and its query heads times head dimension: where keys are wider than values
    (DeepSeek's latent attention), times the mean of the two."""
    heads = _first_integer(layer, ("num_attention_heads",))
    key_heads = _first_integer(layer, ("num_key_value_heads",)) or heads
    if getattr(layer, "qk_nope_head_dim", None):
        width = int(heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim)) // 2
    else:
        width = heads * (_first_integer(layer, ("head_dim",)) or layer.hidden_size // max(heads, 1))
    return heads, key_heads, width


def _linear_weights(model: nn.Module, layers: int) -> int:
    """Weights of `nn.Linear` in the stack of decoder layers: the `ModuleList` with one module per layer."""
    from torch import nn

    stack = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers), nn.ModuleList())
    return sum(m.weight.numel() for m in stack.modules() if isinstance(m, nn.Linear))


def _first_integer(config: Any, keys: tuple[str, ...]) -> int:
    """The value of the first of `keys` for which `config`, or its part on feed-forward layers (DBRX), has an integer or
    one for each layer (Hunyuan), whose first counts; 0 if there is none."""
    for part in (config, getattr(config, "ffn_config", None)):
        for key in keys:
            value = getattr(part, key, None)
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, int):
                return first
    return 0
