"""Exported YAML, read by trl's own parser as `trl sft --config` does, and a tiny model trained with it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from export_samples import (
    check_adapter,
    check_batch,
    check_quantisation,
    checkpointing_kwargs,
    loaded_format,
    make_config,
    make_recommendation,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from unit.export import tiny_sft

from autofit.core.frontier import Recommendation
from autofit.core.lattice import Config, Value
from autofit.export import export
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.selective import SELECTIVE
from autofit.trial.limits.segments import ALLOCATOR

pytestmark = pytest.mark.usefixtures("ampere")

CHECKPOINTING: dict[str, Any] = {
    "none": None,
    "full": {"use_reentrant": False},
    "every-2": {"use_reentrant": False, "every_n_layers": 2},
    "every-4": {"use_reentrant": False, "every_n_layers": 4},
    "offload": {"use_reentrant": False, "offload": True},
    "save-attention": {"use_reentrant": False, "selective": True},
    "selective": {"use_reentrant": False, "selective": True},
}


def parse(recommendation: Recommendation, file: Path, source: str = "org/model") -> tuple[Any, Any]:
    """What `trl sft` makes of the exported file."""
    file.write_text(export(recommendation, format="trl", source=source).text)
    return tiny_sft.parse(file)


def check_training(config: Config, args: Any, recommendation: Recommendation) -> None:
    assert (args.max_length, args.packing) == (recommendation.workload.seq_len, True)
    apart = config["attention"] == "flash" or config.get("batching") == "padding-free"
    assert args.packing_strategy == ("bfd" if apart else "wrapped")
    assert args.torch_compile is config["compile"]
    assert (args.loss_type, args.use_liger_kernel, args.activation_offloading) == ("nll", by_liger(config), False)
    assert not (args.liger_kernel_config or {}).get("fused_linear_cross_entropy")
    if config["checkpointing"] in CHECKPOINTING:
        assert checkpointing_kwargs(args) == CHECKPOINTING[config.text("checkpointing")]


def check_model(config: Config, args: Any, dropout: float, *, masters_elsewhere: bool) -> None:
    import trl

    assert args.dtype == loaded_format(config, masters_elsewhere=masters_elsewhere)
    expected = {"flash": "flash_attention_2", "efficient": "sdpa"}.get(config.text("attention"), config["attention"])
    assert args.attn_implementation == expected
    check_quantisation(config, trl.get_quantization_config(args), getattr(torch, args.dtype))
    check_adapter(config, trl.get_peft_config(args), dropout)


def test_trl_reads_what_the_config_says(sampled: list[Config], tmp_path: Path) -> None:
    for index, config in enumerate(sampled):
        recommendation = make_recommendation(config, devices=2 if index % 3 else 1, lora_dropout=index % 2 / 10)
        training, model = parse(recommendation, tmp_path / "config.yaml")
        assert model.model_name_or_path == "org/model"
        check_batch(config, training, recommendation)
        check_training(config, training, recommendation)
        dropout = recommendation.workload.lora_dropout
        check_model(config, model, dropout, masters_elsewhere=training.deepspeed is not None)


def test_values_that_sft_turns_on_by_default_are_stated() -> None:
    text = export(make_recommendation(make_config(precision="bf16")), format="trl", source="x").text
    stated = yaml.safe_load(text)
    for key in ("gradient_checkpointing", "bf16", "fp16", "use_peft", "load_in_4bit", "torch_compile"):
        assert stated[key] is False
    assert stated["max_grad_norm"] == 1.0


def test_learning_rate_must_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import trl

    file = tmp_path / "config.yaml"
    file.write_text(export(make_recommendation(), format="trl", source="x").text)
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    with pytest.raises(SystemExit):
        parser.parse_args_and_config(["--config", str(file)])
    assert "argument --learning_rate/--learning-rate: invalid float value: 'CHOOSE'" in capsys.readouterr().err
    training, _ = parse(make_recommendation(), file)
    assert training.learning_rate == 1e-4


def test_environment(tmp_path: Path) -> None:
    for name in ALLOCATOR:
        os.environ.pop(name, None)
    parse(make_recommendation(), tmp_path / "a.yaml")
    assert not os.environ.keys() & set(ALLOCATOR)
    parse(make_recommendation(expandable_segments=True), tmp_path / "b.yaml")
    assert {os.environ.get(name) for name in ALLOCATOR} == {"expandable_segments:True"}


def test_launch_fixes_the_number_of_processes() -> None:
    zero = export(make_recommendation(make_config(offload="optimizer")), format="trl", source="x").text
    assert "--num_processes 1 --use_deepspeed\n" in zero
    for devices in (1, 4):
        text = export(make_recommendation(devices=devices), format="trl", source="x").text
        assert f"trl sft --config THIS_FILE --learning_rate YOURS --num_processes {devices}\n" in text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_sft.save_tiny_llama(str(tmp_path_factory.mktemp("tiny")))


def train(source: str, folder: Path, **values: Value) -> Any:
    """What `trl sft` does with the file, on sequences of sixteen tokens."""
    recommendation = make_recommendation(make_config(micro_batch=2, **values), seq_len=16, global_batch=4)
    recommendation = replace(recommendation, hardware=replace(recommendation.hardware, kind="cpu"))
    args, model = parse(recommendation, folder / "config.yaml", source)
    return tiny_sft.train(args, model, folder, steps=1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_dtypes_and_shapes_are_those_measured_or_noted(tiny: str, tmp_path: Path, method: str, precision: str) -> None:
    trainer = train(tiny, tmp_path, method=method, precision=precision)
    (trained,) = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    measured = torch.bfloat16 if precision == "bf16" else torch.float32
    recommendation = make_recommendation(make_config(method=method, precision=precision))
    notes = export(recommendation, format="trl", source="x").notes
    assert (trained is not measured) is any(note.startswith(f"precision={precision}") for note in notes)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (2, 16)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("value", ["full", "every-2", "save-attention", "selective", "none"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_checkpointing_reaches_the_layers(tiny: str, tmp_path: Path, method: str, value: str) -> None:
    trainer = train(tiny, tmp_path, method=method, checkpointing=value)
    layers = [m for m in trainer.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    expected = {"none": [False] * 4, "every-2": [True, False] * 2}.get(value, [True] * 4)
    assert [layer.gradient_checkpointing for layer in layers] == expected
    if value in SELECTIVE:
        recommendation = make_recommendation(make_config(method=method, checkpointing=value))
        is_noted = any("with adapters" in note for note in export(recommendation, format="trl", source="x").notes)
        dropped = is_noted and transformers.__version__.startswith("5.23.")  # of which alone the note speaks
        assert ("context_fn" not in layers[0]._gradient_checkpointing_func.keywords) is dropped


def test_notes_name_what_differs() -> None:
    def notes(**values: Value) -> list[str]:
        made = export(make_recommendation(make_config(**{"loss": "chunked", **values})), format="trl", source="x")
        return [note.partition(":")[0] for note in made.notes]

    assert notes() == []
    assert notes(loss="full") == ["loss=full"]
    assert notes(loss="fused") == ["loss=fused"]
    assert notes(checkpointing="selective") == ["checkpointing=selective"]
    assert notes(checkpointing="save-attention") == []
    assert notes(attention="efficient", precision="fp32") == ["attention=efficient"]
    assert notes(mlp="tiled") == ["mlp=tiled"]
    assert notes(checkpointing="budget-50", compile=True) == ["checkpointing=budget-50", "compile=True"]
    assert notes(optimizer="lion-8bit") == []  # trials keep the states of embeddings in 32 bits as Trainer does
    assert notes(sharding="ddp", offload="params") == ["offload=params", "sharding=ddp"]
    assert notes(sharding="fsdp", offload="params") == ["sharding=fsdp", "sharding=fsdp"]  # what is gathered, and sums
    assert notes(sharding="fsdp", precision="fp32") == ["sharding=fsdp"]
    assert notes(sharding="zero3", precision="bf16", method="lora") == []
    assert notes(sharding="zero3", offload="nvme") == ["offload=nvme"]
    assert notes(method="qlora", precision="bf16", compile=True, checkpointing="every-4") == ["compile=True"]
    made = export(make_recommendation(model="gemma-3-4b"), format="trl", source="x")
    assert any(note.startswith("the model:") for note in made.notes)
