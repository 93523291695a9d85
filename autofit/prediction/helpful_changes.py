"""Changes to a config that help: the most faithful ones that make it fit or, if it fits already, make it faster."""

from __future__ import annotations

import itertools
from collections import defaultdict
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
from autofit.prediction.calibration import why_not
from autofit.techniques import AXES, AXIS, TECHNIQUES, Job, Part, complete, holds, lightness
from autofit.techniques.habits import is_under_autocast, of_formats

if TYPE_CHECKING:
    from autofit.prediction.estimate_cache import CachedEstimator

GAIN = 0.03
"""Relative difference in predicted speed below which it does not count."""
WITHOUT_TRACE = tuple(t.axis.name for t in TECHNIQUES if t.scales or not t.parts & {Part.DECODER, Part.RANK})
"""Axes that can be varied without tracing the decoder again. With update=in-backward the optimizer is a part of it,
which is not counted."""
Tier = tuple[Effect, int]
"""What changes do to the training, and the method's place in `METHODS`: the lowest tier is the most faithful."""


class Expressible:
    """What a user can write: here any config, with one edit for each of its values."""

    def nearest_expressible(self, config: Config) -> Config | None:
        """The nearest config that the user can write; None if there is none."""
        return config

    def extra_bytes(self, config: Config) -> int:
        """Bytes that a config takes beyond its estimate, which the limit of the given estimate already leaves out."""
        return 0

    def edit_count(self, change: Change) -> int:
        """In how many places the user has to change something."""
        return len(change.values)


def advised(
    estimate: Estimate, estimator: CachedEstimator, report: Callable[[int], None], expressible: Expressible
) -> Estimate:
    """`estimate` with changes to it or, if nothing near it is likely to fit, with what the lightest config needs.

    `report` is called with the number of configs predicted so far.
    """
    neighbourhood = _Neighbourhood(estimate, estimator, report, expressible)
    if estimate.likely_fits:
        return replace(estimate, advice=neighbourhood.faster())
    changes = neighbourhood.that_fit()
    return replace(estimate, advice=changes, lightest=None if changes else neighbourhood.lightest())


def effect_of(before: Config, after: Config, job: Job) -> Effect:
    """The strongest effect of the differences between two configs: none, on the numerics, or on the training. Number
    formats that the trainer changes with one of them only are numerics."""
    effects = [Effect.EXACT if _formats(before, job) == _formats(after, job) else Effect.NUMERICS]
    for axis in AXES:
        name = axis.name
        if before.get(name) != after.get(name):
            ends = (axis.effect(config[name]) for config in (before, after) if name in config)
            effects.append(Effect.TRAINING if name == "rank" else max(ends))
    return max(effects)


def _formats(config: Config, job: Job) -> tuple[object, ...]:
    return *of_formats(config, job.workload.trainer), is_under_autocast(config, job)


class _Neighbourhood:
    """The configs near a given one, each predicted at most once. They differ from it in one or two values of the
    default space, or in one value and the lightest step."""

    def __init__(
        self, base: Estimate, estimator: CachedEstimator, report: Callable[[int], None], expressible: Expressible
    ) -> None:
        job = estimator.job
        self._expressible = expressible
        self._whole_limit = base.memory_limit_bytes + expressible.extra_bytes(base.config)
        self._base = base
        self._estimator = estimator
        self._report = report
        self._space = load_space(default_space(job.hardware, job.workload.devices))
        self._order = Lattice(axes=AXES, configs=(), holds=holds(job))
        self._estimates: dict[Config, Estimate] = {base.config: base}
        self._grant_traces()

    def that_fit(self) -> tuple[Change, ...]:
        """The most faithful changes that are likely to make it fit: of one or two values, and where none of these is
        sure to, of one value and the lightest step. Moving states or weights to the host may take many times as long:
        where nothing else trains exactly the same, such a change comes first, and it is the only one where nothing else
        fits."""
        near, beside_step = self._by_tier(self._lighter()), self._by_tier(self._beside_the_lightest_step())
        moved: list[Estimate] = []
        for effect, method in sorted({*near, *beside_step}):
            self._grant_traces()
            fits = self._fitting(near[effect, method])
            if all(fit.certainty == "likely" for fit in self._unmoved(fits)):
                fits += self._fitting(beside_step[effect, method])
            if unmoved := self._unmoved(fits):
                same = [fit for fit in moved if self._effect_of(fit.config) is Effect.EXACT]
                if effect is Effect.TRAINING and not same:
                    same = self._moved_to_host()
                return (*self._same_training(same), *self._options(unmoved))
            moved = moved or fits
        return self._options(moved) if moved else self._same_training(self._moved_to_host())

    def _unmoved(self, fits: list[Estimate]) -> list[Estimate]:
        """The estimates that keep states and weights where they are."""
        return [fit for fit in fits if fit.config["offload"] == self._base.config["offload"]]

    def _moved_to_host(self) -> list[Estimate]:
        """What fits with states or weights on the host, where no default space of one card puts them."""
        if self._estimator.job.hardware.kind == "cpu":
            return []  # whose host is where everything is anyway
        steps: list[dict[str, Value]] = [{}, {"checkpointing": "full"}, *self._lightest_steps()]
        changes = [{"offload": offload, **step} for offload in ("optimizer", "params") for step in steps]
        self._grant_traces()
        return self._fitting(self._by_tier(changes)[self._tier(Effect.EXACT)])

    def _same_training(self, fits: list[Estimate]) -> tuple[Change, ...]:
        """The change to the fastest of `fits`, which all train exactly the same; none if there are none."""
        return (self._change(max(fits, key=_speed_or_memory), "same training"),) if fits else ()

    def faster(self) -> tuple[Change, ...]:
        """Changes that are likely to fit and gain enough: exact ones, else those in numerics. Some also need a lighter
        value. The training itself stays as the user chose it."""
        if self._base.tokens_per_second is None:
            return ()
        for effect in (Effect.EXACT, Effect.NUMERICS):
            tier = self._tier(effect)
            self._grant_traces()
            fits = self._fitting(self._by_tier(self._not_sure_to_be_slower())[tier])
            fits += self._fitting(self._by_tier(self._faster_with_lighter_value())[tier])
            if faster := [estimate for estimate in fits if self._is_faster(estimate)]:
                return self._options(faster)
        return ()

    def _is_faster(self, estimate: Estimate) -> bool:
        return speed(estimate) >= speed(self._base) * (1 + GAIN)

    def _options(self, fits: Sequence[Estimate]) -> tuple[Change, ...]:
        """The smallest, fastest and safest change to what fits, all of one tier; one may be several of these."""
        smallest = max(
            fits,
            key=lambda fit: (-self._edit_count(fit), self._keeps_optimizer(fit.config), *_speed_or_memory(fit)),
        )
        safest = max(fits, key=lambda fit: (fit.headroom_bytes, speed(fit)))
        best = {"smallest": smallest, "fastest": self._fastest(fits, (smallest, safest)), "safest": safest}
        roles: dict[Config, list[str]] = {}
        for role, fit in best.items():
            roles.setdefault(fit.config, []).append(role)
        return tuple(self._change(self._estimates[config], *of_it) for config, of_it in roles.items())

    def _keeps_optimizer(self, config: Config) -> bool:
        """Whether the optimizer is the present one, or another form of it."""
        optimizer = config["optimizer"]
        return optimizer == self._base.config["optimizer"] or AXIS["optimizer"].effect(optimizer) < Effect.TRAINING

    def _fastest(self, fits: Sequence[Estimate], shown: Sequence[Estimate]) -> Estimate:
        """What takes the fewest edits among those whose speed nobody could tell from the highest; one that is `shown`
        anyway if it is among them."""
        top = max(fits, key=_speed_or_memory)
        alike = [fit for fit in fits if speed(fit) >= speed(top) * (1 - GAIN) > 0] or [top]
        shown_too = [fit for fit in shown if fit in alike]
        return max(shown_too, key=speed) if shown_too else min(alike, key=lambda f: (self._edit_count(f), -speed(f)))

    def lightest(self) -> Lightest:
        """The config with every axis at the lightest value that can be estimated here. If it is likely to fit, as much
        of the training as still fits then stays as it was."""
        config = self._base.config
        for axis in AXES:
            lighter = (self._reached(changed(config, {axis.name: value})) for value in self._lighter_than(axis, config))
            config = next(filter(None, lighter), config)
        estimate = self._estimate(config)
        for name in ("method", "rank", "targets", "optimizer"):
            kept = self._base.config.get(name)
            if estimate.likely_fits and kept is not None and estimate.config.get(name) not in (None, kept):
                nearest = self._reached(changed(estimate.config, {name: kept}))
                if nearest is not None and (other := self._estimate(nearest)).likely_fits:
                    estimate = other
        return Lightest(estimate=estimate, card=self._card(estimate))

    def _lighter(self) -> list[dict[str, Value]]:
        """Every one lighter value, and every two of different axes."""
        combinations = (pairs for n in (1, 2) for pairs in itertools.combinations(self._lighter_values(), n))
        return [values for pairs in combinations if len(values := dict(pairs)) == len(pairs)]

    def _beside_the_lightest_step(self) -> list[dict[str, Value]]:
        """Every one lighter value with each of the lightest steps."""
        steps = self._lightest_steps()
        return [{**step, name: value} for name, value in self._lighter_values() for step in steps if name not in step]

    def _faster_with_lighter_value(self) -> list[dict[str, Value]]:
        """What would be faster but is not likely to fit, with one more value lighter."""
        base = self._base.config
        faster = [e.config for e in self._estimates.values() if not e.likely_fits and self._is_faster(e)]
        differences = [{axis: c[axis] for axis in c if c[axis] != base.get(axis)} for c in faster]
        return [{**some, name: v} for some in differences for name, v in self._lighter_values() if name not in some]

    def _not_sure_to_be_slower(self) -> list[dict[str, Value]]:
        """Every other value of one axis, except those that merely recompute more or launch more operations."""
        return [
            {axis.name: value}
            for axis in AXES
            if (present := axis.of(self._base.config)) is not None
            for value in self._values(axis)
            if not (axis.name in ("checkpointing", "micro_batch") and axis.is_lighter_or_equal(value, present))
        ]

    def _lighter_values(self) -> list[tuple[str, Value]]:
        return [(axis.name, value) for axis in AXES for value in self._lighter_than(axis, self._base.config)]

    def _lightest_steps(self) -> list[dict[str, Value]]:
        """The smallest micro-batch with every layer recomputed, and the same with layer inputs on the host. Only values
        lighter than the present ones are in a step. Steps leave the training as it is."""
        base = self._base.config
        steps = ({"micro_batch": 1, "checkpointing": checkpointing} for checkpointing in ("full", "offload"))
        return [
            {name: value for name, value in step.items() if AXIS[name].place(value) < AXIS[name].place(base[name])}
            for step in steps
        ]

    def _lighter_than(self, axis: Axis, config: Config) -> list[Value]:
        return [value for value in self._values(axis) if axis.place(value) < axis.place(axis.of(config))]

    def _values(self, axis: Axis) -> Sequence[Value]:
        """The default space's, lightest first."""
        listed: Sequence[Value] = self._space.axes.get(axis.name, ())
        if axis.name == "attention" and listed:
            return ("efficient", *listed)  # which a search takes in place of sdpa where that helps
        if axis.name == "update":
            return axis.values  # searched where full training is compared with nothing else
        if axis.name == "micro_batch":
            batch = self._estimator.job.workload.batch_per_device
            return [n for n in range(1, batch + 1) if batch % n == 0 and (not listed or n in listed)]
        return listed

    def _by_tier(self, changes: Iterable[dict[str, Value]]) -> defaultdict[Tier, list[Config]]:
        candidates = dict.fromkeys(changed(self._base.config, values) for values in changes)
        tiers: defaultdict[Tier, list[Config]] = defaultdict(list)
        for config in dict.fromkeys(map(self._reached, candidates)):
            if config is not None and config != self._base.config:
                tiers[self._effect_of(config), METHODS.index(config.text("method"))].append(config)
        return tiers

    def _tier(self, effect: Effect) -> Tier:
        return effect, METHODS.index(self._base.config.text("method"))

    def _effect_of(self, config: Config) -> Effect:
        return effect_of(self._base.config, config, self._estimator.job)

    def _reached(self, config: Config) -> Config | None:
        """The nearest config that the user can write; None where there is none, or it is not possible."""
        nearest = self._expressible.nearest_expressible(config)
        return nearest if nearest is not None and self._is_possible(nearest) else None

    def _is_possible(self, config: Config) -> bool:
        """Whether `config` can be estimated and the space's rules exclude none of its new values."""
        base, values = self._base.config, config.to_json()
        changed_axes = {axis for axis in config if config[axis] != base.get(axis)}
        ruled_out = (r.excludes(values) and not changed_axes.isdisjoint({*r.only, *r.never}) for r in self._space.rules)
        return not any(ruled_out) and why_not(config, self._estimator.job) is None

    def _fitting(self, configs: Iterable[Config]) -> list[Estimate]:
        """The estimates that are likely to fit. Lighter configs are estimated first: one that is heavier than a config
        that does not fit is skipped."""
        fits = []
        for config in sorted(configs, key=lightness):
            if config in self._estimates or (not self._is_too_heavy(config) and self._is_affordable(config)):
                estimate = self._estimate(config)
                if estimate.likely_fits:
                    fits.append(estimate)
        return fits

    def _is_too_heavy(self, config: Config) -> bool:
        if floor_bytes(config, self._estimator.job) > self._whole_limit - self._expressible.extra_bytes(config):
            return True
        return any(not e.fits and self._order.is_lighter_or_equal(e.config, config) for e in self._estimates.values())

    def _grant_traces(self) -> None:
        """Allow as many more decoders to be traced as a single exact change may need; for an 8B model each takes about
        a second, and a compiled one up to three."""
        self._may_be_traced = len(self._traced()) + 6

    def _traced(self) -> set[Config]:
        return {config.without(*WITHOUT_TRACE) for config in self._estimates}

    def _is_affordable(self, config: Config) -> bool:
        traced = self._traced()
        return config.without(*WITHOUT_TRACE) in traced or len(traced) < self._may_be_traced

    def _estimate(self, config: Config) -> Estimate:
        if config not in self._estimates:
            limit = self._whole_limit - self._expressible.extra_bytes(config)
            self._estimates[config] = self._estimator.estimate(config, memory_limit_bytes=limit)
            self._report(len(self._estimates))
        return self._estimates[config]

    def _change(self, estimate: Estimate, *roles: str) -> Change:
        before, after = self._base.config, estimate.config
        values = {a.name: now for a in AXES if (now := a.of(after)) is not None and a.of(before) != now}
        return Change(values=values, effect=self._effect_of(after), estimate=estimate, roles=roles)

    def _edit_count(self, estimate: Estimate) -> int:
        return self._expressible.edit_count(self._change(estimate))

    def _card(self, estimate: Estimate) -> str | None:
        """The smallest card that the estimator covers and that is likely to hold it; the user's own card where only the
        limit is too low."""
        hardware = self._estimator.job.hardware
        if hardware.kind != "cuda":
            return None
        estimate = replace(
            estimate,
            device_bytes=estimate.device_bytes + self._expressible.extra_bytes(estimate.config),
            memory_limit_bytes=self._whole_limit,
        )
        if not estimate.likely_fits and replace(estimate, memory_limit_bytes=hardware.memory_bytes).likely_fits:
            return hardware.name
        bf16 = estimate.config.text("precision").startswith("bf16")
        enough = (c for c in fitting(estimate.device_bytes) if c.vendor == "nvidia" and (c.bf16 or not bf16))
        return next((c.name for c in enough if replace(estimate, memory_limit_bytes=c.memory_bytes).likely_fits), None)


def changed(config: Config, values: Mapping[str, Value]) -> Config:
    """`config` with other values. Axes that do not apply to the new method are dropped; those that now apply take the
    recipe's values."""
    merged = {**config.to_json(), **values}
    if merged["method"] == "full":
        merged = {name: value for name, value in merged.items() if name not in ADAPTER_AXES}
    return complete(merged)


def _speed_or_memory(estimate: Estimate) -> tuple[float, int]:
    """A sort key by speed. Where no speed is known, the config that needs the most memory is likely the fastest."""
    return speed(estimate), estimate.device_bytes
