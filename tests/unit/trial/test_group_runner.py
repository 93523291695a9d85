"""Trials of two ranks in real processes: one outcome, whichever rank fails and however, and the next trial runs."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_job, tiny_model, tiny_request
from patience import within

from autofit.core.outcome import Crashed, Diverged, Fits, OutOfMemory, TimedOut
from autofit.techniques import complete
from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.training.distributed.rendezvous import LOOPBACK, Rendezvous, listening
from autofit.training.prerequisites.nvme import own_prefix
from autofit.trial.limits.shared_memory import is_mapped
from autofit.trial.machine.cores import threads
from autofit.trial.measure.figures import LEAK_STEPS
from autofit.trial.process import runner as runners
from autofit.trial.process.group_runner import GroupRunner
from autofit.trial.process.runner import TrialRunner
from autofit.trial.request import Rival, TrialRequest

NEVER = 3600.0
"""A deadline in seconds, longer than a test may take: a group that waits for it, or for its collectives to give up by
themselves, is ended with its test."""


DDP = complete({"sharding": "ddp", "micro_batch": 1})


def fated(name: str, *, deadline: float = NEVER, **request: Any) -> TrialRequest:
    job = tiny_job(replace(tiny_model(), name=name), devices=2)
    return tiny_request(DDP, job=job, **{"deadline_seconds": deadline, **request})


def test_a_killed_rank_ends_the_trial_with_its_own_reason(pair: GroupRunner) -> None:
    outcome = pair.attempt(fated("rank_1_dies")).outcome
    assert isinstance(outcome, Crashed) and outcome.signal == "SIGKILL" and outcome.transient, outcome
    assert outcome.reason.startswith("rank 1: ")


def test_a_rank_that_hangs_is_named_at_the_deadline(pair: GroupRunner) -> None:
    outcome, deadline = within(
        lambda seconds: pair.attempt(fated("rank_1_hangs", deadline=seconds)).outcome,
        lambda outcome: "waiting in phase backward" in getattr(outcome, "reason", ""),
        *(5.0, 30.0),
    )
    assert isinstance(outcome, TimedOut), outcome
    after = f"not finished after {deadline:.0f} s"
    assert outcome.reason == f"rank 1: {after}, in phase forward (rank 0 waiting in phase backward)"
    assert outcome.phase == "forward"


def test_an_error_of_one_rank_is_the_groups(pair: GroupRunner) -> None:
    outcome = pair.attempt(fated("rank_1_raises")).outcome
    assert isinstance(outcome, Crashed) and not outcome.transient, outcome
    assert outcome.reason.startswith("rank 1: ") and "kaboom" in outcome.stderr_tail


def test_a_rank_that_does_not_notice_is_stopped(pair: GroupRunner) -> None:
    outcome = pair.attempt(fated("rank_0_is_deaf")).outcome
    assert isinstance(outcome, Crashed) and outcome.reason.startswith("rank 1: "), outcome


def test_the_fork_servers_outlive_all_that(pair: GroupRunner) -> None:
    pair.start()
    before = [runner._process.pid for runner in pair._runners if runner._process]
    outcome = pair.attempt(fated("tiny")).outcome
    assert isinstance(outcome, Fits), outcome
    assert [runner._process.pid for runner in pair._runners if runner._process] == before
    assert [of_rank.rank for of_rank in outcome.measurement.ranks] == [0, 1]
    assert outcome.measurement.device_bytes == max(of_rank.device_bytes for of_rank in outcome.measurement.ranks)


def test_ranks_that_see_other_times_decide_alike(pair: GroupRunner) -> None:
    outcome = pair.attempt(fated("uneven_clocks", timing_seconds=0.2)).outcome
    assert isinstance(outcome, Fits), outcome
    measurement = outcome.measurement
    fast, slow = measurement.ranks
    assert fast.step_seconds < slow.step_seconds == measurement.step_seconds.median


def test_the_first_rank_ends_a_trial_that_is_not_worth_its_seconds(pair: GroupRunner) -> None:
    fast, slow = (Rival(device_bytes=10**15, tokens_per_second=speed) for speed in (1e12, 1e-3))
    outcome = pair.attempt(fated("crawling", rivals=(fast,))).outcome
    assert isinstance(outcome, TimedOut) and outcome.reason.startswith("rank 0: "), outcome
    assert outcome.least_step_seconds is not None and outcome.least_step_seconds > 0.0
    cut = pair.attempt(fated("crawling", allowance_seconds=1.0))
    assert isinstance(cut.outcome, TimedOut) and cut.seconds < NEVER, cut
    outcome = pair.attempt(fated("crawling", allowance_seconds=900.0, rivals=(slow,), timing_seconds=0.0)).outcome
    assert isinstance(outcome, Fits), outcome


def test_ranks_of_which_one_leaks_take_more_steps_alike(pair: GroupRunner) -> None:
    outcome = pair.attempt(fated("leaking_on_rank_1", timing_seconds=0.0)).outcome
    assert isinstance(outcome, Fits), outcome
    assert outcome.measurement.leak_bytes_per_step == 16 * 1024**2
    assert outcome.measurement.steps == LEAK_STEPS


def test_a_loss_that_is_not_finite_on_one_rank_is_not_on_any(pair: GroupRunner) -> None:
    outcome = pair.attempt(fated("nan_on_rank_1")).outcome
    assert isinstance(outcome, Diverged), outcome
    assert "the loss of step 1 is not finite" in outcome.reason


def test_ranks_on_one_machine_divide_its_cores(pair: GroupRunner) -> None:
    outcome = pair.attempt(fated("says_threads")).outcome
    assert isinstance(outcome, Crashed), outcome
    share = max(1, threads() // 2)
    assert f"{share} threads, OpenMP {share}" in outcome.reason, outcome


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_ranks_that_never_exchange_gradients_have_diverged(pair: GroupRunner, precision: str) -> None:
    request = fated("never_synchronises")
    outcome = pair.attempt(replace(request, config=request.config.replace(precision=precision))).outcome
    assert isinstance(outcome, Diverged), outcome
    assert "the ranks' gradients were not synchronised" in outcome.reason


def test_a_rank_that_runs_out_of_memory_is_the_cause(pair: GroupRunner) -> None:
    outcome = pair.attempt(fated("greedy_on_rank_1")).outcome
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.reason.startswith("rank 1: ") and outcome.phase == "backward"
    assert outcome.requested_bytes is not None and outcome.requested_bytes > 2 * 1024**3


def test_segments_that_a_killed_rank_leaves_are_removed(pair: GroupRunner) -> None:
    name = f"tests-{os.getpid()}"
    others = Path(f"/dev/shm/nccl-others-{os.getpid()}")
    runner = pair._runners[1]
    runner.start()
    try:
        others.write_bytes(b"0" * 4096)  # before the trial, hence none of its own
        outcome = runner.attempt(fated("leaves_segment", profile=name)).outcome
        assert isinstance(outcome, Crashed) and outcome.signal == "SIGKILL", outcome
        assert not Path(f"/dev/shm/nccl-{name}").exists()
        assert others.exists()
    finally:
        others.unlink()


def test_a_process_that_maps_a_file_whose_name_is_no_text_hinders_nobody(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    for path in (odd, tmp_path / "other"):
        path.write_bytes(b"0" * 4096)
    with odd.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        assert (is_mapped(odd), is_mapped(tmp_path / "other")) == (True, False)


@pytest.mark.parametrize("killed", ["itself", "parent"])
def test_files_that_a_killed_rank_has_swapped_to_are_removed(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    (tmp_path / f"{own_prefix()}4194305-left").mkdir()  # above the largest process id: proc(5), pid_max
    (tmp_path / "the user's").mkdir()
    config = complete({"sharding": "zero3", "offload": "nvme"})
    with TrialRunner(entry="rank_entries:by_name") as runner:
        outcome = runner.attempt(replace(fated("leaves_swap", profile=killed), config=config)).outcome
    assert isinstance(outcome, Crashed) and outcome.transient, outcome
    assert (outcome.signal, outcome.exit_code) == (("SIGKILL", None) if killed == "itself" else (None, -9))
    assert [path.name for path in tmp_path.iterdir()] == ["the user's"]


def test_a_port_in_use_is_no_fault_of_the_config(pair: GroupRunner) -> None:
    with listening(LOOPBACK) as taken:
        place = Rendezvous(rank=0, ranks=2, ranks_here=2, host=LOOPBACK, port=taken.getsockname()[1])
        outcome = pair._runners[0].attempt(tiny_request(rendezvous=place)).outcome
    assert isinstance(outcome, Crashed) and outcome.transient, outcome
    assert "the ranks cannot meet" in outcome.reason and "in use" in outcome.reason


def test_a_parent_that_opens_no_port_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "LISTENING_SECONDS", 0.01)  # less than its imports take
    with GroupRunner(ranks=2) as group:
        outcome = group.attempt(tiny_request()).outcome
        assert group._runners[0]._process is None
    assert isinstance(outcome, Crashed) and outcome.transient
    assert outcome.reason == "the ranks cannot meet: the trial's parent process does not answer"


def test_an_address_of_another_machine_is_no_fault_of_the_config(pair: GroupRunner) -> None:
    with pytest.raises(OSError, match=r"no port at 203\.0\.113\.1 can be had"):
        pair._runners[0].listen("203.0.113.1")


def test_nothing_listens_between_trials(pair: GroupRunner) -> None:
    for runner in pair._runners:
        assert runner._process is not None
        links = [os.readlink(fd) for fd in Path(f"/proc/{runner._process.pid}/fd").iterdir()]
        assert not [link for link in links if link.startswith("socket:")]
