"""Trials on emulated cards, as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient

from autofit import estimate
from autofit.api.app import create_app
from autofit.catalog.hardware import card
from autofit.cli.text.phrases import EMULATED
from autofit.core.device.probe import CONTEXT
from autofit.core.device.work_kinds import product
from autofit.store import Store
from tests.emulated_card.cards import CONTEXT_BYTES, MOST_CARDS, Machine
from tests.here import run_here

if TYPE_CHECKING:
    from tests.emulated_card.conftest import Start

SHARDED = (
    ("sharding=zero3,precision=fp32", None),
    ("sharding=fsdp", None),
    ("sharding=ddp,precision=bf16,loss=chunked", "trl"),
)
"""With fp32, both gradients of the embedding that is the head, too, are most of what is there at the peak. trl's DDP
holds all gradients twice."""
CLOSE = 0.005
"""How near the prediction is."""

JOB = ("--model", "smollm2-135m", "--seq-len", "64", "--global-batch", "2")


def autofit(*words: str, store: Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command, with a store of its own."""
    command = [sys.executable, "-m", "autofit", *words]
    own = {**os.environ, **(environment or {}), "AUTOFIT_STORE": str(store)}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("sharding", "trainer"), SHARDED)
def test_two_ranks(home: Path, tmp_path: Path, sharding: str, trainer: str | None) -> None:
    """Each rank sees its card by UUID, which DeepSpeed's own question about free memory cannot read. Both evaluate too,
    which gathers what is sharded."""
    asked = ("trial", *JOB, "--devices", "2", "--config", sharding, "--eval-batch", "1", "--json")
    asked += ("--for", trainer) if trainer else ()
    with Machine(home, "a10g", "a10g") as machine:
        done = autofit(*asked, store=tmp_path / "store.db", environment=machine.environment)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["outcome"] == "fits" and found["measurement"]["phase_peaks"]["evaluation"]
        assert [machine.held_bytes(place) for place in range(2)] == [0, 0]
    job = {"seq_len": 64, "global_batch": 2, "devices": 2, "eval_batch": 1, "hardware": "a10g", "trainer": trainer}
    said = estimate("smollm2-135m", sharding, **job, advice=False)
    assert abs(said.peak_allocated_bytes / found["measurement"]["peak_allocated_bytes"] - 1.0) < CLOSE


@pytest.mark.parametrize(
    ("name", "trainer", "tokens", "asked_for"),
    [
        ("t4", None, 512, {"method": "lora", "precision": "fp16-mixed"}),
        # Hidden states are fp32 there.
        ("a10g", "transformers", 1024, {"method": "qlora", "precision": "bf16", "loss": "chunked"}),
    ],
)
def test_no_scores_of_repeated_keys_are_kept(
    name: str, trainer: str | None, tokens: int, asked_for: dict[str, str], home: Path, tmp_path: Path
) -> None:
    """On a card before Ampere, and in fp32 on any."""
    values = {**asked_for, "micro_batch": 2, "attention": "efficient"}
    written = ",".join(f"{axis}={value}" for axis, value in values.items())
    habits = ("--for", trainer) if trainer else ()
    with Machine(home, name) as machine:
        asked = ("trial", *JOB[:2], "--seq-len", str(tokens), *JOB[4:], *habits, "--config", written, "--json")
        done = autofit(*asked, store=tmp_path / "store.db", environment=machine.environment)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["measurement"]["peak_allocated_bytes"]
    job = {"seq_len": tokens, "global_batch": 2, "hardware": name, "trainer": trainer, "advice": False}
    said = {each: estimate("smollm2-135m", values | {"attention": each}, **job) for each in ("efficient", "sdpa")}
    assert abs(said["efficient"].peak_allocated_bytes / measured - 1.0) < CLOSE
    assert said["sdpa"].peak_allocated_bytes > 1.1 * measured


def recorded(home: Path, folder: Path, space: Mapping[str, list[object]], *job: str, **environment: str) -> list[Any]:
    """What each config of a space takes on a card, all in one process."""
    (folder / "space.yaml").write_text(json.dumps({"purpose": "A test.", "axes": space}))
    with Machine(home, "a10g") as machine:
        words = ("bench", "record", *job, "--space", str(folder / "space.yaml"), "--out", str(folder / "out.jsonl"))
        own = {**machine.environment, **environment}
        done = autofit(*words, "--in-place", store=folder / "store.db", environment=own)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()[1:]]
    assert all(row["outcome"] == "fits" for row in rows), rows
    return rows


def test_mlps_in_tiles_take_what_is_predicted(home: Path, tmp_path: Path) -> None:
    """Three tiles of a model that is 576 wide, the last with fewer tokens."""
    fixed = {"precision": ["bf16-mixed"], "micro_batch": [1], "loss": ["chunked"], "kernels": ["liger"]}
    space = {"method": ["lora", "full"], **fixed, "mlp": ["tiled"]}
    rows = recorded(home, tmp_path, space, *JOB[:2], "--seq-len", "1600", *JOB[4:])
    assert len(rows) == 2
    job = {"seq_len": 1600, "global_batch": 2, "hardware": "a10g", "advice": False}
    for row in rows:
        measured = row["measurement"]["peak_allocated_bytes"]
        tiled, whole = (estimate("smollm2-135m", {**row["config"], "mlp": mlp}, **job) for mlp in ("tiled", "whole"))
        assert abs(tiled.peak_allocated_bytes / measured - 1.0) < 0.001
        assert whole.peak_allocated_bytes > 1.1 * measured


def test_an_update_within_the_backward_pass_takes_what_is_predicted(home: Path, tmp_path: Path) -> None:
    """In each phase, of a head that is the embedding."""
    optimizers = ["adafactor", "lion-8bit", "adamw"]
    fixed = {"method": ["full"], "precision": ["bf16"], "micro_batch": [2], "update": ["in-backward"]}
    rows = recorded(home, tmp_path, {**fixed, "optimizer": optimizers}, *JOB)
    assert len(rows) == len(optimizers)
    job = {"seq_len": 64, "global_batch": 2, "hardware": "a10g", "advice": False}
    for row in rows:
        said = estimate("smollm2-135m", row["config"], **job)
        for phase in ("forward", "backward", "optimizer"):
            assert abs(said.phase_peaks[phase] / row["measurement"]["phase_peaks"][phase] - 1.0) < CLOSE / 5
        after = estimate("smollm2-135m", {**row["config"], "update": "after-backward"}, **job)
        assert after.peak_allocated_bytes - said.peak_allocated_bytes > 0.5 * after.breakdown["weights"]


TOLD = """
from transformers import masking_utils
masking_utils.is_tracing = lambda tensor=None: True
"""
"""Has transformers build the mask of sequences that share a row without asking the card whether any do: it says no."""


def test_the_mask_that_keeps_sequences_apart_takes_what_is_predicted(home: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TOLD)
    (tmp_path / "lengths").write_text("300\n700\n1000\n")
    space = {"method": ["lora"], "micro_batch": [4], "attention": ["sdpa", "eager"], "batching": ["padding-free"]}
    asked = ("--model", "smollm2-135m", "--seq-len", "1024", "--global-batch", "4", "--lengths")
    with Machine(home, "a10g") as machine:
        path = os.pathsep.join([str(tmp_path), machine.environment["PYTHONPATH"], *sys.path])
    rows = recorded(home, tmp_path, space, *asked, str(tmp_path / "lengths"), PYTHONPATH=path)
    assert len(rows) == 2
    job = {"seq_len": 1024, "global_batch": 4, "hardware": "a10g", "lengths": [300, 700, 1000]}
    for row in rows:
        apart, packed = (
            estimate("smollm2-135m", {**row["config"], "batching": batching}, **job, advice=False)
            for batching in ("padding-free", "packed")
        )
        assert abs(apart.peak_allocated_bytes / row["measurement"]["peak_allocated_bytes"] - 1.0) < CLOSE / 10
        eager = row["config"]["attention"] == "eager"
        assert eager or apart.peak_allocated_bytes > (1 + CLOSE) * packed.peak_allocated_bytes


VIEWED = """
    import json, pickle
    from torch.cuda import _memory_viz as viewer
    with open(os.environ["SNAPSHOT"], "rb") as file:
        snapshot = pickle.load(file)
    drawn = [len(draw(snapshot)) for draw in (viewer.segsum, viewer.trace, viewer.trace_plot, viewer.segment_plot)]
    print(json.dumps([sum(segment["total_size"] for segment in snapshot["segments"]), drawn]))
"""


def test_torchs_viewer_opens_a_trials_snapshot(home: Path, tmp_path: Path, start: Start) -> None:
    """It draws what was allocated, and finds as much reserved as the trial did."""
    asked = ("trial", *JOB, "--config", "micro_batch=1", "--snapshot", str(tmp_path / "snapshot"), "--json")
    with Machine(home, "h100-80g") as machine:
        done = autofit(*asked, store=tmp_path / "store.db", environment=machine.environment)
        assert done.returncode == 0, done.stderr
        reserved, drawn = start(machine, VIEWED, SNAPSHOT=str(tmp_path / "snapshot")).answer()
    assert json.loads(done.stdout)["measurement"]["peak_reserved_bytes"] == reserved
    assert all(drawn)


def test_a_card_without_virtual_memory(home: Path, tmp_path: Path) -> None:
    """A trial there does without expandable segments, and says so."""
    with Machine(home, "rtx-4090:no-vmm") as machine:
        asked = ("trial", *JOB, "--config", "method=full,micro_batch=2", "--json")
        done = autofit(*asked, store=tmp_path / "store.db", environment=machine.environment)
    found = json.loads(done.stdout)
    assert found["outcome"] == "fits", found
    assert found["measurement"]["expandable_segments"] is False


def test_doctor_trains_on_a_card_without_bf16(home: Path, tmp_path: Path) -> None:
    with Machine(home, "t4") as machine:
        done = autofit("doctor", "--no-ray", store=tmp_path / "store.db", environment=machine.environment)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^device +ok +emulated-t4: Tesla T4", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^trial +ok +a small trial ran in", done.stdout, re.MULTILINE), done.stdout


SEARCH = ("search", *JOB, "--method", "lora", "--space", "smoke", "--max-trials", "2")


@pytest.fixture(scope="module")
def searched(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A search with more cards than processors, all of which it gives back, and its store."""
    store, cards = tmp_path_factory.mktemp("searched") / "store.db", min((os.cpu_count() or 1) + 1, MOST_CARDS)
    with Machine(home, *["h100-80g"] * cards) as machine:
        done = autofit(*SEARCH, store=store, environment=machine.environment)
        assert not any(machine.held_bytes(card) or machine.processes(card) for card in range(cards))
    return done, store


def test_a_worker_for_each_card(searched: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """More cards than processors do no harm."""
    done, _ = searched
    assert done.returncode == 0, done.stderr
    assert "on emulated-h100-80g" in done.stdout and EMULATED in done.stdout


def test_a_store_answers_for_emulated_cards_and_says_so(
    searched: tuple[subprocess.CompletedProcess[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On the command line and over HTTP; it has nothing for a real card."""
    _, store = searched
    monkeypatch.setenv("AUTOFIT_STORE", str(store))
    with Store.open(str(store)) as opened, TestClient(create_app(opened)) as client:
        for command, route in (("recommend", "recommendation"), ("frontier", "frontier")):
            asked = (command, *JOB, "--method", "lora", "--hardware")
            own, real = (run_here((*asked, card), capfd) for card in ("emulated-h100-80g", "h100-80g"))
            assert own[0] == 0 and EMULATED in own[1], own
            assert real[0] == 4 and "nothing" in real[2], real
            only = "provenance=measured&" if route == "recommendation" else ""
            address = f"/v1/{route}?{only}model=smollm2-135m&seq_len=64&global_batch=2&method=lora&hardware="
            answers = [client.get(address + card) for card in ("emulated-h100-80g", "h100-80g")]
            assert answers[0].json()["hardware"]["name"] == "emulated-h100-80g"
            assert answers[1].status_code == 404, answers[1].text


def test_cards_of_two_kinds_are_not_mixed(home: Path, tmp_path: Path) -> None:
    """The error says which there are, and how one is chosen."""
    with Machine(home, "a10g", "t4") as machine:
        done = autofit(*SEARCH, store=tmp_path / "store.db", environment=machine.environment)
    assert done.returncode == 4
    assert "NVIDIA A10G (24 GiB), Tesla T4 (16 GiB)" in done.stderr and "CUDA_VISIBLE_DEVICES" in done.stderr


def test_a_probe_measures_by_the_cards_clock(home: Path, tmp_path: Path) -> None:
    """Rates are those of its data sheet, roughly; what the context takes is known from then on."""
    with Machine(home, "t4") as machine:
        done = autofit(
            *("probe", "--model", "smollm2-135m", "--json"),
            store=tmp_path / "store.db",
            environment=machine.environment,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not [part["failure"] for part in found["parts"] if part["failure"]]
    figures = {name: value for part in found["parts"] for name, value in part["figures"].items()}
    assert figures[CONTEXT] == CONTEXT_BYTES
    rates = {kind: rate for part in found["parts"] for kind, rate in part["seconds_per"].items()}
    sheet = card("t4")
    for number_format in ("fp32", "fp16"):
        said = rates[product(number_format, "nt")] * sheet.peak_flops[number_format]
        assert 0.1 < said < 20.0, number_format
