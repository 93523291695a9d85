"""The self-test, really run on this machine's CPU with a reduced list of checks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_model
from unit.operations.test_probing import made_probe
from unit.trial.fake_nvml import FakeCard, install

from autofit.cli.text.self_test import report_text
from autofit.core.device.probe import CONTEXT, Probe, ProbePart
from autofit.core.device.state import DeviceState, ProcessorState
from autofit.core.outcome import Fits, OutOfMemory, Trial
from autofit.core.units import MIB
from autofit.core.workload import Effect
from autofit.operations.self_test import device_under_test, running, size_checks, technique_checks
from autofit.operations.self_test.device_under_test import EMULATED, DeviceUnderTest
from autofit.operations.self_test.finding import Check, Finding, Report, Verdict
from autofit.operations.self_test.running import checks, self_test
from autofit.operations.self_test.technique_checks import tiny_figure
from autofit.operations.service.prediction_process import Overloaded, PredictionProcess
from autofit.techniques import AXES, complete
from autofit.trial.machine import detection as site

PATIENCE_SECONDS = 600.0
"""More than any check takes on a busy machine."""
CHOSEN = (
    *("precision=fp32", "precision=bf16-mixed", "precision=fp16-mixed", "checkpointing=full"),
    *("attention=flash", "sharding=ddp"),
    *("full at a real size", "memory limit"),
)


def patient(name: str) -> Check:
    """The check of that name, with room for a busy machine."""
    return replace(next(check for check in checks("cpu") if check.name == name), most_seconds=PATIENCE_SECONDS)


def saying_that_fp16_is_emulated(tested: DeviceUnderTest, until: float) -> Finding:
    return Finding(verdict=Verdict.WORKS, measured={EMULATED: {"fp16": "fp16 is emulated here"}})


def raising(tested: DeviceUnderTest, until: float) -> Finding:
    raise RuntimeError("a defect of the check")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Report]]:
    """Everything that a self-test with a few checks handed out to be kept, the last one complete."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(vocabulary=8192, hidden=256, layers=4)
    (folder / "config.json").write_text(json.dumps(model.config))
    made = (
        Check(name="probe", shows="", run=saying_that_fp16_is_emulated),
        Check(name="raises", shows="", run=raising),
    )
    handed: list[Report] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(size_checks, "ON_PROCESSOR", str(folder))
        selected = (*made, *map(patient, CHOSEN))
        patch.setattr(running, "checks", lambda kind: selected)
        self_test(device="cpu", time_limit_seconds=10 * PATIENCE_SECONDS, keep=handed.append)
    yield handed


@pytest.fixture(scope="module")
def found(kept: list[Report]) -> dict[str, Finding]:
    return {one.name: one.finding for one in kept[-1].checks}


def test_each_check_has_its_verdict(found: dict[str, Finding]) -> None:
    refused, unrun = ["attention=flash"], ["sharding=ddp"]
    wanted = dict.fromkeys(CHOSEN, Verdict.WORKS) | dict.fromkeys(refused, Verdict.REFUSED)
    wanted |= dict.fromkeys(unrun, Verdict.NOT_RUN) | {"precision=fp16-mixed": Verdict.EMULATED}
    assert {
        name: (found[name].verdict, found[name].reason) for name in CHOSEN if found[name].verdict != wanted[name]
    } == {}
    assert found["attention=flash"].reason == "attention=flash needs a CUDA device"
    assert found["precision=fp16-mixed"].reason == "fp16 is emulated here"


def test_a_check_that_raises_costs_only_itself(found: dict[str, Finding]) -> None:
    assert (found["raises"].verdict, found["raises"].reason) == (
        Verdict.FAILED,
        "RuntimeError: a defect of the check",
    )
    assert found["precision=fp32"].verdict is Verdict.WORKS, "the checks after them run"


def test_everything_known_is_handed_out_after_every_check(kept: list[Report]) -> None:
    assert [len(report.checks) for report in kept] == list(range(len(kept)))
    assert [len(report.pending) for report in kept] == list(reversed(range(len(kept))))
    assert "Cut off" in kept[3].summary and "Cut off" not in kept[-1].summary


def test_the_report_is_for_a_bug_report(kept: list[Report]) -> None:
    document = json.loads(json.dumps(kept[-1].to_json(), allow_nan=False))
    assert document["summary"].startswith(
        "4 of 6 techniques work; 1 is refused; 1 was not run; emulated: precision=fp16"
    )
    assert document["hardware"]["kind"] == "cpu" and document["stack"]["torch"]
    by_name = {check["name"]: check for check in document["checks"]}
    (trial,) = by_name["checkpointing=full"]["trials"]
    assert trial["config"]["checkpointing"] == "full" and trial["measurement"]["plain_gradient_norm"] > 0
    real = by_name["full at a real size"]
    assert real["predicted"]["device_bytes"] > 0 and real["trials"][0]["measurement"]["device_bytes"] > 0


def test_a_trial_that_was_disturbed_is_told(kept: list[Report]) -> None:
    report = kept[-1]
    document = report.to_json()
    ran = [trial for check in document["checks"] for trial in check["trials"] if trial["outcome"] == "fits"]
    assert ran and all(trial["device_state"]["seconds"] > 0.0 for trial in ran)
    hot = ProcessorState(cores=2, threads=2, busy_seconds=1.0, own_seconds=1.0, stolen_seconds=0.0, heat_events=1)
    one = next(one for one in report.checks if one.finding.trials)
    (trial, *_) = one.finding.trials
    disturbed = replace(trial, device_state=DeviceState(seconds=1.0, processor=hot))
    changed = replace(report, checks=(replace(one, finding=replace(one.finding, trials=(disturbed,))),))
    assert changed.summary.endswith("Speeds may be off in 1 of 1 trials (the processor throttled: heat).")
    assert changed.to_json()["checks"][0]["trials"][0]["doubts"] == ["the processor throttled: heat"]


def test_the_memory_limit_is_shown_on_both_sides(found: dict[str, Finding]) -> None:
    need = found["full at a real size"].trials[-1]
    below, above = found["memory limit"].trials
    assert isinstance(need.outcome, Fits)
    assert below.memory_limit_bytes < need.outcome.measurement.device_bytes < above.memory_limit_bytes
    assert isinstance(below.outcome, OutOfMemory) and isinstance(above.outcome, Fits)


def judged(trial: Trial, plain: Trial, effect: Effect, predicted: dict[str, Any] | None = None) -> Finding:
    """The finding of a check whose trial comes to this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceUnderTest, "trial", lambda *_, **__: trial)
        patch.setattr(DeviceUnderTest, "predicted", lambda *_, **__: predicted or {})
        tested = DeviceUnderTest(device="cpu")
        return technique_checks._against(tested, trial.config, plain, effect, math.inf)


def test_what_computes_something_else_differs(found: dict[str, Finding]) -> None:
    plain = found["precision=bf16-mixed"].trials[-1]
    other = found["checkpointing=full"].trials[-1]
    assert judged(other, plain, Effect.EXACT).verdict is Verdict.WORKS
    wrong = judged(_learning_more(other), plain, Effect.EXACT)
    assert wrong.verdict is Verdict.DIFFERS and "more than 2.0% from" in wrong.reason
    assert judged(_learning_more(other), plain, Effect.NUMERICS).verdict is Verdict.WORKS


def test_an_error_of_the_estimator_fails_the_check_that_it_was_asked_for(found: dict[str, Finding]) -> None:
    trial = found["checkpointing=full"].trials[-1]
    for defect, verdict in ((True, Verdict.FAILED), (False, Verdict.WORKS)):
        finding = judged(trial, trial, Effect.EXACT, {"error": "no such layer", "defect": defect})
        assert finding.verdict is verdict and ("no such layer" in finding.reason) is defect


def test_what_an_emulated_card_computes_is_not_compared(kept: list[Report], found: dict[str, Finding]) -> None:
    """It computes nothing: every loss and every norm is 0."""
    plain, other = (found[name].trials[-1] for name in ("precision=bf16-mixed", "checkpointing=full"))
    there = replace(plain.hardware, name="emulated-h100-80g")
    for wrong in (_learning_more(other), _computing_nothing(other)):
        trial, beside = replace(wrong, hardware=there), replace(_computing_nothing(plain), hardware=there)
        assert judged(trial, beside, Effect.EXACT).verdict is Verdict.WORKS
        assert tiny_figure(trial, beside) == tiny_figure(trial, None)
    assert "losses and gradients were not checked" in report_text(replace(kept[-1], hardware=there))
    assert "not checked" not in report_text(kept[-1])


def _computing_nothing(trial: Trial) -> Trial:
    assert isinstance(trial.outcome, Fits)
    measurement = trial.outcome.measurement
    nothing = replace(
        measurement, losses=(0.0,) * len(measurement.losses), gradient_norms=(0.0,) * len(measurement.gradient_norms)
    )
    return replace(trial, outcome=Fits(measurement=nothing))


def _learning_more(trial: Trial) -> Trial:
    assert isinstance(trial.outcome, Fits)
    measurement = trial.outcome.measurement
    return replace(
        trial,
        outcome=Fits(measurement=replace(measurement, losses=(measurement.losses[0], 0.5 * measurement.losses[1]))),
    )


def test_what_no_longer_fits_the_time_limit_is_listed_as_not_run() -> None:
    report = self_test(device="cpu", time_limit_seconds=1.0)
    verdicts = {one.name: one.finding.verdict for one in report.checks}
    assert verdicts["precision=fp32"] is verdicts["compile=true"] is Verdict.NOT_RUN
    assert verdicts["attention=flash"] is Verdict.REFUSED, "what cannot work here is known without a trial"
    assert set(verdicts.values()) == {Verdict.NOT_RUN, Verdict.REFUSED}
    assert not report.pending and not report.bad


def test_every_value_of_every_axis_is_checked() -> None:
    named = {check.name for check in checks("cpu") if check.technique}
    for axis in AXES:
        for value in () if axis.name == "batching" else axis.values:  # a check's sequences are all full
            if value != axis.recipe or axis.name == "precision":
                written = str(value).lower() if isinstance(value, bool) else value
                assert f"{axis.name}={written}" in named or value == "none"


def test_an_estimate_that_hangs_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = DeviceUnderTest(device="cpu")
    monkeypatch.setattr(device_under_test, "PREDICTION_SECONDS", PATIENCE_SECONDS)
    try:
        late = tested.predicted(tested.job(), complete({}), until=0.0)
        assert late == {"error": "no estimate after 0 s", "defect": False}
        assert tested.predicted(tested.job(), complete({}), until=math.inf)["device_bytes"] > 0
    finally:
        tested.close()


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (Overloaded("too much", remedy="none"), "the estimator's process ended"),
        (ValueError("no such layer"), "ValueError: no such layer"),
    ],
)
def test_an_estimate_that_fails_is_a_defect(raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PredictionProcess, *asked: object, seconds: float) -> None:
        raise raised

    monkeypatch.setattr(PredictionProcess, "call", fail)
    tested = DeviceUnderTest(device="cpu")
    assert tested.predicted(tested.job(), complete({}), until=math.inf) == {"error": said, "defect": True}


def test_an_estimate_takes_the_context_that_the_probe_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tested, asked = DeviceUnderTest(device="cpu"), []
    monkeypatch.setattr(PredictionProcess, "call", lambda self, f, job, *_, seconds: asked.append(job) or {})
    tested.predicted(tested.job(), complete({}), until=math.inf)
    probe = made_probe(parts=(ProbePart(name="context", seconds=0.1, seconds_per={}, figures={CONTEXT: 803e6}),))
    tested.findings["probe"] = Finding(verdict=Verdict.WORKS, measured={"probe": probe.to_json()})
    tested.predicted(tested.job(), complete({}), until=math.inf)
    assert [job.context_bytes for job in asked] == [None, 768 * MIB]


def test_a_model_that_was_not_predicted_may_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, on which no estimate is ready in time: that is no defect."""
    monkeypatch.setattr(device_under_test, "PREDICTION_SECONDS", 0.0)
    tested = DeviceUnderTest(device="cpu")
    tested.limit = 256 * MIB
    try:
        result = next(size_checks.methods()).run(tested, time.monotonic() + PATIENCE_SECONDS)
    finally:
        tested.close()
    assert result.verdict is Verdict.NOT_RUN, result.reason
    assert "too large here, and was not predicted: no estimate after 0 s" in result.reason


def test_the_file_is_replaced_whole_and_a_bad_place_is_refused_at_once(kept: list[Report], tmp_path: Path) -> None:
    from autofit.cli.text.self_test import keeper
    from autofit.core.errors import UsageError

    file = tmp_path / "report.json"
    file.write_text("of an earlier run")
    keep = keeper(str(file))
    for report in kept[:3]:
        keep(report)
        assert json.loads(file.read_text())["pending"] == list(report.pending)
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(UsageError, match="cannot be written"):
        keeper(str(tmp_path / "absent" / "report.json"))(kept[0])
    with pytest.raises(UsageError, match="needs a file"):
        keeper("-")


def test_cards_that_differ_do_not_keep_a_self_test_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    built = site._TorchBuild(version="2.13.0", cuda="13.0", hip=None)
    monkeypatch.setattr(site, "_torch_build", lambda: built)
    h100, a100 = FakeCard("GPU-a"), FakeCard("GPU-c", name="NVIDIA A100-SXM4-40GB", total=40960 * 1024**2)
    for cards, ranks in (((h100, a100), 1), ((h100, FakeCard("GPU-b")), 2), ((h100,), 1)):
        install(monkeypatch, *cards)
        assert DeviceUnderTest(device="cuda").ranks == ranks


def test_the_probe_of_a_self_test_is_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "load", lambda name: tiny_model())
    result = running._probe(DeviceUnderTest(device="cpu"), time.monotonic() + PATIENCE_SECONDS)
    assert result.verdict is Verdict.WORKS and result.reason == ""
    probe = Probe.from_json(result.measured["probe"])
    assert probe.seconds_per and probe.steps and probe.device_state is not None
