"""Trials on emulated cards, as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
