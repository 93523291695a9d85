"""Made devices: what each changes of a recorded table, to the last figure, and nothing else."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from unit.bench.honest import problems

from autofit.bench.catalogue import devices
from autofit.bench.made_device import MadeDevice
from autofit.errors import UsageError
from autofit.lattice import Config
from autofit.outcome import Fits, Measurement, OutOfMemory, TimedOut, Trial
from autofit.search.replay.cut import cut
from autofit.search.replay.ours import job_of
from autofit.search.replay.timeline import Timeline
from autofit.trial.pace import ONCE_SECONDS, UNSTEADY, least_repeats, running_seconds
from autofit.trial.request import TrialRequest

BF16 = "precision=bf16:30,precision=bf16-mixed:12"


def every_trial() -> dict[Config, Trial]:
    return dict(problems()["any"].trials)


def fitting() -> list[Trial]:
    return [trial for trial in every_trial().values() if isinstance(trial.outcome, Fits)]


def measured(trial: Trial) -> Measurement:
    assert isinstance(trial.outcome, Fits)
    return trial.outcome.measurement


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "any"])
def test_the_catalogue_is_always_the_same_and_each_device_has_a_name(method: str) -> None:
    every = devices(problems()[method])
    assert every == devices(problems()[method]) and len(every) == len(set(map(str, every))) > 50
    assert [MadeDevice.of(str(device)) for device in every] == list(every)


@pytest.mark.parametrize(
    "name", ["precision:30", "precision=bf16", "speed=bf16:3", "noise:0", "drift:1.5", "precision=b:3"]
)
def test_a_device_that_is_not_understood_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        MadeDevice.of(name)


def test_steps_of_slow_values_take_longer_and_nothing_else_changes() -> None:
    device = MadeDevice.of(BF16)
    for trial in every_trial().values():
        factor = {"bf16": 30.0, "bf16-mixed": 12.0}.get(trial.config.text("precision"), 1.0)
        made = device.trial(trial)
        if factor == 1.0 or not isinstance(trial.outcome, Fits):
            assert made == trial
            continue
        before, after = measured(trial), measured(made)
        assert after.step_seconds.median == factor * before.step_seconds.median
        assert after.tokens_per_second == before.tokens_per_second / factor
        assert after.device_bytes == before.device_bytes and after.losses == before.losses[: len(after.losses)]


def test_of_a_pair_both_must_hold() -> None:
    device = MadeDevice.of("precision=bf16+micro_batch=4:10")
    for config in every_trial():
        assert device.factor(config) == (10.0 if (config["precision"], config["micro_batch"]) == ("bf16", 4) else 1.0)


def test_the_parts_of_a_trial_add_up_to_its_seconds() -> None:
    for trial in fitting():
        parts = Timeline.of(trial)
        assert parts.seconds == pytest.approx(trial.seconds)
        assert parts.micro_steps == min(2, 4 // trial.config.number("micro_batch"))


def test_a_slow_trial_takes_as_much_longer_as_its_warm_up_and_timed_steps_do() -> None:
    for trial in fitting():
        made = MadeDevice.of("precision=bf16:30,precision=bf16-mixed:30,precision=fp32:30").trial(trial)
        parts = Timeline.of(trial)
        assert made.seconds == pytest.approx(parts.before_seconds + running_seconds(30 * parts.step_seconds, 3.0))
        assert measured(made).steps == least_repeats(30 * parts.step_seconds) < measured(trial).steps


def test_memory_that_is_higher_runs_out_where_it_exceeds_the_limit() -> None:
    recorded = problems()["any"]
    made, limit = MadeDevice.of("memory:1.4").recorded(recorded), recorded.problem.memory_limit_bytes
    for config, trial in recorded.trials.items():
        needed = round(1.4 * measured(trial).device_bytes) if isinstance(trial.outcome, Fits) else limit + 1
        now = made.trials[config].outcome
        assert (
            isinstance(now, OutOfMemory) if needed > limit else now == Fits(measurement=measured(made.trials[config]))
        )
        assert not isinstance(now, Fits) or now.measurement.device_bytes == needed


def test_memory_that_is_lower_comes_with_a_lower_limit_so_that_the_same_fits() -> None:
    recorded = problems()["any"]
    made = MadeDevice.of("memory:0.7").recorded(recorded)
    assert made.problem.memory_limit_bytes == round(0.7 * recorded.problem.memory_limit_bytes)
    for config, trial in recorded.trials.items():
        assert type(made.trials[config].outcome) is type(trial.outcome)


def test_what_a_search_believes_stays_that_of_the_honest_device() -> None:
    recorded = problems()["full"]
    assert MadeDevice.of(BF16).recorded(recorded).problem.foresee() is recorded.problem.foresee()


def test_noise_is_in_what_a_search_sees_and_not_in_what_it_is_judged_by() -> None:
    device, recorded = MadeDevice.of("noise:0.15"), problems()["lora"]
    made = device.recorded(recorded)
    assert made.trials == recorded.trials
    (trial, *_) = (trial for trial in recorded.trials.values() if isinstance(trial.outcome, Fits))
    seen = []
    for seed in range(100):
        oracle = device.oracle(made, seed)
        outcome = oracle.ask(trial.config).outcome
        assert isinstance(outcome, Fits)
        seen.append(outcome.measurement.step_seconds.median / measured(trial).step_seconds.median)
        assert oracle.trace(stopped=True).runs[0].outcome == trial.outcome
    assert 0.1 < statistics.stdev(seen) < 0.25


@pytest.mark.parametrize(
    ("name", "factors"), [("drift:4", [1.0, 1.25, 1.5, 1.75, 2.0, 2.0]), ("drift:0.1s", [1.0, 2.0])]
)
def test_a_device_that_drifts_is_slower_at_each_trial_until_it_has_half_its_speed(
    name: str, factors: list[float]
) -> None:
    recorded = problems()["lora"]
    # Without its interval, a trial shows the very speed that was recorded.
    exact = {
        config: replace(trial, outcome=Fits(measurement=_without_spread(trial)))
        for config, trial in recorded.trials.items()
        if isinstance(trial.outcome, Fits)
    }
    made = replace(recorded, trials=exact)
    oracle = MadeDevice.of(name).oracle(made, 0)
    for (config, trial), factor in zip(exact.items(), factors, strict=False):
        answer = oracle.ask(config)
        assert isinstance(answer.outcome, Fits)
        assert answer.outcome.measurement.step_seconds.median == factor * measured(trial).step_seconds.median
        assert (answer.seconds == pytest.approx(trial.seconds)) is (factor == 1.0)  # a slow one times fewer steps
    assert [run.outcome for run in oracle.trace(stopped=True).runs] == [t.outcome for t in exact.values()][
        : len(factors)
    ]


def _without_spread(trial: Trial) -> Measurement:
    known = measured(trial)
    return replace(known, step_seconds=replace(known.step_seconds, relative_spread=None))


def test_a_trial_that_outlasts_its_deadline_shows_a_lower_bound_of_its_step() -> None:
    job = job_of(problems()["full"].problem)
    for trial in fitting():
        step, parts = measured(trial).step_seconds.median, Timeline.of(trial)
        request = TrialRequest(job=job, config=trial.config, memory_limit_bytes=trial.memory_limit_bytes)
        assert cut(trial, request) is trial
        for deadline in (0.5 * parts.before_seconds, parts.before_seconds + 0.1, 0.99 * trial.seconds):
            cost = cut(trial, replace(request, deadline_seconds=deadline))
            assert cost.seconds == deadline and isinstance(cost.outcome, TimedOut)
            least = cost.outcome.least_step_seconds
            assert least is None or 0 < least <= step * (1 + 1e-9)
            # The first micro-step may spend some seconds on what happens once.
            shows = deadline - parts.before_seconds >= min(ONCE_SECONDS, parts.micro_step_seconds)
            assert shows or least is None
        killed = cut(trial, replace(request, deadline_seconds=0.99 * trial.seconds)).outcome
        # By then micro-steps have ended, and show all of the step's time but by how much single ones scatter.
        assert isinstance(killed, TimedOut)
        assert killed.least_step_seconds == pytest.approx(UNSTEADY * parts.accumulation * parts.micro_step_seconds)
