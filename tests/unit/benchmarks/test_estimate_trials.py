"""Predictions beside measurements: what is compared, and what counts as reached."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import estimate_trials
import pytest
from unit.operations.made_trials import HARDWARE, fits, make_job, make_trial

from autofit.core.outcome import Crashed, Fits, OutOfMemory, Trial
from autofit.core.prediction import Prediction
from autofit.operations import read_table

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TABLE = BENCHMARKS / "recorded" / "cpu-2c-every-axis.jsonl"


@pytest.fixture(scope="module")
def rows() -> Any:
    """Two trials that fitted and one out of memory, each with its prediction."""
    trials = [t for t in read_table(TABLE).trials if isinstance(t.outcome, Fits) and t.config["compile"] is False][:3]
    return estimate_trials.compared(
        [*trials[:2], replace(trials[2], outcome=OutOfMemory(reason="no room", phase="forward"))]
    )


def test_tau_counts_pairs() -> None:
    assert estimate_trials.kendall([1, 2, 3], [10, 20, 30]) == 1
    assert estimate_trials.kendall([3, 2, 1], [10, 20, 30]) == -1
    assert estimate_trials.kendall([1, 3, 2], [10, 20, 30]) == pytest.approx(1 / 3)
    assert estimate_trials.kendall([1, 1, 2], [10, 20, 30]) == pytest.approx(2 / 3)


def test_of_every_config_the_last_trial_in_full_counts() -> None:
    job = make_job(hardware=replace(HARDWARE, kind="cpu", cores=2))
    early = fits(1, 30)
    early = Fits(measurement=replace(early.measurement, stopped_early=True))
    trials = [
        make_trial({"rank": 8, "method": "lora"}, outcome, job=job) for outcome in (fits(1, 10), fits(1, 20), early)
    ]
    other = make_trial({"rank": 16, "method": "lora"}, early, job=job)
    short = make_trial({"rank": 32, "method": "lora"}, OutOfMemory(reason="no room", phase="forward"), job=job)
    crashed = replace(short, config=make_trial({}, fits(1, 1)).config, outcome=Crashed(reason="killed"))
    elsewhere = make_trial({}, fits(1, 1))
    assert estimate_trials.latest([*trials, other, elsewhere]) == [[trials[1], other], [elsewhere]]
    assert estimate_trials.latest([short, crashed]) == [[short]]
    on_host = replace(short, outcome=OutOfMemory(reason="the host is out of memory", host=True))
    assert estimate_trials.latest([crashed, on_host]) == []


def test_every_trial_stands_beside_its_prediction_after_the_others(rows: Any) -> None:
    assert [row.is_timed for row in rows] == [True, True, False]
    found = [row.predicted([other for other in rows[:2] if other is not row]) for row in rows]
    assert [trial.prediction.calibrated_on for trial in found] == [1, 1, 2]
    figures = estimate_trials.figures_of("made", found, 1, {})
    assert figures["fit"] == {"judged": 3, "too_hopeful": 1, "too_careful": 0, "misjudged": 1}
    sizes = [(row.estimate.device_bytes, row.measured.device_bytes) for row in rows[:2]]
    errors = [abs(said / measured - 1) for said, measured in sizes]
    targets = {target["figure"]: target for target in figures["targets"]}
    assert targets["device_bytes median_absolute"]["found"] == pytest.approx(sum(errors) / 2)
    assert targets["fit_misjudged"] == {
        "figure": "fit_misjudged", "found": 1 / 3, "target": 0.02, "reached": False,
    }  # fmt: skip
    assert estimate_trials.figures_of("made", found, 3, {})["targets"] == []


def predicted(off: float, *, kind: str, fits_as_predicted: bool = True) -> Trial:
    """A trial whose memory and time are predicted `off` times as large as measured."""
    trial = make_trial({}, fits(20, 512, allocated=10), job=make_job(hardware=replace(HARDWARE, kind=kind)))
    assert isinstance(trial.outcome, Fits)
    m = trial.outcome.measurement
    said = Prediction(
        peak_allocated_bytes=int(off * m.peak_allocated_bytes),
        peak_reserved_bytes=int(off * m.peak_reserved_bytes),
        device_bytes=int(off * m.device_bytes) if fits_as_predicted else 10**15,
        step_seconds=off * m.step_seconds.median,
        calibrated_on=3,
        relative_error=0.1,
        memory_error=1e-12,  # as one by formula, which states no version
    )
    return replace(trial, prediction=said)


@pytest.mark.parametrize(
    ("off", "misjudged", "missed"),
    [
        (1.009, 1, []),
        (0.985, 0, ["peak_allocated_bytes median_absolute"]),
        (
            1.04,
            2,
            [
                "peak_allocated_bytes median_absolute",
                "peak_allocated_bytes p95_absolute",
                "peak_reserved_bytes median_absolute",
                "fit_misjudged",
            ],
        ),
    ],
)
def test_a_gpus_figures_stand_beside_their_targets(off: float, misjudged: int, missed: list[str]) -> None:
    trials = [predicted(off, kind="cuda", fits_as_predicted=place >= misjudged) for place in range(100)]
    targets = estimate_trials.figures_of("made", trials, 60, {})["targets"]
    assert len(targets) == len(estimate_trials.TARGETS["cuda"])
    assert [target["figure"] for target in targets if not target["reached"]] == missed


def test_a_processors_ranks_have_a_target() -> None:
    more: dict[str, Any] = {
        "calibrated tokens_per_second": {"median": 0.16, "worst": 0.2},
        "calibrated kendall_tau": {"median": 0.85, "worst": 0.1},
    }
    targets = estimate_trials.figures_of("made", [predicted(1.0, kind="cpu")], 1, more)["targets"]
    assert [target["reached"] for target in targets] == [True, True, False, True]


@pytest.mark.parametrize("least", [1, 60])
def test_a_missed_target_and_nothing_to_judge_are_told_by_the_exit_status(
    rows: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: int
) -> None:
    trials = [*(row.trial for row in rows[:2]), replace(rows[2].trial, outcome=Crashed(reason="killed by signal 9"))]
    monkeypatch.setattr(estimate_trials, "read", lambda table: (trials, None))
    monkeypatch.setattr(estimate_trials, "compared", lambda group, probe: [row for row in rows if row.trial in group])
    file = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["estimate_trials.py", "t.jsonl", "--least", str(least), "--json", str(file)])
    assert estimate_trials.main() == 1
    assert [table["table"] for table in json.loads(file.read_text())["tables"]] == ["t.jsonl", "all on cpu"]


def test_a_distribution_by_hand() -> None:
    errors = [0.01 * number for number in range(1, 20)] + [-0.5]
    assert estimate_trials.distribution(errors) == {
        "count": 20,
        "median": pytest.approx(0.095),
        "median_absolute": pytest.approx(0.105),
        "p95_absolute": pytest.approx(0.19),
        "worst": -0.5,
    }


def test_errors_by_hand() -> None:
    trial = predicted(1.1, kind="cuda")
    assert trial.prediction is not None
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "step_seconds")
    assert estimate_trials.errors(trial) == dict.fromkeys(names, pytest.approx(0.1))
    older = replace(trial, prediction=replace(trial.prediction, peak_reserved_bytes=None, calibrated_on=0))
    assert set(estimate_trials.errors(older)) == {"peak_allocated_bytes", "device_bytes"}
    assert estimate_trials.errors(replace(trial, outcome=OutOfMemory(reason="no room", phase="forward"))) == {}


def test_fit_is_misjudged_both_ways() -> None:
    fitted, ran_out = predicted(1.0, kind="cuda"), OutOfMemory(reason="no room", phase="forward")
    foreseen = predicted(1.0, kind="cuda", fits_as_predicted=False)
    trials = [fitted, foreseen, replace(fitted, outcome=ran_out), replace(foreseen, outcome=ran_out)]
    assert estimate_trials.fit(trials) == {"judged": 4, "too_hopeful": 1, "too_careful": 1, "misjudged": 2}


def test_recorded_trials_are_all_of_one_workload() -> None:
    groups = {table.name: estimate_trials.latest(estimate_trials.read(table)[0]) for table in estimate_trials.RECORDED}
    assert {len(found) for found in groups.values()} == {1}
    assert len(groups) >= 4 and all(len(found[0]) > 10 for found in groups.values())
