"""The sizes at which a probe measures: those of a model's own layers."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.catalog.model_shape import ModelShape
from autofit.core.device.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Widths of one decoder layer and of the head."""

    hidden: int
    feed_forward: int
    """Inner width of the feed-forward block; of a mixture of experts, that of a dense block as large as the layer."""
    heads: int
    """Query heads; at least 1."""
    head_width: int
    vocabulary: int

    @classmethod
    def of(cls, shape: ModelShape) -> Shapes:
        """Those of an architecture."""
        heads = max(shape.attention_heads, 1)
        width = max(shape.attention_width // heads, 16)
        attention = 2 * shape.hidden_size * (shape.attention_width + width * shape.key_heads)
        left = shape.linear_parameters // max(shape.layers, 1) - attention
        inner = left // (3 * shape.hidden_size)  # gate, up and down
        return cls(
            hidden=shape.hidden_size,
            feed_forward=inner if inner >= shape.hidden_size else 4 * shape.hidden_size,
            heads=heads,
            head_width=width,
            vocabulary=shape.vocabulary_size,
        )


def usual_format(hardware: Hardware) -> str:
    """The number format in which a device mostly trains."""
    if hardware.kind == "cpu":
        return "fp32"
    return "bf16" if hardware.bf16 else "fp16"


def usual_model(kind: str) -> str:
    """The model at whose shapes a kind of device is probed if nobody names another."""
    return "smollm2-135m" if kind == "cpu" else "llama-3.1-8b"
