"""How long a running trial goes on: how many steps are enough, what it may cost, and when others have surely won."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from autofit.core.lattice import Config
from autofit.core.outcome import TimedOut
from autofit.core.units import format_duration
from autofit.core.workload import Workload
from autofit.techniques.axes.batching import micro_batches
from autofit.techniques.axes.kernels import by_liger
from autofit.trial.process.events import Event
from autofit.trial.request import Rival, TrialRequest

WARM_UPS = 2
"""Updates before timing. The first creates states and caches; in the second the host's allocator grows its heap, so it
took a sixth longer."""
OVERFLOWS = 20
"""Steps after which a gradient that still overflows is no longer the loss scale's fault."""
LONG_SECONDS = 10.0
"""What the timed steps may take together before fewer are timed: a long step scatters less, relative to its length."""
ONCE_SECONDS = 5.0
"""What the first micro-step may do once, whatever its size: load kernels, choose algorithms, fill caches."""
UNSTEADY = 0.8
"""A later micro-step takes at least this share of one that was timed: single steps scatter by 2 % in the median trial
of the recorded tables, and by 12 % in some."""
BEATEN_FACTOR = 4.0
"""A rival that is faster by this factor than one micro-step allows has surely won, whatever memory it takes: nobody who
has room for the rival would train four times as long."""


def makes_kernels(config: Config) -> bool:
    """Whether the first step generates code, with inductor or Triton, which says nothing of later ones."""
    return config.get("compile") is True or config.get("loss") == "fused" or by_liger(config)


def warm_ups(step_seconds: float) -> int:
    """Updates before timing, of a trial whose steps take `step_seconds`."""
    return WARM_UPS if WARM_UPS * step_seconds <= LONG_SECONDS else 1


def is_brief(micro_step_seconds: float) -> bool:
    """Whether one micro-step with its update is warm-up enough, where a step accumulates."""
    return WARM_UPS * micro_step_seconds > LONG_SECONDS


def least_repeats(step_seconds: float) -> int:
    """Steps that such a trial times at least."""
    return max(1, min(3, int(LONG_SECONDS / max(step_seconds, 1e-9))))


class Mixed(NamedTuple):
    """What steps on sequences with lengths take, over what a mean step takes."""

    longest: float = 1.0
    """One on the longest sequences."""
    together: float = 1.0
    """Those together whose mean is timed."""

    @classmethod
    def of(cls, config: Config, workload: Workload) -> Mixed:
        """The factors of a config's micro-batches, as if time were proportional to the length."""
        batches = micro_batches(config, workload)
        if batches is None:
            return cls()
        mean = batches.tokens
        return cls(workload.seq_len / mean, sum(length for length, _ in batches.nodes) / mean)

    @property
    def is_one_length(self) -> bool:
        """Whether the longest sequences are all that is timed."""
        return self.longest == self.together

    def warm_up_seconds(self, step_seconds: float, micro_steps: int) -> float:
        """Seconds before the first timed step: on the longest sequences at least twice, then once on each length."""
        longest = self.longest * step_seconds
        micro_step = longest / micro_steps
        seconds = micro_step if is_brief(micro_step) else warm_ups(longest) * longest
        if self.is_one_length:
            return seconds
        second = longest if warm_ups(longest) == 1 else 0.0
        return seconds + second + self.together * step_seconds


FULL = Mixed()
"""Every sequence is full."""


def running_seconds(step_seconds: float, timing_seconds: float, micro_steps: int = 1, mixed: Mixed = FULL) -> float:
    """Seconds that a trial takes once it is set up, with `timing_seconds` for its repeats."""
    together = mixed.together * step_seconds
    repeats = max(min(timing_seconds, LONG_SECONDS), least_repeats(together) * together)
    last = 0.0 if mixed.is_one_length else mixed.longest * step_seconds  # at the end
    return mixed.warm_up_seconds(step_seconds, micro_steps) + repeats + last


def useful_speed(rivals: Iterable[float], least_tokens_per_second: float) -> float:
    """Tokens per second below which a trial is of no use. `rivals` are the speeds measured of its method; below
    `least_tokens_per_second` its method is not practical."""
    return max([least_tokens_per_second, *(speed / BEATEN_FACTOR for speed in rivals)])


class TooSlow(Exception):
    """The trial need not go on: what it would still show is not worth its seconds."""

    def __init__(self, reason: str, least_step_seconds: float, *, is_proven: bool) -> None:
        super().__init__(reason)
        self.least_step_seconds = least_step_seconds
        """Lower bound on an optimizer step of the whole global batch."""
        self.is_proven = is_proven
        """Whether another micro-step than the first has shown it."""

    def outcome(self, *, after_seconds: float, phase: str | None = None) -> TimedOut:
        """The outcome of a trial that this ended `after_seconds`."""
        return TimedOut(
            reason=str(self),
            deadline_seconds=after_seconds,
            phase=phase,
            least_step_seconds=self.least_step_seconds,
            is_proven=self.is_proven,
        )


@dataclass(slots=True, kw_only=True)
class Pace:
    """Judges one trial by the seconds of its micro-steps."""

    tokens_per_step: int
    """Of the whole global batch."""
    accumulation: int
    """Micro-steps of an optimizer step."""
    least_share: float = 1.0
    """The share of the judged micro-step's time that a mean one takes at least: less than 1 where sequences have
    lengths, and the longest are judged."""
    mean_share: float = 1.0
    """The same, as if time were proportional to the length."""
    update_share: float = 1.0
    """The share of an update that a mean step has: less than 1 where sequences share rows."""
    rivals: tuple[Rival, ...] = ()
    least_tokens_per_second: float = 0.0
    """What makes the trial's method practical."""
    allowance_seconds: float | None = None
    """What the trial may take in all, unless it earns more; None where it may take what it needs."""
    earned: bool = False
    """Whether a micro-step has shown that it may beat every rival: then it may take what it needs."""

    @classmethod
    def of(cls, request: TrialRequest, accumulation: int) -> Pace:
        """The pace that a request asks for."""
        workload = request.job.workload
        batches = micro_batches(request.config, workload)
        return cls(
            tokens_per_step=workload.tokens_per_step,
            accumulation=accumulation,
            # Nothing in a micro-step grows faster than with the square of the length.
            least_share=1.0 if batches is None else batches.rows * batches.moment(2) / workload.seq_len**2,
            mean_share=1.0 if batches is None else batches.tokens / workload.seq_len,
            update_share=1.0 if batches is None else batches.rows,
            rivals=request.rivals,
            least_tokens_per_second=request.least_tokens_per_second,
            allowance_seconds=request.allowance_seconds,
        )

    def judge(self, number: int, micro_seconds: float, *, elapsed_seconds: float, micro_steps_left: float) -> Event:
        """The event to tell the trial's parent. Raises `TooSlow` where the trial is not worth its remaining seconds.

        `micro_seconds`: what the micro-step of that `number` took, the first being 1; `micro_steps_left`: as many are
        still to be run.
        """
        # What any micro-step takes at least: less than nothing, if the first has shown nothing.
        least_micro_seconds = micro_seconds - ONCE_SECONDS if number == 1 else UNSTEADY * micro_seconds
        fastest = max((rival.tokens_per_second for rival in self.rivals), default=0.0)
        likely_seconds = self.accumulation * micro_seconds * self.mean_share
        self.earned = self.earned or 0.0 < fastest * likely_seconds < self.tokens_per_step
        step_seconds = self.accumulation * self.least_share * least_micro_seconds
        event = Event(earned=self.earned, least_step_seconds=step_seconds if number > 1 else 0.0)
        if step_seconds <= 0.0:
            return event
        speed = self.tokens_per_step / step_seconds
        left_seconds = micro_steps_left * least_micro_seconds
        if left_seconds < 3.0:
            return event  # worth finishing: one slow moment must not end it
        pace = f"a step takes at least {format_duration(step_seconds)}"
        projected = elapsed_seconds + left_seconds
        reason = None
        if fastest >= BEATEN_FACTOR * speed:
            reason = f"and another config is {fastest / speed:.0f} times as fast"
        elif self.least_tokens_per_second >= speed:
            reason = "which is not practical beside another method"
        elif self.allowance_seconds is not None and not self.earned and projected > self.allowance_seconds:
            worth = format_duration(self.allowance_seconds)
            reason = f"so that the trial would take {format_duration(projected)} and not the {worth} that it is worth"
        if reason is not None:
            raise TooSlow(f"{pace}, {reason}", step_seconds, is_proven=number > 1)
        return event
