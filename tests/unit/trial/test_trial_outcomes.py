"""Whatever a child does costs one trial and no more: its outcome is typed, and the next trial runs."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import tiny_job, tiny_model, tiny_request
from patience import within
from unit.trial.entries import CRAWLING_SECONDS, LATER_SECONDS

from autofit.catalog.models import Model
from autofit.core.lattice import Config
from autofit.core.outcome import PHASES, Crashed, Diverged, Fits, Outcome, OutOfMemory, TimedOut
from autofit.core.units import MIB
from autofit.techniques import complete
from autofit.trial.measure.figures import LEAK_STEPS
from autofit.trial.measure.measurement import shares_of_a_step
from autofit.trial.measure.pace import ONCE_SECONDS, Pace
from autofit.trial.process import child_process, runner
from autofit.trial.process.runner import TrialRunner
from autofit.trial.request import Rival, TrialRequest


@pytest.fixture
def goes_on(warm: TrialRunner) -> Iterator[None]:
    """Requires after the test that the same fork server runs the next trials, of which a Python error costs one."""
    warm.start()
    before = warm._process
    yield
    for _ in range(2):
        outcome = warm.attempt(misbehaving("raises")).outcome
        assert isinstance(outcome, Crashed) and outcome.exit_code == 1 and "kaboom" in outcome.stderr_tail
    assert warm._process is before, "no new one was needed"


def misbehaving(name: str, config: Config | None = None, **request: Any) -> TrialRequest:
    """A request to the fork server whose child does what the entry of that name does."""
    return tiny_request(
        config, job=tiny_job(replace(tiny_model(), name=name)), **{"deadline_seconds": 120.0, **request}
    )


def test_evaluation_counts_and_may_be_what_does_not_fit(warm: TrialRunner) -> None:
    """Training takes a few MiB, all logits of 8 sequences half a GiB."""
    job = tiny_job(tiny_model(vocabulary=32768), seq_len=256, eval_batch=8)
    config = complete({"micro_batch": 1, "precision": "fp32", "loss": "chunked"})
    whole = config.replace(loss="full")
    light, heavy = (warm.attempt(tiny_request(each, job=job)).outcome for each in (config, whole))
    assert isinstance(light, Fits) and isinstance(heavy, Fits), (light, heavy)
    peaks = heavy.measurement.phase_peaks
    assert peaks["evaluation"] > 400 * MIB > max(peaks[phase] for phase in PHASES)
    assert heavy.measurement.device_bytes == peaks["evaluation"]
    assert light.measurement.phase_peaks["evaluation"] < 200 * MIB
    short = warm.attempt(tiny_request(whole, job=job, memory_limit_bytes=300 * MIB)).outcome
    assert isinstance(short, OutOfMemory) and short.phase == "evaluation", short


def test_speed_is_of_the_datas_tokens_and_memory_of_the_longest(warm: TrialRunner) -> None:
    full = tiny_job(tiny_model(vocabulary=32768), seq_len=256)
    data = replace(full, workload=replace(full.workload, lengths=(*[32] * 9, 256)))
    config = complete({"micro_batch": 2, "precision": "fp32"})
    of_full, of_data = (warm.attempt(tiny_request(config, job=job)).outcome for job in (full, data))
    assert isinstance(of_full, Fits) and isinstance(of_data, Fits), (of_full, of_data)
    m = of_data.measurement
    assert data.workload.tokens_per_step < 0.3 * full.workload.tokens_per_step
    assert m.tokens_per_second == pytest.approx(data.workload.tokens_per_step / m.step_seconds.median)
    # The longest batch is run, too; blocks of other sizes may be left between its own.
    assert 0.9 <= m.device_bytes / of_full.measurement.device_bytes <= 1.5
    assert m.step_seconds.median < of_full.measurement.step_seconds.median
    # A limit under which sequences of the mean length train ends at the longest.
    typical = replace(full, workload=replace(full.workload, seq_len=64))
    limit = {"memory_limit_bytes": 240 * MIB}
    of_typical, of_data = (warm.attempt(tiny_request(config, job=job, **limit)).outcome for job in (typical, data))
    assert isinstance(of_typical, Fits) and isinstance(of_data, OutOfMemory), (of_typical, of_data)


def test_limit_is_enforced_and_the_next_trial_runs(warm: TrialRunner) -> None:
    job = tiny_job(tiny_model(vocabulary=32768), seq_len=256)
    big = complete({"micro_batch": 4, "precision": "fp32"})
    outcome = warm.attempt(tiny_request(big, job=job, memory_limit_bytes=200 * MIB)).outcome
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.phase in ("forward", "backward", "optimizer")
    assert outcome.requested_bytes is not None and outcome.requested_bytes > MIB
    assert not outcome.host
    assert isinstance(warm.attempt(tiny_request()).outcome, Fits)
    larger = warm.attempt(tiny_request(big, job=job)).outcome
    assert isinstance(larger, Fits)
    assert larger.measurement.device_bytes > 200 * MIB


@pytest.mark.usefixtures("goes_on")
def test_sigkill_by_anybody_but_the_kernel_says_nothing_about_the_config(warm: TrialRunner) -> None:
    outcome = warm.attempt(misbehaving("killed")).outcome
    assert (outcome.kind, getattr(outcome, "signal", None)) == ("crashed", "SIGKILL")
    assert isinstance(outcome, Crashed) and outcome.transient
    assert outcome.phase == "backward"


@pytest.mark.usefixtures("goes_on")
def test_hang_ends_at_the_deadline_and_tells_what_it_has_shown(warm: TrialRunner) -> None:
    outcome, deadline = within(
        lambda seconds: warm.attempt(misbehaving("half_way", deadline_seconds=seconds)).outcome,
        lambda outcome: len(getattr(outcome, "timed_seconds", ())) == 2,
        *(1.0, 10.0),
    )
    assert isinstance(outcome, TimedOut)
    assert (outcome.deadline_seconds, outcome.phase) == (deadline, "backward")
    assert (outcome.peak_bytes, outcome.timed_seconds) == (5000, (2.0, 4.0))


@pytest.mark.usefixtures("goes_on")
def test_a_trial_that_is_interrupted_tells_what_it_has_shown(warm: TrialRunner, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(warm.attempt, misbehaving("half_way", profile=str(begun)))
        while not begun.exists() and not running.done():
            time.sleep(0.05)
        warm.stop(interrupted=True)
        attempt = running.result()
    assert isinstance(attempt.outcome, TimedOut) and attempt.outcome.peak_bytes == 5000, attempt
    assert "interrupted" in attempt.outcome.reason
    assert attempt.device_state is not None and attempt.device_state.seconds > 0.0, "what it shows may be in doubt"


def test_no_grandchild_survives(warm: TrialRunner) -> None:
    outcome = warm.attempt(misbehaving("stubborn_grandchild")).outcome
    assert isinstance(outcome, Crashed)
    assert outcome.exit_code == 3
    match = re.search(r"grandchild (\d+)", outcome.stderr_tail)
    assert match is not None
    assert not Path(f"/proc/{match[1]}").exists()


@pytest.mark.usefixtures("goes_on")
def test_segfault_is_a_crash_with_signal_and_output(warm: TrialRunner) -> None:
    outcome = warm.attempt(misbehaving("segfault")).outcome
    assert isinstance(outcome, Crashed)
    assert outcome.signal == "SIGSEGV"
    assert "about to fall" in outcome.stderr_tail


def test_garbage_on_stdout_and_pipe_is_no_answer(warm: TrialRunner) -> None:
    assert isinstance(warm.attempt(misbehaving("garbage")).outcome, Fits)


@pytest.mark.usefixtures("goes_on")
def test_a_wrong_gradient_is_found_where_it_is_compared(warm: TrialRunner) -> None:
    assert isinstance(warm.attempt(misbehaving("wrong_gradient")).outcome, Fits), "its losses are right"
    outcome = warm.attempt(misbehaving("wrong_gradient", compares_gradient=True)).outcome
    assert isinstance(outcome, Diverged) and "that of plain training" in outcome.reason


def test_a_gradient_is_compared_with_plain_training_only_as_the_memory_limit_allows(warm: TrialRunner) -> None:
    # All logits of a sequence at once take 64 MiB, and their gradient as much again; the limit leaves 48.
    job = tiny_job(tiny_model(vocabulary=32768, hidden=64), seq_len=512, global_batch=1)
    light = complete({"micro_batch": 1, "precision": "fp32", "loss": "chunked", "checkpointing": "full"})
    free = warm.attempt(tiny_request(light, job=job, compares_gradient=True)).outcome
    assert isinstance(free, Fits) and free.measurement.plain_gradient_norm is not None
    limit = free.measurement.device_bytes + 48 * MIB
    tight = warm.attempt(tiny_request(light, job=job, compares_gradient=True, memory_limit_bytes=limit)).outcome
    assert isinstance(tight, Fits) and tight.measurement.plain_gradient_norm is None


def test_nan_loss_is_diverged(warm: TrialRunner) -> None:
    outcome = warm.attempt(misbehaving("nan_loss")).outcome
    assert isinstance(outcome, Diverged)
    assert set(outcome.losses) == {None}


def test_wrong_loss_is_diverged_against_the_plain_forward(warm: TrialRunner) -> None:
    outcome = warm.attempt(misbehaving("wrong_loss")).outcome
    assert isinstance(outcome, Diverged)
    assert outcome.reference_loss is not None and outcome.losses[0] is not None
    assert outcome.losses[0] == pytest.approx(1.1 * outcome.reference_loss, rel=1e-3)


def test_a_loss_scale_that_overflows_at_first_costs_nothing(warm: TrialRunner) -> None:
    outcome = warm.attempt(misbehaving("overflowing", complete({"precision": "fp16-mixed"}))).outcome
    assert isinstance(outcome, Fits), outcome
    norms = outcome.measurement.gradient_norms
    assert norms[0] is None
    assert norms[-1] is not None and norms[-1] > 0


def dropout_model(**fields: float) -> Model:
    """A GPT-2, which drops a tenth of its activations unless it is told otherwise."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 256}
    return Model(name="tiny-gpt2", config={**config, **fields}, source="tests", parameters=None)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_dropout_of_the_architecture_is_no_divergence(warm: TrialRunner, method: str) -> None:
    wild = dropout_model(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    outcome = warm.attempt(tiny_request(complete({"method": method, "precision": "fp32"}), job=tiny_job(wild))).outcome
    assert isinstance(outcome, Fits), outcome
    assert outcome.measurement.reference_loss is None


def test_an_answer_is_kept_whatever_its_recording_does(
    warm: TrialRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.0)  # a recording needs none of it
    file = tmp_path / "trace.json"
    made = Crashed(reason="made")

    def recorded(deadline: float) -> tuple[Outcome, float, float]:
        began = time.monotonic()
        attempt = warm.attempt(misbehaving("records_slowly", profile=str(file), deadline_seconds=deadline))
        return attempt.outcome, attempt.seconds, time.monotonic() - began

    (outcome, seconds, in_all), _ = within(recorded, lambda answer: answer[0] == made, 1.0, 12.0)
    assert outcome == made
    assert file.read_text() == "recorded"
    # It sleeps for longer than this; the two clocks may differ by what the answer takes to arrive.
    assert seconds <= in_all - LATER_SECONDS, "the recording is no part of the trial"
    assert warm.attempt(misbehaving("dies_recording", profile=str(file))).outcome == made


def test_a_recording_is_not_held_to_the_trials_memory_limit(warm: TrialRunner, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    outcome = warm.attempt(misbehaving("greedy_recording", profile=str(file), memory_limit_bytes=300 * MIB)).outcome
    assert isinstance(outcome, Fits)
    assert file.read_text() == str(300 * MIB + 1)


def test_leak_is_reported_though_the_time_for_steps_is_spent(warm: TrialRunner) -> None:
    outcome = warm.attempt(misbehaving("leaking", timing_seconds=0.0)).outcome
    assert isinstance(outcome, Fits)
    assert outcome.measurement.leak_bytes_per_step == pytest.approx(16 * MIB, rel=0.3)
    assert outcome.measurement.steps == LEAK_STEPS


def test_no_step_is_spent_on_memory_that_does_not_grow(warm: TrialRunner) -> None:
    outcome = warm.attempt(tiny_request(timing_seconds=0.0)).outcome
    assert isinstance(outcome, Fits)
    assert (outcome.measurement.steps, outcome.measurement.leak_bytes_per_step) == (3, 0)


def test_a_trial_stops_once_a_rival_has_surely_won_and_only_then(warm: TrialRunner) -> None:
    beaten, slower = (Rival(device_bytes=1, tokens_per_second=speed) for speed in (1e12, 1e-3))
    heavier = replace(beaten, device_bytes=10**15)
    for rivals, stops in (((slower, beaten), True), ((slower, heavier), False)):
        outcome = warm.attempt(tiny_request(timing_seconds=0.0, rivals=rivals)).outcome
        assert isinstance(outcome, Fits)
        assert outcome.measurement.stopped_early is stops
        assert outcome.measurement.steps == (2 if stops else 3)


def test_one_slow_step_is_no_defeat(warm: TrialRunner) -> None:
    """A rival that the second step holds its own against has not surely won."""
    plain = warm.attempt(tiny_request(timing_seconds=0.0)).outcome
    assert isinstance(plain, Fits)
    rival = Rival(device_bytes=1, tokens_per_second=plain.measurement.tokens_per_second / 20)
    outcome = warm.attempt(misbehaving("slow_once", timing_seconds=0.0, rivals=(rival,))).outcome
    assert isinstance(outcome, Fits)
    assert not outcome.measurement.stopped_early and outcome.measurement.steps == 3


def test_a_trial_ends_at_the_micro_step_that_shows_it_is_not_worth_its_seconds(warm: TrialRunner) -> None:
    fast = Rival(device_bytes=10**15, tokens_per_second=1e12)
    for limits, message in (({"rivals": (fast,)}, "times as fast"), ({"allowance_seconds": 900.0}, "that it is worth")):
        outcome = warm.attempt(misbehaving("crawling", complete({"micro_batch": 1}), **limits)).outcome
        assert isinstance(outcome, TimedOut) and message in outcome.reason
        accumulation = tiny_job().workload.global_batch
        assert outcome.least_step_seconds == accumulation * (CRAWLING_SECONDS - ONCE_SECONDS)
        assert not outcome.is_proven, "the first micro-step alone has shown it"


def test_a_trial_that_may_beat_its_rivals_takes_what_it_needs(warm: TrialRunner) -> None:
    slow = Rival(device_bytes=10**15, tokens_per_second=1e-3)
    limits = misbehaving("crawling", complete({"micro_batch": 1}), allowance_seconds=900.0, rivals=(slow,))
    assert isinstance(warm.attempt(limits).outcome, Fits)
    late = Crashed(reason="late")
    outcome, _ = within(
        lambda seconds: warm.attempt(misbehaving("earns", allowance_seconds=seconds)).outcome,
        lambda outcome: outcome == late,
        *(1.0, 20.0),
    )
    assert outcome == late


def test_a_killed_trial_bounds_its_step_by_the_work_that_it_had_begun(warm: TrialRunner) -> None:
    outcome, allowance = within(
        lambda seconds: warm.attempt(misbehaving("stuck", allowance_seconds=seconds)).outcome,
        lambda outcome: (getattr(outcome, "least_step_seconds", None) or 0.0) > 0.0,
        *(ONCE_SECONDS + 1.0, ONCE_SECONDS + 15.0),
    )
    assert isinstance(outcome, TimedOut) and outcome.deadline_seconds == allowance
    assert outcome.least_step_seconds is not None
    assert outcome.least_step_seconds > 0.0 and not outcome.is_proven


def test_what_has_ended_proves_a_bound_and_what_has_not_may_be_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    child = child_process.ChildProcess(pid=0, events=-1, output=None)  # type: ignore[arg-type]
    assert child.least_step_seconds is None
    child.take(b'{"phase": "forward", "share": 0.25}\n')
    now[0] += ONCE_SECONDS + 1.0
    assert child.least_step_seconds == 4.0 > child.shown_seconds
    child.take(b'{"least_step_seconds": 7.0}\n')
    assert child.least_step_seconds == 7.0 == child.shown_seconds
    now[0] += 1.0
    assert child.least_step_seconds == 8.0 > child.shown_seconds


def test_an_evaluation_bounds_a_step_by_the_sequences_that_it_has() -> None:
    """Its forward pass takes less than training on as many: a long one is no long step."""
    request = tiny_request(job=tiny_job(global_batch=4, eval_batch=12))
    shares = shares_of_a_step(request, Pace.of(request, accumulation=4))
    assert shares == {"forward": 0.25, "optimizer": 1.0, "evaluation": 3.0}


@pytest.mark.parametrize(
    "limits", [{"rivals": (Rival(device_bytes=10**15, tokens_per_second=1e12),)}, {"least_tokens_per_second": 1e12}]
)
def test_a_trial_that_is_of_no_use_is_killed_within_its_first_micro_step(
    warm: TrialRunner, limits: dict[str, Any]
) -> None:
    outcome = warm.attempt(misbehaving("stuck", deadline_seconds=3600.0, **limits)).outcome
    assert isinstance(outcome, TimedOut) and outcome.phase == "forward"
    assert outcome.least_step_seconds is not None
    assert outcome.least_step_seconds > 0.0


def test_what_is_stored_of_the_allocator_is_what_it_says(warm: TrialRunner) -> None:
    for name, there in (("tiny", False), ("expanding", True)):
        outcome = warm.attempt(misbehaving(name)).outcome
        assert isinstance(outcome, Fits)
        assert outcome.measurement.expandable_segments is there


def test_a_fork_server_that_dies_is_started_again_and_one_that_hangs_costs_one_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TrialRunner() as trial_runner:
        trial_runner.start()
        process = trial_runner._process
        assert process is not None
        process.kill()
        process.wait()
        assert isinstance(trial_runner.attempt(tiny_request()).outcome, Fits)
        monkeypatch.setattr(runner, "GRACE_SECONDS", 0.0)
        process = trial_runner._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # as if it were stuck in the driver
        outcome = trial_runner.attempt(tiny_request(deadline_seconds=0.5)).outcome
        assert isinstance(outcome, Crashed) and outcome.transient and "does not answer" in outcome.reason
        assert process.poll() is not None
        assert isinstance(trial_runner.attempt(tiny_request()).outcome, Fits)


@pytest.fixture
def echo() -> Iterator[subprocess.Popen[str]]:
    """A process that answers whatever it is told, on a descriptor beyond those that select takes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        high = fcntl.fcntl(process.stdout, fcntl.F_DUPFD_CLOEXEC, 1500)
        process.stdout.close()
        process.stdout = os.fdopen(high)
        yield process
        process.kill()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_fork_server_answers_whatever_the_number_of_its_pipe(echo: subprocess.Popen[str]) -> None:
    trial_runner = TrialRunner()
    assert trial_runner._answer_to(echo, {"a": 1}, 60.0) == {"a": 1}
    with pytest.raises(TimeoutError):
        echo.send_signal(signal.SIGSTOP)
        trial_runner._answer_to(echo, {"a": 1}, 0.1)


def test_a_fork_server_that_says_no_more_is_not_waited_for(
    echo: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ENDING_SECONDS", 0.1)
    trial_runner = TrialRunner()
    trial_runner._process = echo
    echo.send_signal(signal.SIGSTOP)
    died = trial_runner._parent_died(echo)
    assert died.transient and echo.returncode == -signal.SIGKILL
    assert died.reason == "the trial's parent process says nothing more and does not end", "we killed it, nobody else"


def wait_for_child(runner: TrialRunner) -> str:
    """The number of the process of the trial that `runner` has begun."""
    while True:
        process = runner._process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text() if process else ""
        if children:
            return children.split()[0]
        time.sleep(0.05)


def test_closing_ends_the_running_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    runner = TrialRunner(entry="entries:hang")
    # Whoever waits for its deadline waits for longer than a test may take.
    thread = threading.Thread(target=runner.attempt, args=(tiny_request(deadline_seconds=3600.0),), daemon=True)
    thread.start()
    child = wait_for_child(runner)
    runner.close()
    thread.join()
    assert not os.path.exists(f"/proc/{child}")


def test_a_long_micro_steps_gradient_is_compared_on_a_few_tokens_that_are_new_to_the_model(warm: TrialRunner) -> None:
    outcome = warm.attempt(misbehaving("takes_long", compares_gradient=True)).outcome
    assert isinstance(outcome, Fits), outcome
    assert outcome.measurement.plain_gradient_norm is not None and outcome.measurement.plain_gradient_norm > 0
