"""`autofit bench replay --residuals`, and what bench refuses. Replays of searches: test_replay_command.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from unit.cli.conftest import Autofit
from unit.operations.made_trials import WORK, fits, make_trial, out_of_memory

from autofit.core.prediction import Prediction
from autofit.core.units import GIB
from autofit.store import Store

PREDICTION = Prediction(
    peak_allocated_bytes=9 * GIB,
    peak_reserved_bytes=12 * GIB,
    device_bytes=11 * GIB,
    step_seconds=0.5,
    calibrated_on=5,
    relative_error=0.1,
    work=WORK,
)
BENCH = ("bench", "replay", "--residuals")


@pytest.fixture
def judged(store_file: Path) -> Path:
    """A store with one trial that fits and one that does not, both predicted, and one that was not."""
    with Store.open(str(store_file)) as store:
        for outcome in (fits(10, 512, tokens=512), out_of_memory()):
            store.add(replace(make_trial({"method": "lora"}, outcome), prediction=PREDICTION))
        store.add(make_trial({"method": "full"}, fits(10, 512)))
    return store_file


def test_tables_of_errors_and_of_fit(autofit: Autofit, judged: Path) -> None:
    done = autofit(*BENCH)
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    assert done.out.startswith("2 trials with a prediction")
    titles = ["Peak allocated\n", "Peak reserved\n", "Device memory\n", "Fit\n"]
    assert [done.out.index(title) for title in titles] == sorted(map(done.out.index, titles))
    assert ["h100-80g", "all", "1", "+0.0%", "0.0%", "0.0%", "+0.0%"] in lines
    assert ["h100-80g", "method=lora", "1", "+10.0%", "10.0%", "10.0%", "+10.0%"] in lines
    assert ["h100-80g", "method=lora", "1", "+20.0%", "20.0%", "20.0%", "+20.0%"] in lines
    assert ["h100-80g", "method=lora", "1", "-50.0%", "50.0%", "50.0%", "-50.0%"] in lines
    assert ["h100-80g", "method=lora", "2", "1", "(50.0%)", "1", "0"] in lines
    assert "method=full" not in done.out
    assert "guessed from data sheets" not in done.out


def test_json_is_one_document(autofit: Autofit, judged: Path) -> None:
    document = autofit(*BENCH, "--json").document
    assert document["trials"] == 2
    first = document["groups"][0]
    assert (first["hardware"], first["technique"]) == ("h100-80g", "all")
    assert first["errors"]["device_bytes"]["median_absolute"] == pytest.approx(0.1)
    assert first["fit"] == {"judged": 2, "too_hopeful": 1, "too_careful": 0, "misjudged": 1}


def test_recorded_files_instead_of_the_store(autofit: Autofit, judged: Path) -> None:
    document = autofit(*BENCH, "--json").document
    assert autofit("db", "export", "trials.jsonl").code == 0
    judged.unlink()
    assert autofit(*BENCH, "--table", "trials.jsonl", "--json").document == document
    twice = autofit(*BENCH, "--table", "trials.jsonl", "--table", "trials.jsonl", "--json").document
    assert twice["trials"] == 2 * document["trials"]


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("replay", "--residuals", "--methods", "autofit"), 2, "leave --methods, --seeds, --keep, --jobs and"),
        (("replay", "--residuals", "--seeds", "3"), 2, "leave --methods, --seeds, --keep, --jobs and"),
        (("replay", "--residuals", "--table", "a.jsonl", "--store", "b.db"), 2, "exclude each other"),
        (("replay", "--residuals", "--table", "nowhere.jsonl"), 2, "nowhere.jsonl cannot be read"),
        (("replay", "--residuals", "--table", __file__), 2, "test_bench_command.py: line 1 "),
        (("record", "--model", "smollm2-135m"), 2, "Missing option '--out'"),
        (("record", "--model", "smollm2-135m", "--out", __file__), 2, "row 1: not JSON"),
        (("record", "--model", "no-such-model", "--out", "t.jsonl"), 2, "no-such-model"),
    ],
)
def test_what_is_refused(autofit: Autofit, judged: Path, arguments: tuple[str, ...], code: int, part: str) -> None:
    done = autofit("bench", *arguments)
    assert (done.code, done.out) == (code, "")
    assert part in done.err


def test_a_store_without_predictions(autofit: Autofit, filled: Path) -> None:
    done = autofit(*BENCH, "--json")
    assert (done.code, done.out) == (4, "")
    assert "holds no trial with a prediction" in done.err and len(done.err.splitlines()) == 1
    assert autofit("db", "export", "trials.jsonl").code == 0
    done = autofit(*BENCH, "--table", "trials.jsonl")
    assert (done.code, "trials.jsonl holds no trial with a prediction" in done.err) == (4, True)
