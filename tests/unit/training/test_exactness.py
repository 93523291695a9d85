"""Every technique, alone and in pairs, really trains; and what is exact trains as the plain recipe does.

On the machine's own device: on a GPU, the techniques that only a GPU has are trained as well.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, partialmethod

import pytest
import torch
from unit.trial.fake_nvml import FakeCard, install

from autofit.catalog.models import Model
from autofit.core.lattice import Axis, Config, Value
from autofit.core.workload import Effect
from autofit.techniques import AXES, complete, unsupported
from autofit.techniques.axes.compilation import missing_tool
from autofit.techniques.axes.update import updates_in_backward
from autofit.techniques.selective import BUDGETS, budget
from autofit.training.loss_module import LossModule
from autofit.trial.machine import detection as site
from tests.tiny import (
    CUDA_HARDWARE,
    FAMILIES,
    GEMMA2,
    LLAMA,
    QWEN3_MOE,
    STACK,
    accumulate,
    attention_of,
    built,
    draws_alike,
    gradients,
    job,
    machine,
    relative_error,
    rows,
    stir_adapters,
)

DEVICE, HARDWARE, LIBRARIES = machine()
STEPS = 3
NUMBERS: dict[str, tuple[Value, ...]] = {"rank": (4, 16), "micro_batch": (1, 2, 4)}
EXACT = ("micro_batch", "checkpointing", "attention", "kernels", "loss", "compile", "offload", "sharding")
"""Axes of which every value is exact: a config and its plain run differ on these alone."""

# Largest relative difference of the losses, and of all gradients together, to the plain run. Only the order of sums
# differs. In fp32 that is a few units in the 24th bit (seen over all configs below: losses 2e-7, gradients 7e-7). In
# 16 bits every activation is rounded, to 8 bits in bf16 and 11 in fp16, and a sum in another order is rounded another
# way: gradients, which pass through every layer twice, then differ by a few units in the last bit (seen: bf16 1.8e-2,
# which is also how far bf16 is from fp32; fp16 an eighth of it), and the loss, a mean over 60 targets, by about a
# thirtieth of that. Pure bf16 rounds the updated weights too. Twice what was seen is allowed; what is wrong is far
# beyond: without one row of four the gradient moves by half of itself.
LOSS_TOLERANCE = {"fp32": 1e-6, "bf16-mixed": 6e-4, "fp16-mixed": 6e-5, "bf16": 1e-3}
GRADIENT_TOLERANCE = {"fp32": 5e-6, "bf16-mixed": 3e-2, "fp16-mixed": 4e-3, "bf16": 4e-2}


@dataclass(frozen=True)
class Trained:
    """What one config's training showed."""

    losses: tuple[float, ...]
    """Before each optimizer step, nats per token."""
    gradient: Mapping[str, torch.Tensor]
    """Of the first step, before its update."""


@cache
def train(config: Config, model: Model) -> Trained:
    """STEPS optimizer steps on one batch of different rows, from weights that depend on shapes alone."""
    step = built(config, model, device=DEVICE, hardware=HARDWARE, stack=LIBRARIES)
    stir_adapters(step)
    tokens = rows().to(DEVICE)
    arrived: dict[str, torch.Tensor] = {}
    for name, parameter in step.module.named_parameters() if updates_in_backward(config) else ():
        parameter.register_hook(partial(arrived.__setitem__, name))  # type: ignore[no-untyped-call]
    first = accumulate(step, tokens)
    gradient = {name: g.float().clone() for name, g in (arrived or gradients(step)).items()}
    step.update()
    return Trained((first, *(float(step.run(tokens)) for _ in range(STEPS - 1))), gradient)


def plain(config: Config, model: Model) -> Config:
    """The same numerics without any technique."""
    exact = {axis.name: axis.recipe for axis in AXES if axis.name in EXACT and axis.recipe is not None}
    if updates_in_backward(config):
        exact["micro_batch"] = config["micro_batch"]
    return complete({**config.to_json(), **exact, "attention": attention_of(model)})


def is_finite(gradient: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in gradient.values())


def check(config: Config, model: Model) -> None:
    """`config` trains, and as its plain run does."""
    result, expected = train(config, model), train(plain(config, model), model)
    assert all(math.isfinite(loss) for loss in result.losses), result.losses
    precision = config.text("precision")
    assert result.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE[precision])
    if precision == "fp16-mixed" and not is_finite(expected.gradient):
        # The first loss scale was too large for this model: the update is skipped and the scale halved.
        assert not is_finite(result.gradient)
        return
    assert is_finite(result.gradient)
    assert relative_error(result.gradient, expected.gradient) < GRADIENT_TOLERANCE[precision]


def values_of(axis: Axis) -> tuple[Value, ...]:
    return axis.values or NUMBERS[axis.name]


def supported(values: Mapping[str, Value], model: Model) -> bool:
    """Whether the values make a config that this machine can train."""
    absent = {"rank", "targets"} if values.get("method", "full") == "full" else set()
    if absent & set(values):
        return False
    requested = complete(values, {"attention": attention_of(model)})
    return unsupported(requested, job(model, hardware=HARDWARE, stack=LIBRARIES)) is None


def singles(model: Model, method: str) -> list[dict[str, Value]]:
    """Each value of each axis that works for `model` and `method`."""
    every: list[dict[str, Value]] = [
        {"method": method, axis.name: value}
        for axis in AXES
        for value in values_of(axis)
        if axis.name != "method" and (axis.name, value) != ("compile", True)
    ]
    return [values for values in every if supported(values, model)]


def covering(model: Model, *, together: int, seed: int, **fixed: Value) -> list[Config]:
    """Configs with the `fixed` values in which every supported combination of values of `together` other axes occurs at
    least once, found greedily."""
    chance = random.Random(seed)
    axes = [axis for axis in AXES if axis.name != "compile"]
    missing = {
        tuple(zip((axis.name for axis in group), values, strict=True))
        for group in itertools.combinations(axes, together)
        for values in itertools.product(*map(values_of, group))
    }
    missing = {one for one in missing if supported(_with_method({**fixed, **dict(one)}), model)}
    result = []
    while missing:
        first = min(missing, key=str)
        best, covered = None, set()
        for _ in range(12):
            values = _with_method({**fixed, **dict(first)})
            for axis in chance.sample(axes, len(axes)):
                choices = () if axis.name in values else chance.sample(values_of(axis), len(values_of(axis)))
                working = next((v for v in choices if supported({**values, axis.name: v}, model)), None)
                if working is not None:
                    values[axis.name] = working
            there = [(axis.name, values[axis.name]) for axis in axes if axis.name in values]
            shown = missing & set(itertools.combinations(there, together))
            if best is None or len(shown) > len(covered):
                best, covered = values, shown
        assert best is not None and covered
        missing -= covered
        result.append(complete(best))
    return result


def _with_method(values: dict[str, Value]) -> dict[str, Value]:
    """`values`, with a method that has its axes."""
    return {"method": "lora", **values} if {"rank", "targets"} & set(values) else dict(values)


def test_the_exact_axes_are_exact_and_the_others_are_not() -> None:
    elsewhere = ("rank", "mlp")  # these sequences have no tiles: test_tiled_mlp.py
    for axis in AXES:
        always_exact = all(effect is Effect.EXACT for effect in axis.effects.values())
        assert always_exact == (axis.name in EXACT) or axis.name in elsewhere


SINGLES = [
    *((family, values) for family, model in FAMILIES.items() for values in singles(model, "full")),
    *(("llama", values) for values in [*singles(LLAMA, "lora"), *singles(LLAMA, "qlora")]),
    *(("qwen3-moe", values) for values in singles(QWEN3_MOE, "lora")),
    *(("gemma2", values) for values in singles(GEMMA2, "qlora")),
]


@pytest.mark.parametrize(
    ("family", "values"),
    SINGLES,
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value,
)
def test_every_value_alone_trains(family: str, values: dict[str, Value]) -> None:
    model = FAMILIES[family]
    # A router's choice of experts flips with the last bit of 16: what is exact is exact in fp32, where a kernel has it.
    precision: dict[str, Value] = {"precision": "fp32"} if supported({"precision": "fp32", **values}, model) else {}
    if model is QWEN3_MOE and not precision:
        pytest.skip("computes in 16 bits only, in which routers choose other experts")
    check(complete({**precision, **values}, {"attention": attention_of(model)}), model)


def test_the_machines_gpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCard("GPU-a"))
    built_for_cuda = site._TorchBuild(version="2.13.0", cuda="13.0", hip=None)
    monkeypatch.setattr(site, "_torch_build", lambda: built_for_cuda)
    device, hardware, _ = machine.__wrapped__()
    assert (device.type, hardware.name) == ("cuda", "h100-80g")


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_on_a_gpu_what_only_a_gpu_has_is_trained(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setitem(globals(), "HARDWARE", CUDA_HARDWARE)
    monkeypatch.setitem(globals(), "LIBRARIES", replace(STACK, liger_kernel="0.8.5", flash_attn="2.8.3"))
    result = singles(LLAMA, method)
    only_there: list[tuple[str, Value]] = [("loss", "fused"), ("kernels", "liger"), ("attention", "flash")]
    for axis, value in (*only_there, ("optimizer", "paged-adamw-8bit")):
        assert {"method": method, axis: value} in result


PAIRS = covering(LLAMA, together=2, seed=0)


@pytest.mark.parametrize("config", PAIRS, ids=str)
def test_every_pair_of_values_trains(config: Config) -> None:
    check(config, LLAMA)


def test_the_pairs_are_all_there() -> None:
    seen = {pair for config in PAIRS for pair in itertools.combinations(config.items, 2)}
    for (a, u), (b, v) in itertools.product(
        [("optimizer", name) for name in ("sgd", "adafactor", "lion-8bit", "adamw-8bit", "lion", "adamw")],
        [("precision", name) for name in ("bf16", "bf16-mixed", "fp16-mixed", "fp32")],
    ):
        assert ((a, u), (b, v)) in seen
    assert (("checkpointing", "selective"), ("method", "qlora")) in seen
    assert (("checkpointing", "every-2"), ("loss", "chunked")) in seen
    assert (("method", "lora"), ("rank", 16)) in seen


@pytest.mark.skipif(not draws_alike(DEVICE), reason="this torch gives 16-bit weights other random values")
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_sixteen_bits_train_as_fp32_does_but_for_their_rounding(method: str, precision: str) -> None:
    values: dict[str, Value] = {"method": method, "micro_batch": 4}
    result = train(complete({**values, "precision": precision}), LLAMA)
    expected = train(complete({**values, "precision": "fp32"}), LLAMA)
    # Pure bf16 rounds the weights themselves at every update.
    assert result.losses == pytest.approx(expected.losses, rel=1e-2 if precision == "bf16" else 5e-3)
    # Random numbers drawn in another format are other numbers: a 4-bit base, and adapters in bf16.
    if method == "full" or (method == "lora" and precision != "bf16"):
        assert relative_error(result.gradient, expected.gradient) < (4e-2 if "bf16" in precision else 5e-3)


LACKING = missing_tool(DEVICE.type)
IN_DECODER = ("method", "precision", "checkpointing", "attention", "loss")
"""Axes that change what is compiled."""


def compiled() -> list[Config]:
    """Few configs with every value of those axes."""
    kept, seen = [], set[object]()
    for config in covering(LLAMA, together=1, seed=0, compile=True):
        new = {(axis, config[axis]) for axis in IN_DECODER} - seen
        if new:
            kept.append(config)
            seen |= new
    return kept


COMPILED = compiled()
BY_INDUCTOR = next(config for config in COMPILED if config["method"] == "lora")
"""As trials are compiled: it has frozen layers, and others in another format."""


@pytest.mark.slow
@pytest.mark.parametrize("config", COMPILED, ids=str)
def test_every_value_trains_compiled_as_it_is_written(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor all but one are compiled without Inductor, whose C++ compiler takes most of the time: what a
    technique meets is how torch traces and differentiates a layer."""
    if DEVICE.type == "cpu" and config != BY_INDUCTOR:
        # A budget is kept where a graph is divided, which the first of these leaves to autograd's own rules.
        backend = "aot_eager" if budget(config) == 1 else "aot_eager_decomp_partition"
        monkeypatch.setattr(LossModule, "compile_layers", partialmethod(LossModule.compile_layers, backend=backend))
    check(config, LLAMA)


@pytest.mark.skipif(LACKING is not None, reason=f"nothing is compiled without {LACKING}")
def test_every_value_is_compiled() -> None:
    seen = {item for config in COMPILED for item in config.items}
    for axis, values in {
        "precision": ("bf16", "bf16-mixed", "fp16-mixed", "fp32"),
        "method": ("full", "lora", "qlora"),
        "checkpointing": ("full", "save-attention", "every-2", "every-4", "selective", *BUDGETS, "none"),
        "loss": ("chunked", "full"),
    }.items():
        assert {(axis, value) for value in values} <= seen
