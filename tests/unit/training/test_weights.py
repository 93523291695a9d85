"""Random weights on the device: as transformers would make them, without ever making them elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from autofit.catalog.models import Model, architecture, load
from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.techniques.adapters import unwrap
from autofit.training.build import make_plan, make_skeleton
from autofit.training.weights import materialise
from tests.tiny import (
    CPU,
    GEMMA2,
    LLAMA,
    LLAMA_TIED,
    QWEN2,
    QWEN3_MOE,
    attention_of,
    built,
    config,
    job,
    model,
    one_of_each_architecture,
    plan,
    shrunk,
)

EVERY = pytest.mark.parametrize("name", one_of_each_architecture())
DTYPES = {"bf16": torch.bfloat16, "bf16-mixed": torch.float32, "fp16-mixed": torch.float32, "fp32": torch.float32}


def materialised(config: Config, model: Model) -> Any:
    """The model of `config` with its weights, and nothing else of a training step."""
    made = make_skeleton(make_plan(config, job(model), CPU))
    torch.manual_seed(0)
    materialise(made, device=CPU)
    return made


def direct(model: Model, dtype: torch.dtype) -> Any:
    """The same model as transformers builds it on the CPU."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(architecture(model), dtype=dtype, attn_implementation=attention_of(model))


@EVERY
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_parameters_and_buffers_are_those_of_a_model_built_on_the_cpu(name: str, precision: str) -> None:
    tiny = shrunk(name)
    ours = materialised(config(precision=precision, attention=attention_of(tiny)), tiny)
    theirs = direct(tiny, DTYPES[precision])
    result, expected = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert list(result) == list(expected)
    for key, parameter in expected.items():
        assert (result[key].shape, result[key].dtype) == (parameter.shape, parameter.dtype), key
        assert result[key].device == CPU
        assert result[key].requires_grad
        assert result[key].is_contiguous()


@pytest.mark.parametrize(
    "tiny",
    [
        *(shrunk(name) for name in one_of_each_architecture()),
        # these have masks and tables of positions
        model("gpt2", n_positions=64),
        model("gpt_neox"),
        model("gptj", rotary_dim=16, n_positions=64),
    ],
    ids=lambda tiny: tiny.name,
)
def test_buffers_hold_the_values_of_a_model_built_on_the_cpu(tiny: Model) -> None:
    ours = materialised(config(precision="fp32", attention="eager"), tiny)
    theirs = AutoModelForCausalLM.from_config(architecture(tiny), dtype=torch.float32, attn_implementation="eager")
    result, expected = dict(ours.named_buffers()), dict(theirs.named_buffers())
    assert list(result) == list(expected)
    for key, buffer in expected.items():
        assert result[key].dtype == buffer.dtype, key
        assert torch.equal(result[key], buffer), key


def test_constants_that_nothing_restores_are_refused() -> None:
    with pytest.raises(UsageError, match=r"a constant that transformers does not restore: .*act_fn"):
        materialised(config(precision="fp32", attention="eager"), model("apertus"))


@EVERY
def test_values_spread_as_those_of_a_model_built_on_the_cpu(name: str) -> None:
    tiny = shrunk(name)
    ours = dict(materialised(config(precision="fp32", attention=attention_of(tiny)), tiny).named_parameters())
    for key, parameter in direct(tiny, torch.float32).named_parameters():
        result, expected = ours[key].detach(), parameter.detach()
        if float(expected.std()) == 0.0:  # norms and biases
            assert torch.equal(result, expected), key
        else:
            # five standard errors of a normal sample's mean and deviation
            error = 5 / expected.numel() ** 0.5
            assert float(result.std()) == pytest.approx(float(expected.std()), rel=error), key
            assert float(result.mean()) == pytest.approx(0.0, abs=error * float(expected.std())), key


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("tiny", [LLAMA, LLAMA_TIED, QWEN2, GEMMA2], ids=lambda tiny: tiny.name)
def test_nothing_is_left_on_the_meta_device(method: str, tiny: Model) -> None:
    made = materialised(config(method=method, attention=attention_of(tiny)), tiny)
    tensors = [*made.parameters(), *made.buffers()]
    assert not any(t.is_meta for t in tensors)
    assert all(t.isfinite().all() for t in tensors if t.is_floating_point())


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_tied_weights_stay_one_tensor_and_untied_ones_two(method: str) -> None:
    tied = unwrap(materialised(config(method=method), LLAMA_TIED))
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    untied = unwrap(materialised(config(method=method), LLAMA))
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight
    assert untied.lm_head.weight.data_ptr() != untied.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("tiny", [LLAMA, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_all_that_full_training_updates_has_the_format_of_the_master_weights(precision: str, tiny: Model) -> None:
    made = materialised(config(precision=precision), tiny)
    assert {p.dtype for p in made.parameters()} == {DTYPES[precision]}
    assert all(p.requires_grad for p in made.parameters())


def test_the_seed_decides_the_weights_whatever_exact_techniques_are_chosen() -> None:
    plain = built(config(), seed=5)
    same = built(config(checkpointing="full", attention="eager", loss="chunked", micro_batch=4), seed=5)
    other = built(config(), seed=6)
    ours, theirs, third = (dict(step.module.named_parameters()) for step in (plain, same, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(torch.equal(ours[name], third[name]) for name in ours if "proj" in name)


class Dtypes(TorchDispatchMode):
    """Notes the largest real tensor of each dtype that any operation makes, and how many random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}
        self.drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.largest[leaf.dtype] = max(self.largest.get(leaf.dtype, 0), leaf.numel())
                if func.overloadpacket.__name__ in ("uniform_", "normal_"):
                    self.drawn += leaf.numel()
        return out


@pytest.mark.parametrize("tiny", [LLAMA, GEMMA2, QWEN3_MOE], ids=lambda tiny: tiny.name)
@pytest.mark.parametrize(("method", "precision"), [("full", "bf16"), ("lora", "bf16-mixed")])
def test_sixteen_bit_weights_do_not_pass_through_wider_ones(tiny: Model, method: str, precision: str) -> None:
    with Dtypes() as made:
        step = built(config(method=method, precision=precision, attention=attention_of(tiny)), tiny)
    adapters = [p.numel() for n, p in step.module.named_parameters() if ".lora_" in n]
    buffers = [b.numel() for b in step.module.buffers()]
    assert made.largest[torch.float32] <= max([*adapters, *buffers])
    assert made.largest[torch.bfloat16] >= 512 * 64


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama-3.1-8b", "full"), ("llama-3.1-8b", "lora"), ("llama-3.1-8b", "qlora"), ("qwen3-30b-a3b", "full")],
)
def test_a_skeleton_of_billions_of_parameters_takes_no_memory_and_no_random_numbers(name: str, method: str) -> None:
    large = load(name)
    requested = config(method=method, precision="bf16")
    decided = plan(requested, large)
    with Dtypes() as made:
        skeleton = make_skeleton(decided)
    assert all(p.is_meta for p in skeleton.parameters())
    # peft may make an adapter before it discards it, but with values that would be seconds lost for every trial
    assert max(made.largest.values(), default=0) <= 8 * 14_336
    assert made.drawn == 0
    adapters = sum(p.numel() for n, p in skeleton.named_parameters() if ".lora_" in n)
    base = {p for n, p in skeleton.named_parameters() if ".lora_" not in n}
    assert sum(p.numel() for p in base) + adapters > 8e9
    if method != "qlora":
        assert sum(p.numel() for p in base) == large.parameters
