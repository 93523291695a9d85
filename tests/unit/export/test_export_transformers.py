"""Exported scripts, executed on the installed transformers and peft: the objects are what the config says."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_samples import (
    check_adapter,
    check_batch,
    check_quantisation,
    checkpointing_kwargs,
    imported,
    loaded_format,
    make_config,
    make_recommendation,
)
from transformers import training_args as training_args_module

from autofit.core.frontier import Recommendation
from autofit.core.lattice import Config
from autofit.export import Export, export
from autofit.export.distributed import FIRST_GPU
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.axes.update import updates_in_backward
from autofit.trial.limits.segments import ALLOCATOR

pytestmark = pytest.mark.usefixtures("ampere")

CHECKPOINTING: dict[str, dict[str, Any]] = {
    "full": {"use_reentrant": False},
    "every-2": {"use_reentrant": False, "every_n_layers": 2},
    "every-4": {"use_reentrant": False, "every_n_layers": 4},
    "offload": {"use_reentrant": False, "offload": True},
}


def run(made: Export) -> dict[str, Any]:
    """The script's names, after running it as a module of its own."""
    return imported(made.text)


def make(recommendation: Recommendation, source: str = "org/model") -> Export:
    return export(recommendation, format="transformers", source=source)


def check_training(config: Config, args: Any) -> None:
    # Measured are trials that compile decoder layers alone, and that wait for nothing within a step.
    assert args.torch_compile is False
    assert args.logging_nan_inf_filter is False
    assert (args.max_grad_norm, args.learning_rate) == (0.0 if updates_in_backward(config) else 1.0, None)
    assert args.use_liger_kernel is (config["loss"] == "fused" or by_liger(config))
    assert args.auto_find_batch_size is False
    if args.use_liger_kernel:
        layers = ["rope", "rms_norm", "swiglu", "geglu"] if by_liger(config) else []
        loss = ["fused_linear_cross_entropy"] if config["loss"] == "fused" else []
        assert [k for k, on in args.liger_kernel_config.items() if on] == layers + loss
    if config["checkpointing"] in CHECKPOINTING:
        assert checkpointing_kwargs(args) == CHECKPOINTING[config.text("checkpointing")]


def check_model(config: Config, kwargs: dict[str, Any], *, masters_elsewhere: bool) -> None:
    assert kwargs["dtype"] is getattr(torch, loaded_format(config, masters_elsewhere=masters_elsewhere))
    names = {"flash": "flash_attention_2", "efficient": "repeated_keys"}
    assert kwargs["attn_implementation"] == names.get(config.text("attention"), config["attention"])
    check_quantisation(config, kwargs.get("quantization_config"), kwargs["dtype"])


def test_objects_are_what_the_config_says(sampled: list[Config]) -> None:
    for index, config in enumerate(sampled):
        recommendation = make_recommendation(config, devices=2 if index % 3 else 1, lora_dropout=index % 2 / 10)
        names = run(make(recommendation))
        check_batch(config, names["training_args"], recommendation)
        check_training(config, names["training_args"])
        check_model(config, names["model_kwargs"], masters_elsewhere="DEEPSPEED" in names)
        check_adapter(config, names["peft_config"], recommendation.workload.lora_dropout)
        assert names["SOURCE"] == "org/model"
        assert names["SEQ_LEN"] == 2048


def test_scripts_are_clean(sampled: list[Config], tmp_path: Path) -> None:
    """No unused import, no undefined name."""
    for index, config in enumerate(sampled[:120]):
        made = make(make_recommendation(config, expandable_segments=index % 2 == 0))
        (tmp_path / f"script{index}.py").write_text(made.text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9", "--no-cache", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_folder_for_nvme_must_be_chosen() -> None:
    text = make(make_recommendation(make_config(offload="nvme"))).text
    chosen = text.replace("LEARNING_RATE = None", "LEARNING_RATE = 1e-4")
    with pytest.raises(SystemExit, match="set NVME_FOLDER"):
        imported(chosen)["make_trainer"]([])
    names = imported(chosen.replace("NVME_FOLDER = None", "NVME_FOLDER = '/fast'"))
    zero = names["training_args"].hf_deepspeed_config.config["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "/fast"


@pytest.mark.parametrize("devices", [1, 4])
def test_launcher_starts_a_rank_for_each_device(devices: int) -> None:
    offload = {"offload": "optimizer"} if devices == 1 else {"sharding": "fsdp"}
    text = make(make_recommendation(make_config(**offload), devices=devices)).text
    threads = "OMP_NUM_THREADS=$(nproc) " if devices == 1 else ""
    assert f"# Launch:    {threads}torchrun --nproc-per-node {devices} THIS_FILE TOKENS.pt\n" in text


@pytest.mark.parametrize(("kind", "first"), [("cuda", FIRST_GPU), ("cpu", "OMP_NUM_THREADS=6 ")])
def test_one_device_is_the_one_that_trials_call_the_first(kind: str, first: str) -> None:
    there = make_recommendation()
    there = replace(there, hardware=replace(there.hardware, kind=kind, cores=6))
    assert f"# Launch:    {first}python THIS_FILE TOKENS.pt\n" in make(there).text


@pytest.mark.parametrize(("before", "chosen"), [(None, "0"), ("3", "3"), ("GPU-b,GPU-a", "GPU-b")])
def test_the_first_gpu_is_the_first_that_is_left_visible(before: str | None, chosen: str) -> None:
    outside = {"PATH": os.environ["PATH"], **({} if before is None else {"CUDA_VISIBLE_DEVICES": before})}
    line = f"{FIRST_GPU}printenv CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER"
    printed = subprocess.run(["sh", "-c", line], env=outside, capture_output=True, text=True).stdout
    assert printed.split() == [chosen, "PCI_BUS_ID"]


def test_expandable_segments_come_before_torch() -> None:
    for name in ALLOCATOR:
        os.environ.pop(name, None)
    run(make(make_recommendation()))
    assert not os.environ.keys() & set(ALLOCATOR)
    made = make(make_recommendation(expandable_segments=True))
    run(made)
    assert {os.environ.get(name) for name in ALLOCATOR} == {"expandable_segments:True"}
    assert made.text.rindex("ALLOC_CONF") < made.text.index("import torch")


def test_cpu_is_named_only_where_it_was_the_hardware() -> None:
    gpu = make_recommendation()
    assert "use_cpu" not in make(gpu).text
    cpu = replace(gpu, hardware=replace(gpu.hardware, kind="cpu"))
    assert run(make(cpu))["training_args"].use_cpu is True


def test_older_name_of_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers without activation_checkpointing gets gradient_checkpointing."""
    fields = dict(training_args_module.TrainingArguments.__dataclass_fields__)
    fields.pop("activation_checkpointing", None)
    monkeypatch.setattr(training_args_module.TrainingArguments, "__dataclass_fields__", fields)
    made = make(make_recommendation(make_config(checkpointing="every-2")))
    tree = ast.parse(made.text)
    assert any(isinstance(node, ast.If) for node in tree.body)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(training_args_module.TrainingArguments, "__init__", lambda self, **given: seen.update(given))
    run(made)
    assert seen["gradient_checkpointing"] is True
    assert seen["gradient_checkpointing_kwargs"]["every_n_layers"] == 2
    assert "activation_checkpointing" not in seen
    assert "transformers >= 5.17" in made.text


def test_notes_name_what_differs() -> None:
    def notes(**values: Any) -> tuple[str, ...]:
        return make(make_recommendation(make_config(**values))).notes

    assert notes() == ()
    assert notes(checkpointing="selective", loss="fused", method="qlora", compile=True, sharding="ddp") == ()
    assert notes(loss="chunked") == ()
    assert notes(checkpointing="budget-25", compile=True) == ()
    assert notes(optimizer="adamw-8bit") == ()
    assert notes(sharding="zero3", offload="nvme") == ()
    (note,) = notes(offload="params", sharding="ddp")
    assert note.startswith("offload=params: ")
    assert notes(offload="optimizer", precision="bf16") == ()
    assert [n.partition(":")[0] for n in notes(sharding="fsdp-no-reshard")] == ["sharding=fsdp-no-reshard"]
