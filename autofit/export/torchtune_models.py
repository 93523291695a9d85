"""A model in terms of torchtune's builders, which take its sizes.

Builders and their parameters are those of torchtune 0.6.1: torchtune/models/*/_component_builders.py, and for
checkpoints ModelType in torchtune/training/checkpointing/_utils.py, at github.com/pytorch/torchtune.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.catalog.models import architecture
from autofit.errors import UsageError
from autofit.export.document import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """How torchtune builds a model."""

    package: str
    """Below `torchtune.models`; its builder has the same name, the one with adapters `lora_` before it."""
    checkpoint: str
    """`model_type` of the checkpointer."""
    sizes: Mapping[str, object]

    def component(self, *, adapters: bool) -> str:
        """Its dotted path."""
        return f"torchtune.models.{self.package}.{'lora_' if adapters else ''}{self.package}"


def builder(task: Task) -> Builder:
    """The builder of the task's model; raises `UsageError` for an architecture that torchtune does not have."""
    config = architecture(task.model())
    family = _FAMILIES.get(config.model_type)
    found = None if family is None else family(config)
    if found is None:
        raise UsageError(
            f"torchtune cannot build {task.workload.model!r} ({config.model_type}): it has Llama 3 (with tied "
            "embeddings only where these are Llama 3.2's), Mistral and Qwen 2; export another format, such as trl"
        )
    return found


def _sizes(config: Any) -> dict[str, object]:
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "embed_dim": config.hidden_size,
        "intermediate_dim": config.intermediate_size,
        "max_seq_len": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "rope_base": int(config.rope_parameters["rope_theta"]),
    }


def _usual_heads(config: Any) -> bool:
    """Whether heads are as wide as torchtune takes them to be."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return bool(head * config.num_attention_heads == config.hidden_size)


def _llama(config: Any) -> Builder | None:
    rope = config.rope_parameters
    if config.attention_bias or config.mlp_bias or not _usual_heads(config):
        return None
    scaled = rope["rope_type"] == "llama3"
    scale = {"scale_factor": int(rope["factor"])} if scaled else {}
    if config.tie_word_embeddings:
        if not scaled:
            return None
        return Builder(
            package="llama3_2",
            checkpoint="LLAMA3_2",
            sizes={**_sizes(config), **scale, "tie_word_embeddings": True},
        )
    if not scaled and rope["rope_type"] != "default":
        return None
    return Builder(
        package="llama3_1" if scaled else "llama3",
        checkpoint="LLAMA3",
        sizes={**_sizes(config), **scale},
    )


def _mistral(config: Any) -> Builder | None:
    if not _usual_heads(config) or config.tie_word_embeddings:
        return None
    return Builder(package="mistral", checkpoint="MISTRAL", sizes=_sizes(config))


def _qwen2(config: Any) -> Builder | None:
    if not _usual_heads(config):
        return None
    sizes = {**_sizes(config), "tie_word_embeddings": bool(config.tie_word_embeddings)}
    return Builder(package="qwen2", checkpoint="QWEN2", sizes=sizes)


_FAMILIES: Mapping[str, Callable[[Any], Builder | None]] = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2}
"""By `model_type`; None for a member of the family that torchtune does not have."""
