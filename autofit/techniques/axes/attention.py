"""The attention kernel: the axis, and which of torch's runs."""

from __future__ import annotations

from typing import Any

from autofit.catalog.models import shape
from autofit.core.device.hardware import compute_capability
from autofit.core.lattice import Axis, Config, chain
from autofit.techniques import attention_kernels as kernels
from autofit.techniques.axes.batching import packs, separates_sequences
from autofit.techniques.axes.precision import product_format
from autofit.techniques.habits import widens_attention
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Part, Technique

IMPLEMENTATIONS = {"sdpa": "sdpa", "efficient": "repeated_keys", "flash": "flash_attention_2", "eager": "eager"}
"""transformers' names for them; that of `efficient` is ours (`register_repeated_keys`)."""


class Attention(Technique):
    """The kernel. With keys and values repeated for the heads that share them, torch has more of them (`efficient`)."""

    axis = Axis(
        name="attention",
        values=("efficient", "sdpa", "flash", "eager"),
        recipe="sdpa",
        lighter=frozenset({*chain("efficient", "sdpa", "eager"), ("flash", "eager")}),
        does="The attention kernel.",
        meanings={
            "sdpa": "torch's choice of kernel; most models",
            "efficient": "sdpa with keys repeated for all heads; where sdpa has no fused kernel: fp32, T4, V100",
            "flash": "the flash-attn package; NVIDIA GPUs from Ampere on and AMD's, in 16 bits",
            "eager": "all scores in memory",
        },
    )
    parts = frozenset({Part.DECODER, Part.EVALUATION})

    def unsupported(self, config: Config, job: Job) -> str | None:
        value = config["attention"]
        if value in _SDPA and not shape(job.model).sdpa:
            return (
                f"attention={value} is unavailable for {job.model.name}: no fused kernel computes its layers, "
                "use attention=eager"
            )
        if value == "efficient":
            return _why_not_repeat(config, job)
        if value != "flash":
            return None
        if job.hardware.kind != "cuda":
            return "attention=flash needs a CUDA device"
        if job.stack.flash_attn is None:
            return "attention=flash needs the flash-attn package, which is not installed here; sdpa has the same kernel"
        if product_format(config) == "fp32":
            return "attention=flash computes in 16 bits only"
        if (compute_capability(job.hardware.capability) or 8.0) < 8.0:  # AMD's never are
            return f"attention=flash needs compute capability 8.0, {job.hardware.name} has {job.hardware.capability}"
        return None

    def plan(self, plan: BuildPlan) -> None:
        plan.attention = IMPLEMENTATIONS[plan.config.text("attention")]
        if plan.config["attention"] == "efficient":
            register_repeated_keys(plan.attention)


_SDPA = ("sdpa", "efficient")
_ALL_WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2")
"""Architectures of which every layer has the config's `sliding_window` if any has."""


def keeps_scores(config: Config, job: Job) -> bool:
    """Whether some layer keeps its attention scores: no fused kernel computes them block by block."""
    model = shape(job.model)
    if config["attention"] not in _SDPA or job.hardware.kind != "cuda" or not model.attention_heads:
        return config["attention"] == "eager"
    width, masked = model.attention_width // model.attention_heads, _is_masked(config, job)
    kernel = kernels.attention_kernel(
        number_format=attention_format(config, job),
        width=width,
        value_width=width,
        # Beside a mask, transformers repeats keys (`use_gqa_in_sdpa` of integrations/sdpa_attention.py).
        grouped=config["attention"] == "sdpa" and model.key_heads != model.attention_heads and not masked,
        masked=masked,
        capability=job.hardware.capability,
    )
    return kernel is kernels.Attention.MATH


def attention_format(config: Config, job: Job) -> str:
    """The number format of the keys and values that reach torch's attention: that of products, unless the trainer has
    wider ones and no autocast to narrow them."""
    return "fp32" if widens_attention(config, job) else product_format(config)


def _is_masked(config: Config, job: Job) -> bool:
    """Whether every layer has a mask beside causality: of sequences kept apart, of padding, or of a window."""
    pads = job.workload.masks_padding and not packs(config) and config["micro_batch"] != 1
    window = job.model.config.get("sliding_window") if job.model.config["model_type"] in _ALL_WINDOWED else None
    return separates_sequences(config) or pads or (window is not None and window <= job.workload.seq_len)


def _why_not_repeat(config: Config, job: Job) -> str | None:
    """Why keys need not be repeated, or why that is of no help."""
    place = f"in {'fp32' if widens_attention(config, job) else config['precision']} on {job.hardware.name}"
    if job.hardware.kind != "cuda":
        return f"attention=efficient is for NVIDIA and AMD GPUs, not for {job.hardware.name}: use sdpa"
    if not keeps_scores(config.replace(attention="sdpa"), job):
        return f"attention=efficient is of no use {place}: sdpa has a fused kernel there"
    if keeps_scores(config, job):
        return f"attention=efficient is of no use {place}: torch has no fused kernel there, use sdpa"
    return None


def register_repeated_keys(name: str) -> None:
    """Has transformers know, under `name`, sdpa attention whose keys and values are repeated for the heads that share
    them.

    transformers leaves that to torch where there is no mask, and torch has no fused kernel for shared keys in fp32 or
    before compute capability 8.0: it then keeps the scores of all pairs of tokens.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        heads = query.shape[1] // key.shape[1]
        options.setdefault("is_causal", getattr(module, "is_causal", True))
        key, value = repeat_kv(key, heads), repeat_kv(value, heads)
        return sdpa_attention_forward(None, query, key, value, attention_mask, **options)  # no module that shares keys

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
