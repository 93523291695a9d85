"""A user's program as the trial: whatever it does, its outcome is typed, and nothing of it is left running."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_job, tiny_request

from autofit.core.outcome import Crashed, Diverged, Fits, Outcome, OutOfMemory, TimedOut, Unsupported
from autofit.core.units import MIB
from autofit.techniques import complete
from autofit.trial.process.runner import TrialRunner
from autofit.trial.request import Rival

STEPS = """
import time, torch, autofit
weights = torch.ones(1000, requires_grad=True)
for number in range(40):
    loss = (weights ** 2).mean()
    loss.backward()
    time.sleep(0.01)
    autofit.step(loss)
print("not reached")
"""
TRAINER = """
import autofit, torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        return {"loss": (self.weight * x).mean()}

arguments = TrainingArguments(output_dir="out", per_device_train_batch_size=2, use_cpu=True, report_to=[])
data = [{"x": torch.ones(2)}] * 64
Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[autofit.TrainerCallback()]).train()
"""
EVALUATING = TRAINER.replace("report_to=[]", "report_to=[], gradient_accumulation_steps=2, ARGUMENTS")
EVALUATING = EVALUATING.replace("train_dataset=data", "train_dataset=data, eval_dataset=data")
EVALUATING = EVALUATING.replace(
    "def forward(self, x):",
    """def forward(self, x):
        if not self.training:
            logits = torch.ones(MEBIBYTES << 18)
            open("batches", "a").write("one")""",
)
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the programs are, and what they can be told by."""
    monkeypatch.chdir(tmp_path)


def run(warm: TrialRunner, program: str, *, arguments: str = "", limit: int = 2048 * MIB, **request: Any) -> Outcome:
    """The outcome of a trial whose program this is."""
    Path("program.py").write_text(program)
    job = tiny_job(program=f"{shlex.quote(sys.executable)} program.py {Path.cwd()} {arguments}")
    trial_request = tiny_request(
        complete({"micro_batch": 2, "precision": "fp32"}),
        job=job,
        memory_limit_bytes=limit,
        **{"deadline_seconds": 120.0, **request},
    )
    return warm.attempt(trial_request).outcome


def left() -> list[str]:
    """What still runs of this test's programs, which have its folder as an argument."""
    folder = str(Path.cwd()).encode()
    lines = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            try:
                line = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if folder in line.split(b"\0"):
                lines.append(line.decode())
    return lines


def test_steps_are_measured_from_inside(warm: TrialRunner) -> None:
    outcome = run(warm, STEPS, arguments="{micro_batch}")
    assert isinstance(outcome, Fits), outcome
    m = outcome.measurement
    assert m.steps >= 3 and m.step_seconds.median >= 0.01
    assert m.tokens_per_second == pytest.approx(4 * 32 / m.step_seconds.median)
    assert m.losses[:2] == (1.0, 1.0)
    assert 50 * MIB < m.device_bytes <= 2048 * MIB
    assert m.setup_seconds > m.overhead_seconds > 0.0
    assert left() == []


def test_a_launcher_and_its_daemons_end_with_the_trial(warm: TrialRunner) -> None:
    launcher = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {DAEMON + STEPS!r}, *sys.argv[1:]])"
    outcome = run(warm, launcher, rivals=(Rival(device_bytes=MIB, tokens_per_second=1e9),))
    assert isinstance(outcome, Fits), outcome
    assert outcome.measurement.stopped_early and outcome.measurement.steps == 2, "a rival has surely won"
    assert left() == []


def test_memory_beyond_the_limit_is_refused_while_it_trains(warm: TrialRunner) -> None:
    outcome = run(warm, "import torch, autofit\nautofit.step()\nkept = bytearray(3 << 30)\n" + STEPS)
    assert isinstance(outcome, OutOfMemory) and not outcome.host, outcome


def test_memory_that_was_taken_before_the_limit_was_enforced_counts(warm: TrialRunner) -> None:
    built = "import torch, autofit\nkept = torch.ones(100 << 20)\n" + STEPS  # 400 MiB
    outcome = run(warm, built, limit=400 * MIB)
    assert isinstance(outcome, OutOfMemory) and "of 400 MiB" in outcome.reason, outcome
    assert isinstance(run(warm, "kept = bytearray(8 << 30)"), OutOfMemory), "the host is safe before, too"


def test_one_that_hangs_ends_at_its_deadline_and_leaves_nothing(warm: TrialRunner) -> None:
    outcome = run(warm, DAEMON + "time.sleep(600)", deadline_seconds=2.0)
    assert isinstance(outcome, TimedOut) and outcome.phase == "launch", outcome
    assert "without a word from the program: add callbacks=[autofit.TrainerCallback()]" in outcome.reason
    until = time.monotonic() + 30.0
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    assert left() == []


def test_one_that_reports_nothing_is_told_how(warm: TrialRunner) -> None:
    outcome = run(warm, "print('trained')")
    assert isinstance(outcome, Crashed) and outcome.transient, "no answer about the config"
    assert "without reporting a step: add callbacks=[autofit.TrainerCallback()] to the Trainer" in outcome.reason
    assert "trained" in outcome.stderr_tail


def test_one_that_ends_too_early_is_told_how_long_to_train(warm: TrialRunner) -> None:
    outcome = run(warm, "import autofit\nautofit.step()\nautofit.step(2.0)")
    assert isinstance(outcome, Crashed) and outcome.transient
    assert outcome.reason == "the program ended after 2 optimizer steps: let it train for at least 33"


def test_what_is_no_event_is_not_passed_on(warm: TrialRunner) -> None:
    """As where two processes of the program write at once."""
    code = """
import os, socket
connection = socket.socket(socket.AF_UNIX)
connection.connect(chr(0) + os.environ["AUTOFIT_TRIAL"])
connection.makefile().readline()
connection.sendall(b'1\\n[2]\\n{"phase": "step", "unknown": 1}\\n{"steps": 2}\\n')
"""
    outcome = run(warm, code)
    assert isinstance(outcome, Crashed) and "ended after 2 optimizer steps" in outcome.reason, outcome


def test_one_that_fails_says_why(warm: TrialRunner) -> None:
    outcome = run(warm, "import sys\nprint('no such file: data.jsonl', file=sys.stderr)\nsys.exit(7)")
    assert isinstance(outcome, Crashed) and not outcome.transient
    assert (outcome.exit_code, outcome.reason) == (7, "the program exited with status 7: no such file: data.jsonl")


def test_one_that_cannot_be_started_is_unsupported(warm: TrialRunner) -> None:
    request = tiny_request(job=tiny_job(program="./no-such-program"), deadline_seconds=60.0)
    outcome = warm.attempt(request).outcome
    assert isinstance(outcome, Unsupported) and "no-such-program" in outcome.reason


@pytest.mark.parametrize("loss", ["float('nan')", "torch.tensor(float('inf'))"])
def test_a_loss_that_is_not_finite_diverges(warm: TrialRunner, loss: str) -> None:
    outcome = run(warm, f"import torch, autofit\nautofit.step(1.0)\nautofit.step({loss})\n" + STEPS)
    assert isinstance(outcome, Diverged) and outcome.losses == (1.0, None), outcome


def test_several_processes_at_once_are_refused(warm: TrialRunner) -> None:
    outcome = run(warm, "import os, time\nos.fork()\nimport autofit\nautofit.step()\ntime.sleep(600)")
    assert isinstance(outcome, Unsupported) and "several processes" in outcome.reason, outcome
    assert left() == []


def test_a_trainer_that_ignores_what_it_is_asked_for_is_not_believed(warm: TrialRunner) -> None:
    outcome = run(warm, TRAINER)
    assert isinstance(outcome, Unsupported), outcome
    assert outcome.reason == (
        "the program trains with micro-batch 2 and 1 micro-steps an update, the trial asked for micro-batch 2 and 2"
    )


def test_what_a_shell_says_of_a_killed_program_is_what_has_killed_it(warm: TrialRunner) -> None:
    direct = run(warm, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert isinstance(direct, Crashed) and direct.signal == "SIGSEGV"
    for status in (128 + 11, 256 - 11):  # a shell's word for it, and a launcher's that exits with -11
        wrapped = run(warm, f"import sys\nsys.exit({status})")
        assert isinstance(wrapped, Crashed) and wrapped.signal == "SIGSEGV", wrapped


@pytest.mark.parametrize("status", [200, 254, 255])
def test_a_high_status_that_is_no_signals_is_said(warm: TrialRunner, status: int) -> None:
    outcome = run(warm, f"import sys\nprint('no such file', file=sys.stderr)\nsys.exit({status})")
    assert isinstance(outcome, Crashed)
    assert (outcome.exit_code, outcome.reason) == (status, f"the program exited with status {status}: no such file")


def test_a_training_that_ends_by_itself_has_been_measured_if_it_was_timed(warm: TrialRunner) -> None:
    few = TRAINER.replace('[{"x": torch.ones(2)}] * 64', '[{"x": torch.ones(2)}] * 24')
    few = few.replace("report_to=[]", "report_to=[], gradient_accumulation_steps=2, num_train_epochs=1")
    outcome = run(warm, few)
    assert isinstance(outcome, Fits) and outcome.measurement.steps <= 6, outcome


def evaluating(mebibytes: int, arguments: str) -> str:
    """A Trainer of which each batch that is evaluated takes so much more memory."""
    return EVALUATING.replace("MEBIBYTES", str(mebibytes)).replace("ARGUMENTS", arguments)


def test_saving_and_evaluating_are_phases_that_follow_the_timed_steps(warm: TrialRunner) -> None:
    outcome = run(warm, evaluating(300, "eval_strategy='steps', eval_steps=1, save_steps=1, save_total_limit=1"))
    assert isinstance(outcome, Fits), outcome
    peaks = outcome.measurement.phase_peaks
    assert peaks.keys() == {"step", "saving", "evaluation"}
    assert peaks["evaluation"] > peaks["step"] + 250 * MIB > peaks["saving"]
    assert outcome.measurement.device_bytes >= peaks["evaluation"]
    assert Path("batches").read_text() == "one" * 8, "all of the data, once"
    assert list(Path("out").iterdir()) == []


def test_an_evaluation_that_does_not_fit_is_out_of_memory(warm: TrialRunner) -> None:
    outcome = run(warm, evaluating(2048, "eval_strategy='epoch', save_strategy='no'"))
    assert isinstance(outcome, OutOfMemory) and outcome.phase == "evaluation", outcome


def test_long_evaluations_are_cut_short_and_large_checkpoints_left_out(warm: TrialRunner) -> None:
    limits = (
        "from autofit.trial.program import trainer_phases as p\np.EVALUATION_SECONDS, p.CHECKPOINT_BYTES = 0.0, 7\n"
    )
    outcome = run(warm, limits + evaluating(1, "eval_strategy='steps'"))
    assert isinstance(outcome, Fits) and outcome.measurement.phase_peaks.keys() == {"step", "evaluation"}, outcome
    assert Path("batches").read_text() == "one"


def test_a_program_has_the_users_environment(warm: TrialRunner) -> None:
    outcome = run(warm, "import os, sys\nsys.exit(f\"{os.environ.get('HF_HUB_OFFLINE')} {os.getcwd()}\")")
    assert isinstance(outcome, Crashed) and outcome.reason.endswith(f"{os.environ.get('HF_HUB_OFFLINE')} {Path.cwd()}")


def test_outside_of_a_trial_a_step_does_nothing() -> None:
    code = (
        "import sys, autofit; autofit.step(float('nan')); print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
