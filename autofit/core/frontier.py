"""The Pareto frontier of peak memory against throughput, and the recommendation read off it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.document import Document
from autofit.core.lattice import Config
from autofit.core.outcome import Measurement, Trial
from autofit.core.repeatability import widened
from autofit.core.verdict import contradiction, most_memory, standing
from autofit.core.workload import METHODS, Workload

MAX_TIE = 0.05
"""Relative speed difference above which two configs never tie, however noisy their measurements."""


class HasConfig(Protocol):
    """Whatever is of one config."""

    @property
    def config(self) -> Config: ...


class Candidate(HasConfig, Protocol):
    """A config with its memory and speed, measured or predicted."""

    @property
    def device_bytes(self) -> int: ...

    @property
    def tokens_per_second(self) -> float | None: ...


H = TypeVar("H", bound=HasConfig)
C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measured config that fits."""

    config: Config
    measurement: Measurement
    trial_id: int | None
    runs: int = 1
    """How often the config was timed in full, each time in a fresh process."""
    between: float = 0.0
    """`repeatability.between_executions` of its hardware, as far as it is known."""
    in_doubt: bool = False
    """Whether the device was not free while it was timed (`Trial.doubts`)."""

    @property
    def verified(self) -> bool:
        return self.runs >= 2

    @property
    def relative_spread(self) -> float | None:
        """Width of the 90 % interval for the speed in another process, relative to the speed; None for a single repeat,
        whose spread is unknown."""
        spread = self.measurement.step_seconds.relative_spread
        return None if spread is None else widened(spread, self.between)

    @property
    def half_spread(self) -> float:
        """By what share the speed may be off in either direction, for deciding ties."""
        spread = self.relative_spread
        return MAX_TIE if spread is None else min(spread / 2, MAX_TIE)

    @property
    def device_bytes(self) -> int:
        return self.measurement.device_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.measurement.tokens_per_second

    @property
    def method(self) -> str:
        """Training method; each method has its own frontier."""
        return self.config.text("method")

    def to_json(self) -> dict[str, Any]:
        return {"config": self.config.to_json(), "measurement": self.measurement.to_json(), "trial_id": self.trial_id}


def point(trial: Trial, runs: int = 1, between: float = 0.0) -> Point | None:
    """The trial as a point; None if it did not fit."""
    if trial.measurement is None:
        return None
    return Point(
        config=trial.config,
        measurement=trial.measurement,
        trial_id=trial.trial_id,
        runs=runs,
        between=between,
        in_doubt=bool(trial.doubts),
    )


def speed(candidate: Candidate) -> float:
    """Tokens per second; 0 where it is unknown."""
    return candidate.tokens_per_second or 0.0


def by_method(candidates: Iterable[H]) -> dict[str, list[H]]:
    """The candidates of each method that has any, the most faithful method first."""
    every = list(candidates)
    members = {method: [c for c in every if c.config["method"] == method] for method in METHODS}
    return {method: own for method, own in members.items() if own}


def dominates(a: Candidate, b: Candidate) -> bool:
    """Whether `a` is at least as good as `b` in both memory and throughput, and better in one."""
    no_worse = a.device_bytes <= b.device_bytes and speed(a) >= speed(b)
    return no_worse and (a.device_bytes < b.device_bytes or speed(a) > speed(b))


def ties(a: Point, b: Point) -> bool:
    """Whether the speeds differ by no more than their measurement uncertainty."""
    speeds = (a.tokens_per_second, b.tokens_per_second)
    return min(speeds) >= max(speeds) * (1 - max(a.half_spread, b.half_spread))


def timed_in_full(points: Iterable[Point]) -> list[Point]:
    """Drops the points whose timing stopped early, unless their method has no others; what beat them is kept."""
    every = list(points)
    full = {p.method for p in every if not p.measurement.stopped_early}
    return [p for p in every if not p.measurement.stopped_early or p.method not in full]


def pareto(candidates: Iterable[C]) -> tuple[C, ...]:
    """The candidates that no other dominates, sorted by memory; of exact ties, the first. O(n log n)."""
    best: list[C] = []
    for candidate in sorted(candidates, key=lambda c: (c.device_bytes, -speed(c))):
        if not best or speed(candidate) > speed(best[-1]):
            best.append(candidate)
    return tuple(best)


def frontiers(candidates: Iterable[C]) -> tuple[C, ...]:
    """The frontiers of all methods together, sorted by memory."""
    points = [c for members in by_method(candidates).values() for c in pareto(members)]
    return tuple(sorted(points, key=lambda c: c.device_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The frontiers of one (hardware, workload, stack): full, LoRA and QLoRA side by side."""

    hardware: Hardware
    workload: Workload
    stack: Stack
    points: tuple[Point, ...]
    """Sorted by memory; each is undominated among the points of its own method."""
    trials: int
    out_of_memory: int
    contradictory: int = 0
    """Configs whose trials contradict each other: they count as out of memory (`core.verdict`)."""
    considered: tuple[Point, ...] = ()
    """All points that the frontier was taken from. The recommendation is chosen among these, because a config beaten
    only within the noise may change the training less."""

    @classmethod
    def of(cls, points: Iterable[Point], **about: Any) -> Frontier:
        """The frontiers of `points`, whatever their methods; `about` are the fields that are not made of points."""
        every = tuple(points)
        return cls(points=frontiers(timed_in_full(every)), considered=every, **about)

    @classmethod
    def judged(
        cls, configs: Collection[Sequence[Trial]], memory_limit_bytes: int, between: float, **about: Any
    ) -> Frontier:
        """The frontiers of configs under a limit, 0 standing for none, from the attempts of each, oldest first: each
        config is known by one of them (`verdict.standing`). `between` is that of their hardware; `about` as for `of`.
        """
        known = ((standing(attempts, memory_limit_bytes), attempts) for attempts in configs)
        points = (point(t, sum(a.timed_in_full for a in attempts), between) for t, attempts in known if t is not None)
        contradictions = (contradiction(a, memory_limit_bytes or most_memory(a)) for a in configs if len(a) > 1)
        return cls.of(
            sorted((p for p in points if p is not None), key=lambda p: p.trial_id or 0),
            contradictory=sum(found is not None for found in contradictions),
            **about,
        )

    def only(self, keep: Callable[[Config], bool]) -> Frontier:
        """The frontiers of the configs that `keep` accepts. It must judge all configs of a family alike: `considered`
        need only hold those of each family that no other member beats."""
        considered = tuple(p for p in self.considered if keep(p.config))
        return replace(self, points=frontiers(timed_in_full(considered)), considered=considered)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object. A point's `device_bytes` are those of the device that needs most, its `tokens_per_second`
        the total of all devices; with several devices it also has `tokens_per_second_per_device`."""
        return {
            "hardware": self.hardware.to_json(),
            "workload": self.workload.to_json(),
            "stack": self.stack.to_json(),
            "points": [p.to_json() | self._per_device(p) for p in self.points],
            "trials": self.trials,
            "out_of_memory": self.out_of_memory,
            "contradictory": self.contradictory,
        }

    def _per_device(self, point: Point) -> dict[str, float]:
        devices = self.workload.devices
        return {} if devices == 1 else {"tokens_per_second_per_device": point.measurement.tokens_per_second / devices}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative(Document, Generic[C]):
    """Another config of interest besides the recommended one."""

    role: str
    """`faster, does not fit`, `lighter`, `other method`, or `fits, but too slow to be practical` of a more faithful
    method."""
    point: C
    over_limit_bytes: int
    """How far its memory is above the limit; negative where it fits."""
    speedup: float
    """Ratio of its tokens per second to the recommended config's."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, with the point's keys among its own."""
        body = Document.to_json(self)
        return {**body.pop("point"), **body}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation(Document):
    """The fastest measured config of the most faithful method that fits the requested memory."""

    point: Point
    memory_limit_bytes: int
    headroom_bytes: int
    """Limit minus the memory that the driver reported at the peak."""
    changes_training: tuple[str, ...]
    """What differs from the plain recipe in numerics or training, one sentence each."""
    alternatives: tuple[Alternative[Point], ...]
    hardware: Hardware
    workload: Workload
    stack: Stack
    provenance: str = "measured"
    contradictory: int = 0
    """`contradictory` of the frontier that it was read off."""

    @property
    def verified(self) -> bool:
        return self.point.verified

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, with the point's keys among its own."""
        body = Document.to_json(self)
        return {**body.pop("point"), "verified": self.verified, **body}


PRACTICAL = 0.2
"""Share of the next less faithful method's speed below which a method that fits is of no practical use."""


def least_practical_speed(method: str, speeds: Mapping[str, float]) -> float:
    """The speed below which `method` is of no practical use, given that of the next less faithful one whose speed is
    known; 0 where there is none."""
    less_faithful = METHODS[METHODS.index(method) + 1 :]
    return next((PRACTICAL * speeds[other] for other in less_faithful if other in speeds), 0.0)


def practical(speeds: Mapping[str, float]) -> str | None:
    """The method to recommend, given the speed of each one's best config that fits: the most faithful practical one.
    None if nothing fits."""
    fitting = [method for method in METHODS if method in speeds]
    return next((method for method in fitting if speeds[method] >= least_practical_speed(method, speeds)), None)


def best(
    fitting: Iterable[C], *, methods: Collection[str], ties: Callable[[C, C], bool], changes: Callable[[Config], int]
) -> C | None:
    """The fastest of what fits, from the most faithful of `methods` that has a practical one (`practical`); among those
    that tie with the fastest, the one that `changes` the training least, then the lightest. None if nothing fits."""
    of_methods = {method: members for method, members in by_method(fitting).items() if method in methods}
    method = practical({method: max(map(speed, members)) for method, members in of_methods.items()})
    if method is None:
        return None
    candidates = of_methods[method]
    fastest = max(candidates, key=speed)
    tied = [c for c in candidates if ties(c, fastest)]
    # A noisy one may tie with the fastest where a better one does not: leave out what is beaten outright.
    return next(
        c
        for c in sorted(tied, key=lambda c: (changes(c.config), c.device_bytes, -speed(c)))
        if not any(dominates(d, c) and changes(d.config) <= changes(c.config) for d in candidates)
    )


def choose(
    points: Iterable[Point],
    *,
    memory_limit_bytes: int,
    methods: Collection[str],
    changes: Callable[[Config], int] = lambda config: 0,
) -> Point | None:
    """The `best` point within the limit; None if nothing fits."""
    fitting = timed_in_full(p for p in points if p.device_bytes <= memory_limit_bytes)
    return best(fitting, methods=methods, ties=ties, changes=changes)


def alternatives_to(
    chosen: C,
    candidates: Iterable[C],
    *,
    memory_limit_bytes: int,
    fits: Callable[[C], bool],
    best_of: Callable[[str], C | None],
    least_speedup: float = 1.0,
) -> tuple[Alternative[C], ...]:
    """What is of interest beside the chosen one: the lightest that does not fit and is more than `least_speedup` times
    as fast, the next lighter one, and the best of each other method."""
    method = chosen.config.text("method")
    others = [c for c in candidates if c.config["method"] == method and c.config != chosen.config]
    over = [c for c in others if not fits(c) and speed(c) > least_speedup * speed(chosen)]
    lighter = [c for c in pareto(filter(fits, others)) if c.device_bytes < chosen.device_bytes]
    picks = [("faster, does not fit", c) for c in pareto(over)[:1]] + [("lighter", c) for c in lighter[-1:]]
    for other in METHODS:
        best_other = None if other == method else best_of(other)
        if best_other is not None:
            more_faithful = METHODS.index(other) < METHODS.index(method)
            too_slow = more_faithful and speed(best_other) < PRACTICAL * speed(chosen)
            picks.append(("fits, but too slow to be practical" if too_slow else "other method", best_other))
    return tuple(
        Alternative(
            role=role,
            point=other,
            over_limit_bytes=other.device_bytes - memory_limit_bytes,
            speedup=speed(other) / speed(chosen),
        )
        for role, other in picks
    )


def alternatives(chosen: Point, points: Iterable[Point], *, memory_limit_bytes: int) -> tuple[Alternative[Point], ...]:
    """What is of interest beside the chosen one of what was measured."""
    every = list(points)
    return alternatives_to(
        chosen,
        every,
        memory_limit_bytes=memory_limit_bytes,
        fits=lambda p: p.device_bytes <= memory_limit_bytes,
        best_of=lambda method: choose(every, memory_limit_bytes=memory_limit_bytes, methods=[method]),
    )
