"""LLaMA-Factory's and axolotl's own programs against trials with their habits: the same weights and loss, and nearly
the same peak of memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from export_samples import make_recommendation
from live_bytes import LiveBytes
from own_environments import built
from run_trainer import described, name_of
from tiny_sft import save
from transformers import AutoModelForCausalLM

from autofit.catalog.models import architecture
from autofit.core.lattice import Config, Value
from autofit.export import export
from autofit.techniques.axes.optimizer import LEARNING_RATE, weight_decay
from autofit.techniques.technique import IGNORE_INDEX
from autofit.training.step import TrainingStep

forgetful_bitsandbytes, one_thread = tiny.forgetful_bitsandbytes, tiny.one_thread

WORDS, SEQ_LEN, STEPS, GLOBAL_BATCH = 4096, 60, 3, 4
MODEL = tiny.model("llama", vocab_size=WORDS, num_hidden_layers=4, tie_word_embeddings=False)
TOKENS = torch.randint(WORDS, (STEPS, GLOBAL_BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(1))

BOTH: dict[str, dict[str, Value]] = {
    "full": {"method": "full", "precision": "fp32"},
    "full, checkpointed": {"method": "full", "precision": "fp32", "checkpointing": "full", "micro_batch": 4},
    "full, bf16": {"method": "full", "precision": "bf16", "checkpointing": "full", "optimizer": "adamw-8bit"},
    "lora, bf16": {"method": "lora", "precision": "bf16", "targets": "attention"},
    "lora, mixed, checkpointed": {"method": "lora", "precision": "bf16-mixed", "checkpointing": "full"},
    "qlora, bf16, checkpointed": {"method": "qlora", "precision": "bf16", "checkpointing": "full"},
    "qlora, mixed": {"method": "qlora", "precision": "bf16-mixed"},
}
CASES: Mapping[str, Mapping[str, dict[str, Value]]] = {
    "llamafactory": {**BOTH, "full, mixed": {"method": "full", "precision": "bf16-mixed"}},
    "axolotl": {**BOTH, "lora, fp32": {"method": "lora", "precision": "fp32", "checkpointing": "every-2"}},
}
"""The last of each is what the other cannot train."""


def own_part(trainer: str, data: Path, out: Path) -> dict[str, object]:
    """What is the user's own in a file: the data, in their order, and how long."""
    common = {"learning_rate": LEARNING_RATE, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
    common["output_dir"] = str(out)
    if trainer == "llamafactory":
        scheduler = {"lr_scheduler_type": "constant", "report_to": "none", "disable_shuffling": True}
        return {**common, **scheduler, "dataset": "mine", "template": "empty", "tokenized_path": str(data / "tokens")}
    scheduler = {"lr_scheduler": "constant", "warmup_steps": 0, "num_epochs": 1, "val_set_size": 0}
    in_order = {"shuffle_merged_datasets": False, "curriculum_sampling": True, "sample_packing_sequentially": True}
    rows = {"path": str(data / "tokens.jsonl"), "ds_type": "json"}
    prepared = {"dataset_prepared_path": str(data / "prepared"), "dataset_num_proc": 1}
    return {**common, **scheduler, **in_order, **prepared, "datasets": [rows]}


def write_data(folder: Path) -> None:
    """The tokens as data that need no tokenizer, and a folder for each format of weights."""
    rows = TOKENS.flatten(0, 1).tolist()
    columns = {
        "input_ids": rows,
        "labels": [[IGNORE_INDEX, *row[1:]] for row in rows],
        "attention_mask": [[1] * len(row) for row in rows],
    }
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict(columns)
    DatasetDict(train=data).save_to_disk(folder / "tokens")
    data.to_json(folder / "tokens.jsonl")
    for name in ("float32", "bfloat16"):
        save(architecture(MODEL), str(folder / name))
        weights = AutoModelForCausalLM.from_config(architecture(MODEL), dtype=getattr(torch, name))
        weights.save_pretrained(folder / name)


def step_of(config: Config, trainer: str) -> TrainingStep:
    """The trial's own, always with the same weights."""
    return tiny.built(config, MODEL, seq_len=SEQ_LEN, trainer=trainer)


def config_of(values: Mapping[str, Value]) -> Config:
    return tiny.config(**{"micro_batch": 2, **({} if values["method"] == "full" else {"rank": 8}), **values})


def write_case(config: Config, trainer: str, data: Path, folder: Path) -> None:
    """The file as a user would complete it, and the weights to start from."""
    folder.mkdir()
    sizes = {"model": MODEL.name, "seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH}
    made = replace(make_recommendation(config, trainer=trainer, **sizes), hardware=tiny.CPU_HARDWARE)
    source = data / ("float32" if config["precision"] == "fp32" else "bfloat16")
    exported = export(made, format=trainer, source=str(source))
    assert not exported.needs_more
    document = {**yaml.safe_load(exported.text), **own_part(trainer, data, folder / "out")}
    (folder / "file.yaml").write_text(yaml.safe_dump(document))
    torch.save(dict(step_of(config, trainer).module.model.named_parameters()), folder / "weights.pt")


@pytest.fixture(scope="module", params=CASES)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A trainer, and the folder in which each of its cases has a folder."""
    environment = built(request.param)
    home = tmp_path_factory.mktemp(request.param)
    write_data(home)
    for name, values in CASES[request.param].items():
        write_case(config_of(values), request.param, home, home / name)
    environment.run("run_trainer.py", *(home / name for name in CASES[request.param]))
    return request.param, home


@pytest.mark.parametrize("case", dict.fromkeys(name for cases in CASES.values() for name in cases))
def test_the_trainer_trains_as_the_trial(case: str, ran: tuple[str, Path]) -> None:
    trainer, home = ran
    if case not in CASES[trainer]:
        pytest.skip(f"{trainer} cannot train it")
    wrote = home / case / "did.json"
    assert wrote.exists(), (home / case / "output.txt").read_text()[-5000:]
    did = json.loads(wrote.read_text())
    config = config_of(CASES[trainer][case])
    step = step_of(config, trainer)
    model = step.module.model
    losses, norms = [], []
    with LiveBytes() as counter:
        for tensor in [*step.module.parameters(), *step.module.buffers()]:
            counter.note(tensor)
        for tokens in TOKENS:
            losses.append(float(step.run(tokens)))
            norms.append(float(step.gradient_norm))
    assert did["parameters"] == described(model)
    assert did["optimizer"] == name_of(step.engine.optimizer)
    assert did["weight_decay"] == weight_decay(config["optimizer"])
    assert did["attention"] == model.config._attn_implementation
    assert did["batches"] == [[config["micro_batch"], SEQ_LEN]] * (STEPS * GLOBAL_BATCH // config.number("micro_batch"))
    noise = 1e-5 if config["precision"] == "fp32" else 2e-3
    assert did["losses"] == pytest.approx(losses, rel=noise)
    assert did["gradient_norms"] == pytest.approx(norms, rel=10 * noise)
    assert did["peak_bytes"] == pytest.approx(counter.peak, rel=0.005)
