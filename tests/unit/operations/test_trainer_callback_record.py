"""`autofit.TrainerCallback(record=True)`: what an ordinary run takes is stored, apart from trials."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import model_in, tiny_job
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from unit.export.tiny_sft import save_tiny_llama
from unit.operations.made_trials import fits, make_trial

import autofit
from autofit.core.errors import UsageError
from autofit.core.outcome import Trial
from autofit.core.units import GIB, MIB
from autofit.operations import frontier, recommend
from autofit.operations.trainer_callback.config import own_command
from autofit.planning.requests import WorkloadOptions
from autofit.store import Store
from autofit.trial.program.command import Command
from tests.here import run_here

SEQ_LEN = 32
COMMAND = ["python", "train.py", "--batch", "2", "--note", "a {b}"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The user's store, still empty."""
    monkeypatch.setenv("AUTOFIT_STORE", str(tmp_path / "store.db"))
    monkeypatch.setattr(sys, "argv", COMMAND[1:])
    monkeypatch.setattr(sys, "orig_argv", COMMAND)
    return str(tmp_path / "store.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a real but tiny Llama, with weights."""
    folder = model_in(tmp_path / "tiny")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def loaded(folder: Path, **how: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **how)


def train(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model: Any,
    *,
    length: int = SEQ_LEN,
    rows: int = 64,
    optimizers: Any = (None, None),
    callback: dict[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """What is said in a run of ten steps with micro-batch 2 and two micro-steps."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }
    tokens = torch.ones(length, dtype=torch.long)
    data: Any = [{"input_ids": tokens, "labels": tokens}] * rows
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path / "out"), **arguments),
        train_dataset=data,
        eval_dataset=data[:4],
        optimizers=optimizers,
        callbacks=[autofit.TrainerCallback(record=True, **({"seq_len": SEQ_LEN} | (callback or {})))],
    )
    with caplog.at_level(logging.WARNING, logger="autofit"):
        trainer.train()
    messages = [message for message in caplog.messages if message.startswith("autofit:")]
    caplog.clear()
    return messages


def stored(store: str) -> list[Trial]:
    with Store.open(store) as opened:
        return opened.trials()


def test_a_run_is_stored_as_a_trial_of_its_own_command(
    store: str,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    took, said = train(tmp_path, caplog, loaded(folder))
    assert "this run took" in took and "this run is stored as trial 1: `autofit frontier --model " in said
    (trial,) = stored(store)
    workload, config, measured = trial.workload, trial.config, trial.measurement
    assert (workload.model, workload.seq_len, workload.global_batch) == ("tiny", SEQ_LEN, 4)
    assert Command.parse(str(workload.program)).arguments(config, workload, "") == COMMAND
    said_of_config = {name: config[name] for name in ("method", "precision", "micro_batch", "checkpointing")}
    assert said_of_config == {"method": "full", "precision": "fp32", "micro_batch": 2, "checkpointing": "none"}
    assert config["optimizer"] == "adamw" and config["attention"] == "sdpa"
    # Ten steps but two of warm-up and the last of the epoch, which may be a short one.
    assert measured is not None and measured.steps == 7
    assert measured.tokens_per_second == pytest.approx(4 * SEQ_LEN / measured.step_seconds.median)
    assert measured.step_seconds.relative_spread is not None and measured.device_bytes > 50 * MIB
    assert trial.memory_limit_bytes == trial.hardware.memory_bytes and trial.prediction is None
    assert trial.device_state is not None and trial.device_state.processor is not None
    asked = shlex.split(said.split("`")[1])  # as the line says to ask
    code, out, _ = run_here([*asked[1:], "--json"], capfd)
    assert code == 0 and [point["trial_id"] for point in json.loads(out)["points"]] == [trial.trial_id]
    code, out, _ = run_here(["recommend", *asked[2:], "--json"], capfd)
    assert code == 0 and json.loads(out)["config"] == config.to_json()


def test_it_never_mixes_with_what_was_searched(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = WorkloadOptions.of(
        model=str(folder), command="python train.py --batch {micro_batch}", seq_len=SEQ_LEN, global_batch=4
    )
    job = replace(tiny_job(), workload=options.resolve()[1])
    with Store.open(store) as opened:
        for micro_batch, speed in ((2, 1000.0), (4, 1310.0)):
            opened.add(make_trial({"micro_batch": micro_batch}, fits(1.0, speed), job=job, limit=2 * GIB))
        before = frontier(options, store=opened)
    for _ in range(2):  # the second run is advised as the first was, by the search
        advice, took, said = train(tmp_path, caplog, loaded(folder))
        assert "31% faster" in advice and "in its trial 1,000 tokens/s" in took and "stored as trial" in said
    with Store.open(store) as opened:
        assert frontier(options, store=opened).points == before.points
        own = WorkloadOptions.of(model=str(folder), command=own_command(), seq_len=SEQ_LEN, global_batch=4)
        assert recommend(own, store=opened).point.config["micro_batch"] == 2


def test_evaluations_and_checkpoints_are_in_no_step(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, caplog, loaded(folder), eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=6)
    (trial,) = stored(store)
    # Steps 3 to 9 are timed but those after an evaluation, 5 and 9, and after a checkpoint, 7.
    assert trial.measurement is not None and trial.measurement.steps == 4


def test_the_ends_of_epochs_are_not_timed(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, caplog, loaded(folder), rows=18)  # four whole steps and a short one, twice
    (trial,) = stored(store)
    assert trial.measurement is not None and trial.measurement.steps == 2 + 3


def test_adapters_are_told_with_rank_and_targets(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import LoraConfig, get_peft_model

    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapters = LoraConfig(r=4, target_modules=projections, lora_dropout=0.1, task_type="CAUSAL_LM")
    train(tmp_path, caplog, get_peft_model(loaded(folder), adapters))
    (trial,) = stored(store)
    assert (trial.config["method"], trial.config["rank"], trial.config["targets"]) == ("lora", 4, "attention")
    assert trial.workload.lora_dropout == 0.1
    partly = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    first, _ = train(tmp_path, caplog, get_peft_model(loaded(folder), partly))
    assert first == (
        "autofit: this run is not stored: no axis says the targets of its adapters "
        "(not every projection of attention is adapted)"
    )


@pytest.mark.parametrize("doubly", [True, False])
def test_four_bits_are_those_of_qlora_or_are_refused(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, doubly: bool
) -> None:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=doubly,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = prepare_model_for_kbit_training(loaded(folder, quantization_config=four_bits))
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    first, *_ = train(tmp_path, caplog, model, bf16=True, activation_checkpointing=True)
    if not doubly:
        assert first.endswith("no axis says its 4-bit weights: qlora has nf4 with double quantisation")
        return
    (trial,) = stored(store)
    expected = {
        "method": "qlora",
        "rank": 8,
        "targets": "all-linear",
        "precision": "bf16-mixed",
        "checkpointing": "full",
    }
    assert {axis: trial.config[axis] for axis in expected} == expected


def frozen_in_part(model: Any) -> Any:
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def checkpointed(model: Any) -> Any:
    model.activation_checkpointing_enable()
    return model


def nameless(model: Any) -> Any:
    model.config._name_or_path = ""
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (frozen_in_part, "some are frozen, without adapters"),
        (checkpointed, "checkpointing is on in its model, and its arguments say none"),
        (nameless, "its model does not say where it was loaded from"),
        (lambda model: model.half(), "trained weights in float16, autocast to None"),
    ],
)
def test_what_its_model_does_otherwise_is_refused(
    store: str,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Any], Any],
    reason: str,
) -> None:
    first, took = train(tmp_path, caplog, change(loaded(folder)))
    assert first.startswith("autofit: this run is not stored: ") and first.endswith(reason) and "took" in took
    assert not Path(store).exists()


@pytest.mark.parametrize("seq_len", ["2048", 0, 2048.0])
def test_a_length_that_is_no_number_of_tokens_is_refused_at_once(seq_len: Any) -> None:
    with pytest.raises(UsageError, match=r"seq_len is .*: it must be a whole number of at least 1"):
        autofit.TrainerCallback(record=True, seq_len=seq_len)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"callback": {"seq_len": None}}, "say it, as in TrainerCallback(record=True, seq_len=2048)"),
        ({"callback": {"seq_len": 5000}}, "seq-len 5000 is longer than the 4096 positions of tiny"),
        ({"neftune_noise_alpha": 5.0}, "no axis says neftune_noise_alpha (noise is added to the embeddings)"),
        ({"optim": "rmsprop"}, "no axis says optim: rmsprop (one state, like Lion; optimizer=lion stands for it)"),
        ({"auto_find_batch_size": True}, "its micro-batch is not known before it fits (auto_find_batch_size)"),
        ({"max_steps": 5}, "it is too short: 2 steps could be timed"),
        ({"length": 40}, "its steps were on 160 tokens in the mean, and 128 are 4 full sequences of 32"),
        ({"length": 20}, "its steps were on 80 tokens in the mean, and 128 are 4 full sequences of 32"),
    ],
)
def test_what_its_arguments_or_data_do_is_refused(
    store: str,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    reason: str,
) -> None:
    said = train(tmp_path, caplog, loaded(folder), **options)
    (refusal,) = (message for message in said if "this run took" not in message)
    assert refusal.startswith("autofit: this run is not stored: ") and refusal.endswith(reason)
    assert not Path(store).exists()


def of_some(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[1:], lr=0.1)


@pytest.mark.parametrize(
    ("optim", "make", "reason"),
    [
        ("adamw_torch", torch.optim.Adagrad, "is a Adagrad of the script's own, and not what optim names"),
        ("sgd", of_some, "its optimizer updates others than the weights that are trained"),
    ],
)
def test_an_optimizer_of_the_scripts_own_is_refused(
    store: str,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    optim: str,
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    reason: str,
) -> None:
    model = loaded(folder)
    first, _ = train(tmp_path, caplog, model, optimizers=(make([*model.parameters()]), None), optim=optim)
    assert first.endswith(reason)


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_8bit", "lion_8bit"])
def test_what_optim_names_is_stored(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, optim: str
) -> None:
    train(tmp_path, caplog, loaded(folder), optim=optim, weight_decay=0.01)
    assert [trial.config["optimizer"] for trial in stored(store)] == [optim.replace("_", "-")]


def test_a_notebook_has_no_command(
    monkeypatch: pytest.MonkeyPatch, folder: Path, store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"])
    first, _ = train(tmp_path, caplog, loaded(folder))
    assert "it has no command of its own, as in a notebook" in first


@pytest.mark.parametrize(
    "word",
    [
        *("--hub_token=abc", "--wandb-key", "--token", "HF_TOKEN=abc", "logging.token=abc", "MY_PASSWORD=abc"),
        *("hf_" + "a" * 24, "postgresql://me:secret@host/runs", "--id=of-the-user"),
    ],
)
def test_a_command_that_may_hold_a_secret_is_refused_without_a_word_of_it(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", [*COMMAND, word])
    with pytest.raises(UsageError, match="secret") as caught:
        own_command(["of-the-user"])
    assert word.partition("=")[2] not in str(caught.value) or "=" not in word


def test_tokens_of_a_vocabulary_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*COMMAND, "--eos_token", "<|im_end|>", "--pad-token=<pad>", "model.mask_token=<m>", "--num_mask_token=4"]
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", words)
    assert shlex.split(own_command()) == [word.replace("{", "{{").replace("}", "}}") for word in words]


def test_the_launchers_precision_is_the_runs(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --mixed_precision bf16` says it by a variable."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(tmp_path, caplog, loaded(folder, dtype=torch.float32))
    (trial,) = stored(store)
    assert trial.config["precision"] == "bf16-mixed"


def test_a_model_that_the_script_compiles_is_refused_and_has_no_hook(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(folder)
    model.model.layers[0].compile(backend="eager")
    first, _ = train(tmp_path, caplog, model)
    assert "its model is compiled" in first and not model._forward_pre_hooks


def test_a_store_that_fails_costs_a_line_and_no_run(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path(store).write_text("this is no database, " * 100)
    model = loaded(folder)
    said = train(tmp_path, caplog, model)
    assert said[-1].startswith("autofit: this run is not stored: ") and "this run took" in said[-2]
    assert not model._forward_pre_hooks


def test_trls_arguments_say_the_length_and_the_loss(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import trl
    from datasets import Dataset

    folder = save_tiny_llama(str(tmp_path / "tiny"))
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 8, "max_length": SEQ_LEN}
    quiet: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    trainer = trl.SFTTrainer(
        model=folder,
        args=trl.SFTConfig(output_dir=str(tmp_path / "out"), **options, **quiet),
        train_dataset=Dataset.from_dict({"input_ids": [[5] * 50] * 32}),  # which trl cuts
        callbacks=[autofit.TrainerCallback(record=True)],
    )
    with caplog.at_level(logging.WARNING, logger="autofit"):
        trainer.train()
    (trial,) = stored(store)
    assert (trial.workload.seq_len, trial.workload.global_batch) == (SEQ_LEN, 2)
    assert (trial.config["loss"], trial.config["checkpointing"], trial.config["precision"]) == (
        "chunked",
        "full",
        "fp32",
    )


def test_a_run_whose_loss_is_no_number_is_refused(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(folder)
    torch.nn.init.constant_(model.get_input_embeddings().weight, float("nan"))
    said = train(tmp_path, caplog, model, logging_steps=1, logging_nan_inf_filter=False)
    assert said[-1] == "autofit: this run is not stored: its loss was not a number"
    assert not Path(store).exists()
