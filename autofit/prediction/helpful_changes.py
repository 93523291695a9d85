"""Changes to a config that help: the most faithful ones that make it fit or, if it fits already, make it faster."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autofit.catalog.hardware import fitting
from autofit.catalog.space import ADAPTER_AXES
from autofit.core.frontier import speed
from autofit.core.lattice import Axis, Config, Lattice, Value
from autofit.core.workload import METHODS, Effect
from autofit.estimate.estimate import Change, Estimate, Lightest
from autofit.estimate.memory.lower_bound import floor_bytes
from autofit.planning.lattices import default_space, load_space
from autofit.techniques import AXES, complete, holds, lightness

if TYPE_CHECKING:
    from autofit.estimate.memory.deviation import MemoryDeviation
    from autofit.prediction.estimate_cache import CachedEstimator

GAIN = 0.03
"""Relative difference in predicted speed below which it does not count."""
WITHOUT_TRACE = ("rank", "micro_batch", "optimizer", "loss")
"""Axes that can be varied without tracing the decoder again (`Estimator`)."""


class Words:
    """What a user can ask for: here any config, in one word for each of its values."""

    def said(self, config: Config) -> Config | None:
        """The nearest config that the user can ask for; None if there is none."""
        return config

    def beside(self, config: Config) -> int:
        """Bytes that a config which was said takes besides, which the limit of what was found no longer has."""
        return 0

    def length(self, change: Change) -> int:
        """In how many places the user has to change something."""
        return len(change.values)


def advised(
    found: Estimate,
    estimator: CachedEstimator,
    refused: Callable[[Config], str | None],
    report: Callable[[int], None],
    shown: Mapping[str, MemoryDeviation] | None,
    words: Words,
) -> Estimate:
    """`found` with changes to it or, if nothing near it is likely to fit, with what the lightest config needs.

    `refused` says why a config cannot be estimated for the estimator's job (None if it can); `report` is called with
    the number of configs predicted so far; `shown` is how far memory may be off (`Estimate.judged`).
    """
    judged = found if shown is None else found.judged(shown)
    near = _Neighbourhood(judged, estimator, refused, report, shown, words)
    if judged.likely_fits:
        return replace(judged, advice=near.faster())
    changes = near.that_fit()
    return replace(judged, advice=changes, lightest=None if changes else near.lightest())


def effect_of(before: Config, after: Config) -> Effect:
    """The strongest effect of the differences between two configs: none, on the numerics, or on the training."""
    differ = (axis for axis in AXES if before.get(axis.name) != after.get(axis.name))
    return max((_strongest(axis, before, after) for axis in differ), default=Effect.EXACT)


def _strongest(axis: Axis, before: Config, after: Config) -> Effect:
    if axis.name == "rank":
        return Effect.TRAINING
    return max(axis.effect(config[axis.name]) for config in (before, after) if axis.name in config)


class _Neighbourhood:
    """The configs that differ from a given one in one or two values of the default space, or in one beside the lightest
    step, each predicted at most once."""

    def __init__(
        self,
        found: Estimate,
        estimator: CachedEstimator,
        refused: Callable[[Config], str | None],
        report: Callable[[int], None],
        shown: Mapping[str, MemoryDeviation] | None,
        words: Words,
    ) -> None:
        job = estimator.job
        self._words = words
        self._whole_limit = found.memory_limit_bytes + words.beside(found.config)
        self._shown = shown
        self._found = found
        self._estimator = estimator
        self._refused = refused
        self._report = report
        self._space = load_space(default_space(job.hardware, job.workload.devices))
        self._order = Lattice(axes=AXES, configs=(), holds=holds(job))
        self._known: dict[Config, Estimate] = {found.config: found}
        self._grant_traces()

    def that_fit(self) -> tuple[Change, ...]:
        """The most faithful changes that are likely to make it fit: of one value or two, else of one value beside the
        lightest step. What moves states or weights to the host may take many times as long: where nothing else trains
        exactly the same, it comes first, before what keeps them where they are."""
        moved: list[Estimate] = []
        for effect in Effect:
            near = [config for changes in (1, 2) for config in self._lighter(effect, changes)]
            beside: list[Config] | None = None
            for method in range(len(METHODS)):
                self._grant_traces()
                fits = self._fitting(c for c in near if _method(c) == method)
                if not self._staying(fits):
                    beside = self._beside_the_lightest_step(effect) if beside is None else beside
                    fits += self._fitting(c for c in beside if _method(c) == method)
                if staying := self._staying(fits):
                    exact = [e for e in moved if effect_of(self._found.config, e.config) is Effect.EXACT]
                    on_host = effect is Effect.TRAINING and not exact
                    first = self._offloading() if on_host else self._same_training(exact)
                    return (*first, *self._options(staying))
                moved = moved or fits
        return self._options(moved) if moved else self._offloading()

    def _staying(self, fits: list[Estimate]) -> list[Estimate]:
        """Those that keep states and weights where they are."""
        return [fit for fit in fits if fit.config["offload"] == self._found.config["offload"]]

    def _same_training(self, fits: list[Estimate]) -> tuple[Change, ...]:
        """The fastest of some that train exactly the same, if there are any."""
        return (replace(self._change(max(fits, key=_speed_or_memory)), roles=("same training",)),) if fits else ()

    def _offloading(self) -> tuple[Change, ...]:
        """The fastest change that moves states or weights to the host, which the default space of one card leaves
        out."""
        if self._estimator.job.hardware.kind == "cpu":
            return ()  # whose host is where everything is anyway
        steps: list[dict[str, Value]] = [{}, {"checkpointing": "full"}, *self._lightest_steps()]
        ways = [{"offload": offload, **step} for offload in ("optimizer", "params") for step in steps]
        self._grant_traces()
        return self._same_training(self._fitting(self._near(ways, Effect.EXACT)))

    def faster(self) -> tuple[Change, ...]:
        """Changes that are likely to fit and gain enough, exact ones, else those in numerics: single ones, and those
        that need a lighter value beside them. The training itself stays as the user chose it."""
        if self._found.tokens_per_second is None:
            return ()
        for effect in (Effect.EXACT, Effect.NUMERICS):
            self._grant_traces()
            fits = self._fitting(self._not_sure_to_be_slower(effect))
            fits += self._fitting(self._with_something_lighter(effect))
            faster = [estimate for estimate in fits if self._is_faster(estimate)]
            if faster:
                return self._options(faster)
        return ()

    def _is_faster(self, estimate: Estimate) -> bool:
        return speed(estimate) >= speed(self._found) * (1 + GAIN)

    def _with_something_lighter(self, effect: Effect) -> list[Config]:
        """What would be faster and is not likely to fit, with one lighter value beside it."""
        quick = [e.config for e in self._known.values() if not e.likely_fits and self._is_faster(e)]
        here = self._found.config
        own = [{axis: c[axis] for axis in c if c[axis] != here.get(axis)} for c in quick]
        less = self._lighter_values()
        return self._near(({**values, a: light} for values in own for a, light in less if a not in values), effect)

    def _options(self, fits: list[Estimate]) -> tuple[Change, ...]:
        """Of those with the most faithful method, the smallest change, the fastest and the safest, which may be one."""
        first = min(_method(estimate.config) for estimate in fits)
        changes = [self._change(estimate) for estimate in fits if _method(estimate.config) == first]
        best = {
            "smallest": max(changes, key=lambda c: (-self._words.length(c), *_speed_or_memory(c.estimate))),
            "fastest": self._fastest(changes),
            "safest": max(changes, key=lambda change: (change.estimate.headroom_bytes, speed(change.estimate))),
        }
        options: dict[Config, Change] = {}
        for role, change in best.items():
            known = options.setdefault(change.estimate.config, change)
            options[change.estimate.config] = replace(known, roles=(*known.roles, role))
        return tuple(options.values())

    def _fastest(self, changes: Sequence[Change]) -> Change:
        """The one that changes least of those whose speed nobody could tell from the highest."""
        top = max(changes, key=lambda change: _speed_or_memory(change.estimate))
        least = speed(top.estimate) * (1 - GAIN)
        alike = [change for change in changes if speed(change.estimate) >= least > 0] or [top]
        return min(alike, key=lambda c: (c.effect, self._words.length(c), -speed(c.estimate)))

    def lightest(self) -> Lightest:
        """The config with every axis at the lightest value that can be estimated here; where that is likely to fit, as
        much of the training stays as it was as then still fits."""
        config = self._found.config
        for axis in AXES:
            if (present := axis.of(config)) is not None:
                lighter = [changed(config, {axis.name: value}) for value in self._values(axis, below=present)]
                said = (self._words.said(wanted) for wanted in lighter if self._possible(wanted))
                config = next((lighter for lighter in said if lighter is not None), config)
        estimate = self._estimate(config)
        for name in ("method", "rank", "targets", "optimizer"):
            kept = self._found.config.get(name)
            if estimate.likely_fits and kept is not None and estimate.config.get(name) not in (None, kept):
                wanted = changed(estimate.config, {name: kept})
                nearer = self._words.said(wanted) if self._possible(wanted) else None
                if nearer is not None and (other := self._estimate(nearer)).likely_fits:
                    estimate = other
        return Lightest(estimate=estimate, card=self._card(estimate))

    def _lighter(self, effect: Effect, changes: int) -> list[Config]:
        """The configs with `changes` lighter values whose strongest effect is `effect`."""
        chosen = [dict(some) for some in itertools.combinations(self._lighter_values(), changes)]
        return self._near((values for values in chosen if len(values) == changes), effect)

    def _beside_the_lightest_step(self, effect: Effect) -> list[Config]:
        """The configs with one lighter value whose strongest effect is `effect`, beside one of the lightest steps."""
        steps, moves = self._lightest_steps(), self._lighter_values()
        return self._near(({**step, name: v} for name, v in moves for step in steps if name not in step), effect)

    def _lighter_values(self) -> list[tuple[str, Value]]:
        return [(a.name, value) for a, present in self._present() for value in self._values(a, below=present)]

    def _lightest_steps(self) -> list[dict[str, Value]]:
        """The smallest micro-batch with every layer recomputed, and with its inputs on the host, too: what is lighter
        of them. They leave the training as it is."""
        wanted = ({"micro_batch": 1, "checkpointing": checkpointing} for checkpointing in ("full", "offload"))
        present = self._present()
        return [
            {
                a.name: values[a.name]
                for a, now in present
                if a.name in values and a.place(values[a.name]) < a.place(now)
            }
            for values in wanted
        ]

    def _not_sure_to_be_slower(self, effect: Effect) -> list[Config]:
        """The configs that differ in one value, except those that merely recompute more or launch more operations."""
        moves = [
            (axis, value)
            for axis, present in self._present()
            for value in self._values(axis)
            if not (axis.name in ("checkpointing", "micro_batch") and axis.is_lighter_or_equal(value, present))
        ]
        return self._near(({axis.name: value} for axis, value in moves), effect)

    def _present(self) -> list[tuple[Axis, Value]]:
        config = self._found.config
        return [(axis, present) for axis in AXES if (present := axis.of(config)) is not None]

    def _values(self, axis: Axis, *, below: Value | None = None) -> list[Value]:
        """The default space's values of an axis, lightest first; with `below`, only those before it."""
        listed: Iterable[Value] = self._space.axes.get(axis.name, ())
        if axis.name == "attention" and listed:
            listed = ("efficient", *listed)  # which a search takes in place of sdpa where that helps
        if axis.name == "micro_batch":
            batch = self._estimator.job.workload.batch_per_device
            among = set(listed) or range(1, batch + 1)
            listed = [size for size in range(1, batch + 1) if batch % size == 0 and size in among]
        if below is None:
            return list(listed)
        return [value for value in listed if axis.place(value) < axis.place(below)]

    def _near(self, changes: Iterable[dict[str, Value]], effect: Effect) -> list[Config]:
        here = self._found.config
        wanted = dict.fromkeys(changed(here, values) for values in changes)
        near = dict.fromkeys(said for config in wanted if (said := self._words.said(config)) is not None)
        return [c for c in near if c != here and effect_of(here, c) is effect and self._possible(c)]

    def _possible(self, config: Config) -> bool:
        """Whether `config` can be estimated and the space's rules exclude none of its new values."""
        here, values = self._found.config, config.to_json()
        changed = {axis for axis in config if config[axis] != here.get(axis)}
        ruled_out = (r.excludes(values) and not changed.isdisjoint({*r.only, *r.never}) for r in self._space.rules)
        return not any(ruled_out) and self._refused(config) is None

    def _fitting(self, configs: Iterable[Config]) -> list[Estimate]:
        """The estimates that are likely to fit. Lighter configs are estimated first: any above one that does not fit is
        skipped."""
        found = []
        for config in sorted(configs, key=lightness):
            if config in self._known or (not self._too_heavy(config) and self._affordable(config)):
                estimate = self._estimate(config)
                if estimate.likely_fits:
                    found.append(estimate)
        return found

    def _too_heavy(self, config: Config) -> bool:
        if floor_bytes(config, self._estimator.job) > self._whole_limit - self._words.beside(config):
            return True
        return any(not e.fits and self._order.is_lighter_or_equal(e.config, config) for e in self._known.values())

    def _grant_traces(self) -> None:
        """Allow as many more decoders to be traced as a single exact change may need; for an 8B model each takes about
        a second, and a compiled one up to three."""
        self._may_be_traced = len(self._traced()) + 6

    def _traced(self) -> set[Config]:
        return {known.without(*WITHOUT_TRACE) for known in self._known}

    def _affordable(self, config: Config) -> bool:
        traced = self._traced()
        return config.without(*WITHOUT_TRACE) in traced or len(traced) < self._may_be_traced

    def _estimate(self, config: Config) -> Estimate:
        if config not in self._known:
            limit = self._whole_limit - self._words.beside(config)
            self._known[config] = self._judged(self._estimator.estimate(config, memory_limit_bytes=limit))
            self._report(len(self._known))
        return self._known[config]

    def _judged(self, estimate: Estimate) -> Estimate:
        return estimate if self._shown is None else estimate.judged(self._shown)

    def _change(self, estimate: Estimate) -> Change:
        before, after = self._found.config, estimate.config
        values = {a.name: now for a in AXES if (now := a.of(after)) is not None and a.of(before) != now}
        return Change(values=values, effect=effect_of(before, after), estimate=estimate)

    def _card(self, estimate: Estimate) -> str | None:
        """The smallest card that is likely to hold it, among those that the estimator covers; the user's own where only
        the limit is too low."""
        own = self._estimator.job.hardware
        if own.kind != "cuda":
            return None
        estimate = replace(
            estimate,
            device_bytes=estimate.device_bytes + self._words.beside(estimate.config),
            memory_limit_bytes=self._whole_limit,
        )
        if not estimate.likely_fits and replace(estimate, memory_limit_bytes=own.memory_bytes).likely_fits:
            return own.name
        bf16 = estimate.config.text("precision").startswith("bf16")
        enough = (c for c in fitting(estimate.device_bytes) if c.vendor == "nvidia" and (c.bf16 or not bf16))
        return next((c.name for c in enough if replace(estimate, memory_limit_bytes=c.memory_bytes).likely_fits), None)


def changed(config: Config, values: Mapping[str, Value]) -> Config:
    """`config` with other values. Axes that do not apply to the new method are dropped; those that now apply take the
    recipe's values."""
    together = {**config.to_json(), **values}
    if together["method"] == "full":
        together = {name: value for name, value in together.items() if name not in ADAPTER_AXES}
    return complete(together)


def _speed_or_memory(estimate: Estimate) -> tuple[float, int]:
    """A sort key by speed: where none is known, what needs the most memory is likely the fastest."""
    return speed(estimate), estimate.device_bytes


def _method(config: Config) -> int:
    return METHODS.index(config.text("method"))
