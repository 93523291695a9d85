"""A user's own Trainer program: the real command searches over it, and the store answers for it alone."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_model

from tests.here import run_here

PROGRAM = """
import argparse

import autofit
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--model")
given = parser.parse_args()
callback = autofit.TrainerCallback()
model = LlamaForCausalLM(LlamaConfig.from_pretrained(given.model))
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=given.batch,
    gradient_accumulation_steps=4 // given.batch,
    max_steps=60,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
data = [{"input_ids": row, "labels": row} for row in torch.randint(512, (240, 32))]
Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
"""
SPACE = """
axes:
  method: [full]
  micro_batch: [2, 4]
  checkpointing: [none]
defaults:
  precision: fp32
"""
PROGRAM_LINE = f"{shlex.quote(sys.executable)} train.py --model {{model}} --batch {{micro_batch}}"
OPTIONS = ("--seq-len", "32", "--global-batch", "4", "--memory-limit", "2GiB")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's working folder: a program, a model, a search space, a store."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(tiny_model().config))
    monkeypatch.setenv("AUTOFIT_STORE", str(tmp_path / "store.db"))
    return tmp_path


def words(command: str, *more: str, program: str | None = None) -> list[str]:
    """What is written after `autofit`."""
    program_options = () if program is None else ("--command", program)
    return [command, "--model", "./small", *OPTIONS, *program_options, *more]


def test_a_search_runs_the_users_program_and_the_store_answers_for_it_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    searching = ("--in-place", "--space", "space.yaml", "--no-predict", "--time-budget", "30m", "--max-trials", "2")
    line = [sys.executable, "-m", "autofit", *words("search", *searching, "--json", program=PROGRAM_LINE)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    best = document["recommendation"]
    assert best["workload"]["program"] == PROGRAM_LINE
    assert {point["config"]["micro_batch"] for point in document["frontier"]["points"]} <= {2, 4}
    assert best["measurement"]["loss"]["first"] == pytest.approx(6.2, abs=0.3), "of a random model with 512 tokens"
    assert best["measurement"]["gradient_norms"][0] > 0
    assert best["measurement"]["setup_peak_bytes"] > 50 * 1024**2

    monkeypatch.chdir(folder)
    code, text, wrong = run_here(words("recommend", program=PROGRAM_LINE), capfd)
    assert code == 0, wrong
    run = f"train.py --model {folder / 'small'} --batch {best['config']['micro_batch']}"
    assert f"{run}\n" in text
    code, text, _ = run_here(words("recommend", "--format", "json", program=PROGRAM_LINE), capfd)
    assert json.loads(text)["command"].endswith(run)
    code, _, wrong = run_here(words("recommend", "--format", "trl", program=PROGRAM_LINE), capfd)
    assert code == 2 and "measured with a program of yours: run" in wrong
    code, _, wrong = run_here(words("recommend"), capfd)
    assert code == 4 and "--command" not in wrong.partition("run:")[2], "of autofit's own step, nothing is known"
    code, _, wrong = run_here(words("frontier", program="python other.py {micro_batch}"), capfd)
    assert code == 4 and "run: autofit search" in wrong and "--command 'python other.py {micro_batch}'" in wrong
