"""What a user asks for becomes a value, or is refused with one clear sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import model_in, tiny_model
from unit.operations.made_trials import HARDWARE, OPTIONS, make_job

from autofit.catalog.models import Model
from autofit.core.device.hardware import Hardware
from autofit.core.errors import UsageError
from autofit.core.units import GIB
from autofit.core.workload import Effect, Goal
from autofit.operations import SearchRequest, WorkloadOptions, hub_id
from autofit.planning.requests import memory_limit
from autofit.training import loss_check

CPU = Hardware(name="cpu-of-tests", kind="cpu", device_name="Some CPU", memory_bytes=32 * GIB, cores=4)


def test_options_become_a_workload() -> None:
    model, workload = OPTIONS.resolve()
    assert (workload.model, workload.model_digest) == (model.name, model.digest)
    assert (workload.seq_len, workload.global_batch, workload.devices, workload.seed) == (128, 4, 1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq-len is 0: it must be at least 1"),
        ({"seq_len": 1}, "a next-token loss needs at least 2 tokens"),
        ({"seq_len": -5}, "seq-len is -5"),
        ({"seq_len": 8193}, "seq-len 8193 is longer than the 8192 positions of smollm2-135m"),
        ({"devices": 0}, "devices is 0"),
        ({"global_batch": 10**20}, "global-batch is 100000000000000000000: it must be at most 2147483647"),
        ({"seq_len": 2**31}, "seq-len is 2147483648: it must be at most 2147483647"),
        ({"seed": 2**63}, "seed is 9223372036854775808: it must be from -9223372036854775807 to 9223372036854775807"),
        ({"seed": -(10**20)}, "seed is -100000000000000000000: it must be from"),
        ({"lora_dropout": -0.1}, "lora-dropout is -0.1"),
        ({"lora_dropout": float("nan")}, "lora-dropout is nan"),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        replace(OPTIONS, **change).resolve()  # type: ignore[arg-type]
    assert message in str(error.value)


def test_a_model_with_a_loss_of_its_own_is_refused_before_anything_runs(tmp_path: Path) -> None:
    text = {"model_type": "falcon_h1", "num_hidden_layers": 1, "lm_head_multiplier": 0.3, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(text))
    asked = replace(OPTIONS, model=str(tmp_path))
    assert asked.resolve()[0].config["lm_head_multiplier"] == 0.3  # what the store has of it can be answered
    with pytest.raises(UsageError, match="would be trained with a loss other than its own") as error:
        asked.job((CPU, make_job().stack))
    assert "\n" not in str(error.value)


def test_a_model_is_compared_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "cache"))
    asked = replace(OPTIONS, model=str(model_in(tmp_path, {**tiny_model().config, "rope_theta": 54321.0})))
    compared, refuses = [], True

    def why_another_loss(model: Model) -> str | None:
        compared.append(model.name)
        return "another loss" if refuses else None

    monkeypatch.setattr(loss_check, "why_another_loss", why_another_loss)
    for _ in range(2):
        with pytest.raises(UsageError, match="another loss"):  # what is refused may be mended
            asked.job((CPU, make_job().stack))
    refuses = False
    for _ in range(2):
        asked.job((CPU, make_job().stack))
    assert len(compared) == 3


def test_the_catalogs_models_wait_for_no_comparison() -> None:
    code = (
        "import sys; from unit.operations.made_trials import OPTIONS, HARDWARE, STACK; OPTIONS.job((HARDWARE, STACK));"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"


def test_a_limit_is_what_was_asked() -> None:
    assert memory_limit(3 * GIB, HARDWARE) == 3 * GIB
    assert memory_limit(80 * GIB, HARDWARE) == 80 * GIB


def test_without_a_limit_it_is_the_devices_memory() -> None:
    assert memory_limit(None, HARDWARE) == 80 * GIB
    # The rest of a host's memory is the system's.
    assert memory_limit(None, CPU) == int(0.8 * 32 * GIB)


def test_more_than_the_device_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"memory-limit 81.00 GiB is more than the 80.00 GiB of h100-80g"):
        memory_limit(81 * GIB, HARDWARE)


def test_ranks_on_one_host_share_its_memory_and_each_gpu_has_its_own() -> None:
    assert memory_limit(None, CPU, 2) == int(0.8 * 32 * GIB) // 2
    assert memory_limit(16 * GIB, CPU, 2) == 16 * GIB
    with pytest.raises(
        UsageError, match=r"memory-limit 17.00 GiB for each of 2 ranks is more than the 32.00 GiB of cpu"
    ):
        memory_limit(17 * GIB, CPU, 2)
    assert memory_limit(None, HARDWARE, 2) == memory_limit(80 * GIB, HARDWARE, 2) == 80 * GIB


def test_equal_questions_are_equal() -> None:
    job = make_job()
    request = SearchRequest(workload=OPTIONS)
    question = request.question(job, 10 * GIB, "lattice")
    # As the store gives it back.
    assert json.loads(json.dumps(question)) == question
    more = replace(request, max_trials=5, time_budget_seconds=1.0, workers=3, fresh=True, store="elsewhere.db")
    assert more.question(job, 10 * GIB, "lattice") == question


@pytest.mark.parametrize(
    "goal", [Goal(method="lora"), Goal(min_rank=16), Goal(allow=Effect.EXACT), Goal(allow=Effect.TRAINING)]
)
def test_another_goal_is_another_question(goal: Goal) -> None:
    job = make_job()
    request = SearchRequest(workload=OPTIONS)
    assert replace(request, goal=goal).question(job, GIB, "l") != request.question(job, GIB, "l")


def test_another_job_limit_or_lattice_is_another_question() -> None:
    request = SearchRequest(workload=OPTIONS)
    job = make_job()
    questions = [
        request.question(job, GIB, "lattice"),
        request.question(job, 2 * GIB, "lattice"),
        request.question(job, GIB, "another"),
        request.question(make_job(replace(OPTIONS, seed=1)), GIB, "lattice"),
        request.question(make_job(hardware=CPU), GIB, "lattice"),
        request.question(make_job(stack=replace(job.stack, torch="2.14.0")), GIB, "lattice"),
    ]
    assert all(a != b for i, a in enumerate(questions) for b in questions[:i])


def test_the_hub_id_of_a_model_of_the_catalog() -> None:
    assert hub_id("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M"
    assert hub_id("SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"


@pytest.mark.parametrize("name", ["small", "my,model"])
@pytest.mark.parametrize("form", ["{folder}", "{folder}/", "{folder}/config.json"])
@pytest.mark.parametrize("relative", [False, True])
def test_a_trainer_loads_the_folder_that_the_user_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str, relative: bool
) -> None:
    folder = model_in(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    written = form.format(folder=f"./{name}" if relative else folder)
    source = hub_id(written)
    assert Path(source).resolve() == folder.resolve()
    # A bare `name/config.json` would be taken for a repository of the hub.
    assert Path(source).is_dir()


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}


@pytest.mark.parametrize(("fields", "longest"), [({"n_positions": 96}, 96), ({}, 1024)])
def test_positions_by_another_name_or_by_default_are_a_limit_too(
    tmp_path: Path, fields: dict[str, int], longest: int
) -> None:
    """GPT-2 has `n_positions`, 1024 unless its config says otherwise, and embeddings for no more."""
    folder = model_in(tmp_path / "gpt2", {**GPT2, **fields})
    options = WorkloadOptions(model=str(folder), seq_len=longest)
    assert options.resolve()[1].seq_len == longest
    with pytest.raises(UsageError, match=f"seq-len {longest + 1} is longer than the {longest} positions of gpt2"):
        replace(options, seq_len=longest + 1).resolve()


def test_an_architecture_without_positions_has_no_limit(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "bloom", {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4})
    assert WorkloadOptions(model=str(folder), seq_len=100_000).resolve()[1].seq_len == 100_000


def test_a_workload_of_a_folder_is_named_after_it(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "small")
    _, workload = WorkloadOptions(model=str(folder), seq_len=64).resolve()
    assert workload.model == "small"
