"""Tiny real architectures, and the training steps that tests build from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autofit.catalog import models as catalog
from autofit.catalog.models import Model
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import EnvironmentLacks
from autofit.core.lattice import Config, Value
from autofit.core.workload import Workload
from autofit.techniques import Job, complete
from autofit.techniques.technique import BuildPlan
from autofit.training.build import build, make_plan
from autofit.training.step import TrainingStep
from autofit.trial.machine.detection import detect

CPU = torch.device("cpu")
SEQ_LEN = 16
GLOBAL_BATCH = 4
VOCABULARY = 512

# Weights large enough that attention is not uniform and softcaps bend the logits: with transformers' 0.02, a wrong
# mask or a forgotten cap would vanish in the noise.
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model(model_type: str, **fields: Any) -> Model:
    """An architecture of `model_type` with tiny dimensions and the given fields."""
    config = {"model_type": model_type, **_COMMON, **fields}
    return Model(name=f"tiny-{model_type}", config=config, source="a test", parameters=None)


LLAMA = model("llama", tie_word_embeddings=False)
"""Grouped-query attention (4 heads, 2 key-value heads), an untied output head."""
LLAMA_TIED = model("llama", tie_word_embeddings=True)
QWEN2 = model("qwen2", tie_word_embeddings=True)
"""Has biases on q, k and v."""
GEMMA2 = model(
    "gemma2",
    num_hidden_layers=2,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"],
    query_pre_attn_scalar=16,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=2.0,
)
"""Softcapped attention scores and logits, a sliding window on every other layer, tied embeddings."""
QWEN3_MOE = model(
    "qwen3_moe",
    num_hidden_layers=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)
COHERE = model("cohere", num_hidden_layers=2, logit_scale=0.25)
"""Multiplies the logits."""
GRANITE = model("granite", num_hidden_layers=2, logits_scaling=4.0, tie_word_embeddings=False)
"""Divides the logits."""
PHI = model("phi", num_hidden_layers=2, tie_word_embeddings=False)
"""Its output head has a bias."""
GPT2 = Model(
    name="tiny-gpt2",
    config={
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 256,
    },
    source="a test",
    parameters=None,
)  # fmt: skip
"""Projects with Conv1D in place of Linear, and drops a tenth of its activations."""
CTRL = Model(
    name="tiny-ctrl",
    config={
        "model_type": "ctrl", "n_embd": 64, "dff": 128, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY,
        "n_positions": 256,
    },
    source="a test",
    parameters=None,
)  # fmt: skip
"""Its layers are not of a kind that transformers can checkpoint."""

FAMILIES = {
    "llama": LLAMA,
    "llama-tied": LLAMA_TIED,
    "qwen2": QWEN2,
    "gemma2": GEMMA2,
    "qwen3-moe": QWEN3_MOE,
}


def attention_of(model: Model) -> str:
    """The attention kernel for tests of `model` that are not about the kernel."""
    # SDPA cannot softcap the scores.
    return "eager" if model.config.get("attn_logit_softcapping") else "sdpa"


def shrunk(name: str) -> Model:
    """The catalog's model of that name, with all its particularities, in tiny dimensions."""
    fields = dict(catalog.load(name).config)
    fields.update({k: v for k, v in _COMMON.items() if k != "head_dim" or k in fields})
    fields.update(num_hidden_layers=2)
    smaller = {
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "query_pre_attn_scalar": 16, "max_window_layers": 2, "sliding_window": 8,
    }  # fmt: skip
    fields.update({k: v for k, v in smaller.items() if fields.get(k)})
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][:2]
    return Model(name=f"tiny-{name}", config=fields, source="a test", parameters=None)


def shallow(name: str, layers: int) -> Model:
    """The catalog's model of that name with so many decoder layers, each as large as the model's own."""
    of = catalog.load(name)
    return replace(of, name=f"{name}-{layers}-layers", config={**of.config, "num_hidden_layers": layers})


def one_of_each_architecture() -> list[str]:
    """For every architecture in the catalog, the first model name."""
    first: dict[str, str] = {}
    for name in catalog.names():
        first.setdefault(catalog.load(name).config["model_type"], name)
    return sorted(first.values())


CPU_HARDWARE = Hardware(
    name="cpu-test", kind="cpu", device_name="a processor", memory_bytes=2**34, cores=2, host_memory_bytes=2**34
)
CUDA_HARDWARE = Hardware(
    name="h100-80g",
    kind="cuda",
    device_name="NVIDIA H100",
    memory_bytes=80 * 2**30,
    capability="9.0",
    peak_flops=989e12,
)
STACK = Stack(python="3.11", torch="2.13.0", transformers="5.23.0", peft="0.21.2", bitsandbytes="0.50.2")
FSDP_TAKES_QLORA = replace(STACK, torch=torch.__version__).torch_release >= (2, 12)
"""Of the torch that is installed."""


@cache
def machine() -> tuple[torch.device, Hardware, Stack]:
    """The device on which tests of training itself train, its hardware and libraries: the GPU of this machine where
    there is one that the installed torch can use, else the CPU. DeepSpeed, which needs a process group, is left out."""
    try:
        hardware, stack = detect()
    except EnvironmentLacks:
        return CPU, CPU_HARDWARE, STACK
    if hardware.kind != "cuda":
        return CPU, CPU_HARDWARE, STACK
    return torch.device("cuda", 0), hardware, replace(stack, deepspeed=None)


def draws_alike(device: torch.device = CPU) -> bool:
    """Whether a seed gives the same random weights in bf16 as in fp32, up to rounding: with torch 2.11 it does not."""
    drawn = [
        torch.empty(64, dtype=d, device=device).normal_(generator=torch.Generator(device).manual_seed(0))
        for d in (None, torch.bfloat16)
    ]
    return torch.equal(drawn[0].bfloat16(), drawn[1])


def job(
    model: Model = LLAMA,
    *,
    hardware: Hardware = CPU_HARDWARE,
    stack: Stack = STACK,
    seq_len: int = SEQ_LEN,
    global_batch: int = GLOBAL_BATCH,
    **workload: Any,
) -> Job:
    """A job that trains `model` on short sequences."""
    asked = Workload(
        model=model.name, model_digest=model.digest, seq_len=seq_len, global_batch=global_batch, **workload
    )
    return Job(model=model, workload=asked, hardware=hardware, stack=stack)


def config(**values: Value) -> Config:
    """A complete config; axes not given are as in the plain recipe."""
    return complete(values)


def plan(config: Config, model: Model = LLAMA) -> BuildPlan:
    """What the techniques of `config` decide for a CPU."""
    return make_plan(config, job(model), CPU)


def built(
    config: Config, model: Model = LLAMA, *, seed: int = 0, device: torch.device = CPU, **job_options: Any
) -> TrainingStep:
    """The training step of `config` on `device`, with the same weights whenever the shapes are the same. Further
    options are those of `job`."""
    torch.manual_seed(seed)
    return build(config, job(model, **job_options), device)


def rows(count: int = GLOBAL_BATCH, *, seq_len: int = SEQ_LEN, seed: int = 1) -> torch.Tensor:
    """Random tokens [count, seq_len], every sequence different."""
    return torch.randint(VOCABULARY, (count, seq_len), generator=torch.Generator().manual_seed(seed))


def stir_adapters(step: TrainingStep) -> None:
    """Give the adapters' B matrices random values: while B is zero, A has no gradient to compare."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in step.module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def accumulate(step: TrainingStep, tokens: torch.Tensor) -> float:
    """The forward and backward passes of one optimizer step, without the update; the mean loss in nats per token."""
    micro_batches = list(step.split(tokens))
    targets = sum(int((labels >= 0).sum()) for _, labels in micro_batches)
    last = len(micro_batches) - 1
    losses = [step.micro_step(i, t, targets, last=n == last) for n, (i, t) in enumerate(micro_batches)]
    return float(sum(losses))


def gradients(step: TrainingStep) -> dict[str, torch.Tensor]:
    """Every existing gradient, in fp32 and without the loss scale, by the parameter's name in a LossModule."""
    scale: float = step.engine._scaler.get_scale()  # type: ignore[attr-defined]
    named = step.module.named_parameters()
    return {name: p.grad.float() / scale for name, p in named if p.grad is not None}


def relative_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of the expected values, over all tensors together."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (difference / sum(float(t.square().sum()) for t in expected.values())) ** 0.5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread: tiny matrix products on several threads mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def forgetful_bitsandbytes() -> Iterator[None]:
    """Reset bitsandbytes' singleton, which keeps overrides of optimizer states by the parameters' positions."""
    yield
    if "bitsandbytes" in sys.modules:
        sys.modules["bitsandbytes"].optim.GlobalOptimManager._instance = None
