"""The files for `accelerate launch` and for DeepSpeed, read by accelerate's and DeepSpeed's own code."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from export_samples import AXES, imported, make_config, make_recommendation
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM

from autofit.catalog.models import architecture
from autofit.core.lattice import Value
from autofit.export import FORMATS, Export, export
from autofit.export.distributed import NVME_FOLDER
from autofit.techniques.axes.sharding import SHARDINGS_OF_OFFLOAD

PAIRS = [("none", sharding) for sharding in AXES["sharding"]]
PAIRS += [(offload, sharding) for offload, shardings in SHARDINGS_OF_OFFLOAD.items() for sharding in shardings]
"""Every way of offloading with every way of sharding that it goes with."""
BY_DEEPSPEED = [(o, s) for o, s in PAIRS if s.startswith("zero") or (s == "none" and o != "none")]


pytestmark = pytest.mark.usefixtures("ampere")


def made(form: str, *, devices: int = 2, kind: str = "cuda", **values: Value) -> Export:
    """The export of a config of llama-3.1-8b."""
    recommendation = make_recommendation(make_config(**values), devices=devices)
    recommendation = replace(recommendation, hardware=replace(recommendation.hardware, kind=kind))
    return export(recommendation, format=form, source="org/model")


def loaded(text: str, file: Path) -> ClusterConfig:
    """The YAML as accelerate loads it."""
    file.write_text(text)
    config = load_config_from_file(str(file))
    assert isinstance(config, ClusterConfig)
    return config


def launched(text: str, file: Path) -> argparse.Namespace:
    """What `accelerate launch --config_file FILE script.py` starts."""
    file.write_text(text)
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "script.py"]))
    assert isinstance(args, argparse.Namespace)
    return args


def test_accelerate_loads_every_file(sampled: list[Any], tmp_path: Path) -> None:
    for index, config in enumerate(sampled[:100]):
        recommendation = make_recommendation(config, devices=2 if index % 3 else 1)
        text = export(recommendation, format="accelerate", source="x").text
        result = loaded(text, tmp_path / "file.yaml")
        assert result.num_processes == recommendation.workload.devices
        mixed = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}.get(config.text("precision"), "no")
        # DeepSpeed's own configuration says it, and accelerate refuses to be told twice.
        by_deepspeed = result.distributed_type == DistributedType.DEEPSPEED
        assert result.mixed_precision == (None if by_deepspeed else mixed)
        assert config.text("attention") not in text.split("\n\n", 1)[1]


@pytest.mark.parametrize(("offload", "sharding"), BY_DEEPSPEED)
def test_accelerate_starts_deepspeed_as_trials_do(offload: str, sharding: str, tmp_path: Path) -> None:
    """Through accelerate's launcher and the environment it sets, to the configuration that a process sees."""
    text = made("accelerate", offload=offload, sharding=sharding).text
    args = launched(text, tmp_path / "file.yaml")
    assert (args.use_deepspeed, args.use_fsdp, args.num_processes) == (True, False, 2)
    args.deepspeed_fields_from_accelerate_config = "deepspeed_config_file,zero3_init_flag"
    os.environ.update(prepare_deepspeed_cmd_env(args)[1])
    plugin = DeepSpeedPlugin()
    trainer = imported(made("transformers", offload=offload, sharding=sharding).text)["DEEPSPEED"]
    result = {k: v for k, v in plugin.deepspeed_config.items() if k not in ("optimizer", "steps_per_print")}
    expected = {k: v for k, v in trainer.items() if k != "optimizer"}
    if offload == "nvme":
        for part in ("offload_optimizer", "offload_param"):
            assert expected["zero_optimization"][part].pop("nvme_path") is None  # asked for by the script
            assert result["zero_optimization"][part].pop("nvme_path") == NVME_FOLDER
    assert result == expected
    assert plugin.zero3_init_flag is (expected["zero_optimization"]["stage"] == 3)
    assert ("optimizer" in plugin.deepspeed_config) is ("optimizer" in trainer) is (offload != "none")


@pytest.mark.parametrize("offload", ["none", "params"])
@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-no-reshard"])
def test_accelerate_starts_fsdp_as_trials_do(sharding: str, offload: str, tmp_path: Path) -> None:
    args = launched(made("accelerate", offload=offload, sharding=sharding).text, tmp_path / "file.yaml")
    assert (args.use_deepspeed, args.use_fsdp, args.num_processes) == (False, True, 2)
    os.environ.update(prepare_multi_gpu_env(args))
    check_fsdp(FullyShardedDataParallelPlugin(), sharding=sharding, offload=offload)


@pytest.mark.parametrize("offload", ["none", "params"])
@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-no-reshard"])
def test_trainer_starts_fsdp_as_trials_do(sharding: str, offload: str) -> None:
    args = imported(made("transformers", offload=offload, sharding=sharding, precision="fp32").text)["training_args"]
    check_fsdp(FullyShardedDataParallelPlugin(**args.fsdp_plugin_args), sharding=sharding, offload=offload)
    assert args.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    in_yaml = yaml.safe_load(made("trl", offload=offload, sharding=sharding).text)
    stated = {key: args.fsdp_config[key] for key in in_yaml["fsdp_config"]}
    assert (in_yaml["fsdp"], in_yaml["fsdp_config"]) == (True, stated)


def check_fsdp(plugin: FullyShardedDataParallelPlugin, *, sharding: str, offload: str) -> None:
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (sharding == "fsdp")
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) is (offload == "params")
    assert plugin.activation_checkpointing is False
    model = AutoModelForCausalLM.from_config(architecture(tiny.LLAMA))
    plugin.set_auto_wrap_policy(model)
    (layer,) = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert layer is type(model.model.layers[0])


def test_accelerate_starts_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    args = launched(made("accelerate", sharding="ddp").text, file)
    assert (args.multi_gpu, args.use_cpu, args.gpu_ids, args.num_processes) == (True, False, "all", 2)
    args = launched(made("accelerate", devices=1).text, file)
    assert (args.multi_gpu, args.gpu_ids, args.num_processes) == (False, "0", 1)
    result = loaded(made("accelerate", sharding="ddp", kind="cpu").text, file)
    assert (result.distributed_type, result.use_cpu) == (DistributedType.MULTI_CPU, True)


@pytest.mark.parametrize("precision", AXES["precision"])
@pytest.mark.parametrize(("offload", "sharding"), PAIRS)
def test_deepspeed_parses_its_file(offload: str, sharding: str, precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    text = made("deepspeed", offload=offload, sharding=sharding, precision=precision, devices=1).text
    stated, result = json.loads(text), DeepSpeedConfig(json.loads(text))
    assert result.train_batch_size == 64
    assert (result.train_micro_batch_size_per_gpu, result.gradient_accumulation_steps) == (2, 32)
    assert result.gradient_clipping == 1.0
    assert result.float16_config.enabled is (precision == "fp16-mixed")
    assert result.bfloat16_config.enabled is (precision in ("bf16", "bf16-mixed"))
    zero = result.zero_config.model_dump(mode="json", by_alias=True)
    assert zero["stage"] == ((offload, sharding) in BY_DEEPSPEED) * zero["stage"]
    for key, value in stated["zero_optimization"].items():
        if key.startswith("offload"):
            assert {k: zero[key][k] for k in value} == value
        else:
            assert zero[key] == value, key
    assert result.optimizer_params["lr"] == "auto"
    assert result.optimizer_params["weight_decay"] == 0.01


def test_deepspeed_has_few_optimizers() -> None:
    types = {}
    for value in AXES["optimizer"]:
        document = json.loads(made("deepspeed", sharding="zero1", optimizer=value).text)
        types[value] = document.get("optimizer", {}).get("type")
    named = {"sgd": "SGD", "adamw": "AdamW", "adamw-foreach": "AdamW"}
    assert types == {value: named.get(str(value)) for value in AXES["optimizer"]}


def subjects(form: str, **values: Any) -> list[str]:
    """What the notes are about."""
    return [note.partition(":")[0] for note in made(form, **values).notes]


def test_notes_of_deepspeed() -> None:
    script = "attention=sdpa, checkpointing=none, compile=False, loss=full, method=full"
    assert subjects("deepspeed", sharding="zero2") == ["ranks", "learning rate", "weight decay", script]
    assert subjects("deepspeed", sharding="zero3", offload="nvme")[1] == "offload=nvme"
    assert subjects("deepspeed", sharding="fsdp")[1] == "sharding=fsdp"
    assert subjects("deepspeed", sharding="none", precision="bf16")[1:3] == ["sharding=none", "precision=bf16"]
    assert subjects("deepspeed", sharding="zero2", optimizer="lion-8bit")[1] == "optimizer=lion-8bit"
    notes = made("deepspeed", sharding="zero2", devices=4).notes
    assert notes[0] == "ranks: start 4; with another number a step does not have 64 sequences"


def test_notes_of_accelerate() -> None:
    assert subjects("accelerate", sharding="zero2")[:-1] == []
    assert subjects("accelerate", sharding="zero2")[-1].endswith("method=full, optimizer=adamw")
    assert subjects("accelerate", sharding="ddp")[:-1] == ["micro_batch=2", "sharding=ddp"]
    assert subjects("accelerate", sharding="fsdp")[:-1] == ["micro_batch=2", "sharding=fsdp", "sharding=fsdp"]
    assert "sync_each_batch=True" in made("accelerate", sharding="fsdp").notes[0]
    assert subjects("accelerate", sharding="zero3", offload="nvme")[:-1] == ["offload=nvme", "optimizer=adamw"]
    on_cpu = made("accelerate", sharding="zero2", kind="cpu").notes
    assert any("on accelerators only" in note for note in on_cpu)


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "json"])
def test_updates_on_the_host_have_all_its_cores(form: str) -> None:
    """Which no launcher gives them by itself: torchrun and accelerate set one thread per process."""

    def starts_with(threads: str, **values: Any) -> bool:
        start = "start with " if form == "deepspeed" else "# Launch:    "
        made_text = made(form, **values)
        return f"{start}{threads}" in made_text.text + "".join(made_text.notes)

    assert starts_with("OMP_NUM_THREADS=$(($(nproc) / 2))", sharding="zero3", offload="params")
    assert starts_with("OMP_NUM_THREADS=$(nproc)", sharding="zero3", offload="params", devices=1)
    assert not starts_with("OMP_NUM_THREADS", sharding="zero3")
    if form == "transformers":
        assert not starts_with("OMP_NUM_THREADS", sharding="zero1", offload="params"), "it is left out"


@pytest.mark.parametrize(
    ("form", "option"), [("transformers", "--nnodes"), ("trl", "--num_machines"), ("accelerate", "num_machines")]
)
def test_ranks_that_may_have_been_on_several_machines_are_said_to_start_on_one(form: str, option: str) -> None:
    """A worker of a cluster sees one device, whatever its machine has."""
    there = make_recommendation(make_config(sharding="zero2"), devices=4)

    def notes(**hardware: Any) -> list[str]:
        seen = replace(there, hardware=replace(there.hardware, **hardware))
        return [note for note in export(seen, format=form, source="x").notes if note.startswith("launch: ")]

    (note,) = notes(count=1)
    assert note.startswith("launch: all 4 ranks start on one machine") and option in note
    assert notes(count=4) == notes(count=8) == notes(count=1, kind="cpu") == []
