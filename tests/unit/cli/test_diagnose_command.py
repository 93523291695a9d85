"""`autofit diagnose` as a user runs it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from unit.cli.conftest import Autofit

from autofit.prediction.estimation import Estimation

CONFIG = """\
model_name_or_path: smollm2-135m
stage: dpo
finetuning_type: lora
template: default
cutoff_len: 512
per_device_train_batch_size: 8
bf16: true
disable_gradient_checkpointing: true
warmup_step: 3
"""
ERROR = 'Traceback\n  File "/x/trainer.py", line 3, in evaluation_loop\nRuntimeError: CUDA out of memory.'


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "dpo.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_the_verdict_comes_first_and_one_diff_last(autofit: Autofit, config: str) -> None:
    done = autofit("diagnose", "--config", config, "--hardware", "l4", "--memory-limit", "4GiB")
    lines = done.out.splitlines()
    assert done.code == 3 and lines[0].startswith("does not fit l4: needs ")
    assert lines[1] == "llamafactory: smollm2-135m, lora of rank 8, 8 x 1 sequences of 512 tokens"
    assert "not counted  stage: dpo needs more memory" in done.out
    assert "unknown key  warmup_step: did you mean warmup_steps" in done.out
    assert "\nfits with\n" in done.out and "\n  speeds " in done.out and done.out.count(f"--- {config}") == 1
    verbose = autofit("diagnose", "--config", config, "--hardware", "l4", "--memory-limit", "4GiB", "--verbose")
    assert verbose.out.count(f"--- {config}") > 1 and "\nassumed" in verbose.out


def test_the_verdict_does_not_wait_for_what_helps(
    autofit: Autofit, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Estimation, "advised", interrupt)
    done = autofit("diagnose", "--config", config, "--hardware", "l4", "--memory-limit", "4GiB")
    assert done.code == 130 and done.out.startswith("does not fit l4: needs ") and "at the peak" in done.out


def test_what_fits_ends_with_0_and_says_what_it_leaves_out(autofit: Autofit, config: str) -> None:
    done = autofit("diagnose", "--config", config, "--hardware", "h100-80g")
    verdict = done.out.splitlines()[0]
    assert done.code == 0 and "(without what stage: dpo adds; unknown key: warmup_step: see below)" in verdict
    assert " tokens/s, give or take " in done.out.splitlines()[1]
    document = autofit("diagnose", "--config", config, "--hardware", "h100-80g", "--json").document
    assert (document["trainer"], document["unknown_keys"][0]["key"]) == ("llamafactory", "warmup_step")


def test_an_error_alone_is_explained(autofit: Autofit, tmp_path: Path) -> None:
    path = tmp_path / "error.txt"
    path.write_text(ERROR)
    done = autofit("diagnose", "--traceback", str(path))
    assert done.code == 0 and "It failed in evaluation, not in training" in done.out
    document = autofit("diagnose", "--traceback", str(path), "--json").document
    assert document["traceback"]["phase"] == "evaluation" and "eval_batch_size" in document["helps"]["exact"]


@pytest.mark.parametrize(
    ("text", "helps", "does_not"),
    [
        (ERROR, "per_device_eval_batch_size", "train_batch_size"),
        (ERROR.replace("evaluation_loop", "from_pretrained"), "dtype=torch.bfloat16", "train_batch_size"),
        (ERROR.replace("trainer.py", "optim/adamw.py").replace("evaluation_loop", "step"), "optim=", "use_liger"),
        (ERROR.replace("evaluation_loop", "save_model"), "SHARDED_STATE_DICT", "train_batch_size"),
        (ERROR.replace("evaluation_loop", "forward"), "per_device_train_batch_size", "eval_batch_size"),
        ("Killed\n", "dataloader_num_workers", "autofit estimate"),
    ],
)
def test_what_helps_against_an_error_alone_is_of_its_phase(
    autofit: Autofit, tmp_path: Path, text: str, helps: str, does_not: str
) -> None:
    path = tmp_path / "error.txt"
    path.write_text(text)
    done = autofit("diagnose", "--traceback", str(path))
    assert helps in done.out and does_not not in done.out


@pytest.mark.parametrize("data", [f"\xff{ERROR}".encode("latin-1"), ERROR.encode("utf-8-sig"), ERROR.encode("utf-16")])
def test_an_error_may_be_in_any_encoding(
    autofit: Autofit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    path = tmp_path / "error.txt"
    path.write_bytes(data)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    for source in (str(path), "-"):
        done = autofit("diagnose", "--traceback", source)
        assert done.code == 0 and "It failed in evaluation" in done.out, done.err


@pytest.mark.parametrize("data", [b"step 3\r\nKilled\r\n", b" 12% 10/100\rKilled\n"], ids=["Windows", "a progress bar"])
def test_every_way_to_end_a_line_is_one(autofit: Autofit, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "error.txt"
    path.write_bytes(data)
    assert autofit("diagnose", "--traceback", str(path)).code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to diagnose"),
        (("--traceback", "none.txt"), "none.txt cannot be read"),
        (("--config", "none.yml"), "none.yml cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(autofit: Autofit, arguments: tuple[str, ...], words: str) -> None:
    done = autofit("diagnose", *arguments, "--hardware", "l4")
    assert (done.code, words in done.err, done.err.count("\n")) == (2, True, 1)
