"""The frontier against its definition, and the recommendation that is read off it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.operations.made_trials import HARDWARE, STACK, fits

from autofit.core.frontier import (
    PRACTICAL,
    Frontier,
    Point,
    Recommendation,
    alternatives,
    choose,
    dominates,
    pareto,
    ties,
    timed_in_full,
)
from autofit.core.lattice import Config
from autofit.core.workload import METHODS, Workload
from autofit.techniques import changes, complete

WORKLOAD = Workload(model="m", model_digest="0" * 16)


def spread(p: Point, relative: float | None) -> Point:
    """The point with another spread of its step time."""
    m = p.measurement
    return replace(p, measurement=replace(m, step_seconds=replace(m.step_seconds, relative_spread=relative)))


def point(number: int, memory: int, speed: float, method: str = "full") -> Point:
    """The measured config that has `number` as its micro-batch and trial id."""
    measurement = replace(fits(1, speed).measurement, device_bytes=memory)
    config: Config = complete({"method": method, "micro_batch": number})
    return spread(Point(config=config, measurement=measurement, trial_id=number), 0.0)


def memory(point: Point) -> int:
    return point.measurement.device_bytes


def speed(point: Point) -> float:
    return point.measurement.tokens_per_second


# Few distinct numbers, so that ties are frequent.
SMALL = st.integers(1, 6)
POINTS = st.lists(st.tuples(SMALL, SMALL, st.sampled_from(METHODS)), max_size=25).map(
    lambda drawn: [point(number + 1, m, float(s), method) for number, (m, s, method) in enumerate(drawn)]
)


def quadratic(points: list[Point]) -> list[Point]:
    """The frontier by comparing every pair; of points with the same memory and speed, the first."""
    kept = []
    for index, candidate in enumerate(points):
        beaten = any(
            memory(other) <= memory(candidate)
            and speed(other) >= speed(candidate)
            and (memory(other), speed(other)) != (memory(candidate), speed(candidate))
            for other in points
        )
        repeated = any((memory(p), speed(p)) == (memory(candidate), speed(candidate)) for p in points[:index])
        if not beaten and not repeated:
            kept.append(candidate)
    return sorted(kept, key=memory)


@given(POINTS)
def test_the_frontier_is_what_comparing_every_pair_leaves(points: list[Point]) -> None:
    assert list(pareto(points)) == quadratic(points)
    assert not any(dominates(p, f) for p in points for f in pareto(points))


@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0.001, 1e6)), max_size=40))
def test_the_frontier_of_points_that_hardly_tie(drawn: list[tuple[int, float]]) -> None:
    points = [point(number + 1, m, s) for number, (m, s) in enumerate(drawn)]
    assert list(pareto(points)) == quadratic(points)


@given(st.lists(st.tuples(SMALL, SMALL), min_size=3, max_size=3))
def test_domination_is_a_strict_order(drawn: list[tuple[int, int]]) -> None:
    a, b, c = (point(1, m, float(s)) for m, s in drawn)
    assert not dominates(a, a)
    assert not (dominates(a, b) and dominates(b, a))
    assert dominates(a, c) or not (dominates(a, b) and dominates(b, c))


@given(POINTS)
def test_every_method_has_a_frontier_of_its_own(points: list[Point]) -> None:
    frontier = Frontier.of(points, hardware=HARDWARE, workload=WORKLOAD, stack=STACK, trials=30, out_of_memory=5)
    assert [memory(p) for p in frontier.points] == sorted(memory(p) for p in frontier.points)
    for method in METHODS:
        same_method = [p for p in points if p.method == method]
        assert [p for p in frontier.points if p.method == method] == quadratic(same_method)
    document = json.loads(json.dumps(frontier.to_json(), allow_nan=False))
    assert list(document) == ["hardware", "workload", "stack", "points", "trials", "out_of_memory", "contradictory"]
    assert [p["trial_id"] for p in document["points"]] == [p.trial_id for p in frontier.points]
    assert all(list(p) == ["config", "measurement", "trial_id"] for p in document["points"])
    several = replace(frontier, workload=replace(WORKLOAD, devices=2)).to_json()["points"]
    assert all(2 * p["tokens_per_second_per_device"] == p["measurement"]["tokens_per_second"] for p in several)


@given(POINTS, SMALL, st.sets(st.sampled_from(METHODS), min_size=1))
def test_the_choice_is_the_fastest_that_fits_of_the_most_faithful_practical_method(
    points: list[Point], limit: int, among: set[str]
) -> None:
    methods = [method for method in METHODS if method in among]
    chosen = choose(points, memory_limit_bytes=limit, methods=methods)
    fitting = [p for p in points if memory(p) <= limit]
    if chosen is None:
        assert among.isdisjoint(p.method for p in fitting)
        return
    best = {m: max(speed(p) for p in fitting if p.method == m) for m in methods if any(p.method == m for p in fitting)}
    fitting_methods = list(best)
    for passed_over, following in itertools.pairwise(fitting_methods[: fitting_methods.index(chosen.method) + 1]):
        assert best[passed_over] < PRACTICAL * best[following]
    for following in fitting_methods[fitting_methods.index(chosen.method) + 1 :][:1]:
        assert best[chosen.method] >= PRACTICAL * best[following]
    rivals = [p for p in fitting if p.method == chosen.method]
    assert chosen in rivals
    assert speed(chosen) == max(speed(p) for p in rivals)
    assert memory(chosen) == min(memory(p) for p in rivals if speed(p) == speed(chosen))


@pytest.mark.parametrize(
    ("slower", "spreads", "tied"),
    [
        (99.0, (0.0, 0.0), False),
        (99.0, (0.021, 0.0), True),  # the half-width of either
        (99.0, (0.0, 0.021), True),
        (97.0, (0.04, 0.04), False),
        (97.0, (0.0, None), True),  # nothing is known of a single repeat
        (96.0, (0.9, None), True),
        (94.0, (0.9, None), False),  # a large difference is one, however noisy the machine
    ],
)
def test_differences_within_the_spread_are_ties(
    slower: float, spreads: tuple[float | None, float | None], tied: bool
) -> None:
    fast, light = spread(point(1, 9, 100.0), spreads[0]), spread(point(2, 4, slower), spreads[1])
    assert ties(fast, light) == ties(light, fast) == tied
    assert choose([fast, light], memory_limit_bytes=10, methods=METHODS) == (light if tied else fast)


def test_of_ties_the_one_that_changes_training_least_is_chosen_then_the_lightest() -> None:
    points = [spread(point(number, memory, speed), 0.04) for number, memory, speed in
              ((1, 3, 99.0), (2, 5, 100.0), (3, 6, 99.5), (4, 2, 90.0))]  # fmt: skip
    changed = {1: 2, 2: 2, 3: 1, 4: 0}

    def changes(config: Config) -> int:
        return changed[config.number("micro_batch")]

    chosen = choose(points, memory_limit_bytes=10, methods=METHODS, changes=changes)
    assert chosen is not None and chosen.trial_id == 3
    without = [p for p in points if p.trial_id != 3]
    chosen = choose(without, memory_limit_bytes=10, methods=METHODS, changes=changes)
    assert chosen is not None and chosen.trial_id == 1


def test_a_noisy_point_is_not_chosen_over_one_that_beats_it() -> None:
    fast, better, noisy = (
        spread(point(1, 9, 100.0), 0.0),
        spread(point(2, 4, 98.0), 0.0),
        spread(point(3, 5, 96.0), 0.1),
    )
    assert ties(fast, noisy) and not ties(fast, better)
    assert choose([fast, better, noisy], memory_limit_bytes=10, methods=METHODS) == fast


@given(POINTS, st.lists(st.sampled_from([0.0, 0.3, 0.8, None]), min_size=25, max_size=25))
def test_the_choice_is_the_same_from_what_is_undominated_of_each_kind(
    points: list[Point], spreads: list[float | None]
) -> None:
    """A store gives the frontier of each family, a search every point: both must recommend the same."""
    every = [spread(p, s) for p, s in zip(points, spreads, strict=False)]

    def changes(config: Config) -> int:
        return config.number("micro_batch") % 3

    kinds = {(p.method, changes(p.config)) for p in every}
    kept = [p for kind in kinds for p in pareto(q for q in every if (q.method, changes(q.config)) == kind)]
    for limit in (2, 6):
        one = choose(every, memory_limit_bytes=limit, methods=METHODS, changes=changes)
        other = choose(kept, memory_limit_bytes=limit, methods=METHODS, changes=changes)
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (memory(one), speed(one), one.method) == (memory(other), speed(other), other.method)


def test_what_was_stopped_early_is_chosen_only_where_there_is_nothing_else() -> None:
    early = point(1, 2, 300.0)
    early = replace(early, measurement=replace(early.measurement, stopped_early=True))
    full = point(2, 4, 100.0)
    assert choose([early, full], memory_limit_bytes=10, methods=METHODS) == full
    assert choose([early, full], memory_limit_bytes=3, methods=METHODS) == early
    assert timed_in_full([early, full]) == [full]
    assert timed_in_full([early, point(3, 4, 100.0, "lora")])[0] == early
    frontier = Frontier.of([early, full], hardware=HARDWARE, workload=WORKLOAD, stack=STACK, trials=2, out_of_memory=0)
    assert (frontier.points, frontier.considered) == ((full,), (early, full))


def test_a_recommendation_says_whether_a_second_run_confirmed_it() -> None:
    for runs, verified in ((1, False), (2, True)):
        once = replace(point(1, 4, 50.0), runs=runs)
        document = Recommendation(
            point=once,
            memory_limit_bytes=10,
            headroom_bytes=6,
            changes_training=(),
            alternatives=(),
            hardware=HARDWARE,
            workload=WORKLOAD,
            stack=STACK,
        ).to_json()
        assert document["verified"] is verified


def test_a_method_that_was_not_asked_for_is_not_chosen() -> None:
    points = [point(1, 5, 10.0, "lora"), point(2, 4, 49.0, "qlora")]
    assert choose(points, memory_limit_bytes=9, methods=["full"]) is None
    assert choose(points, memory_limit_bytes=9, methods=["full", "lora", "qlora"]) == points[0]
    assert choose(points, memory_limit_bytes=4, methods=["full", "lora", "qlora"]) == points[1]


def test_a_config_exactly_at_the_limit_fits() -> None:
    assert choose([point(1, 5, 1.0)], memory_limit_bytes=5, methods=METHODS) is not None
    assert choose([point(1, 6, 1.0)], memory_limit_bytes=5, methods=METHODS) is None


def test_alternatives_are_the_next_faster_the_next_lighter_and_the_best_of_other_methods() -> None:
    chosen = point(4, 10, 100.0)
    points = [
        point(1, 3, 50.0),
        point(2, 8, 90.0),
        point(3, 9, 80.0),  # lighter, and beaten by the one before
        chosen,
        point(5, 11, 95.0),  # does not fit, and is slower
        point(6, 14, 130.0),
        point(7, 20, 150.0),
        point(8, 6, 120.0, "lora"),
        point(9, 30, 400.0, "lora"),
        point(10, 30, 500.0, "qlora"),
    ]
    listed = alternatives(chosen, points, memory_limit_bytes=10)
    assert [(a.role, a.point.trial_id, a.over_limit_bytes, a.speedup) for a in listed] == [
        ("faster, does not fit", 6, 4, 1.3),
        ("lighter", 2, -2, 0.9),
        ("other method", 8, -4, 1.2),
    ]


@given(POINTS, SMALL)
def test_alternatives_are_what_their_roles_say(points: list[Point], limit: int) -> None:
    chosen = choose(points, memory_limit_bytes=limit, methods=METHODS)
    if chosen is None:
        return
    by_role = {(a.role, a.point.method): a for a in alternatives(chosen, points, memory_limit_bytes=limit)}
    same_method = [p for p in points if p.method == chosen.method]
    faster = [p for p in same_method if memory(p) > limit and speed(p) > speed(chosen)]
    lighter = [p for p in same_method if memory(p) < memory(chosen)]
    assert (("faster, does not fit", chosen.method) in by_role) == bool(faster)
    assert (("lighter", chosen.method) in by_role) == bool(lighter)
    if faster:
        alternative = by_role["faster, does not fit", chosen.method]
        assert memory(alternative.point) == min(memory(p) for p in faster)
        assert alternative.over_limit_bytes == memory(alternative.point) - limit > 0
    if lighter:
        assert speed(by_role["lighter", chosen.method].point) == max(speed(p) for p in lighter)
    for method in METHODS:
        fitting = [p for p in points if p.method == method and memory(p) <= limit]
        roles = ("other method", "fits, but too slow to be practical")
        alternative = next((by_role[role, method] for role in roles if (role, method) in by_role), None)
        assert (alternative is not None) == (bool(fitting) and method != chosen.method)
        if alternative is not None:
            assert speed(alternative.point) == max(speed(p) for p in fitting)
    assert all(a.speedup == speed(a.point) / speed(chosen) for a in by_role.values())


def test_a_recommendation_is_one_json_document() -> None:
    points = [point(1, 4, 50.0), point(2, 9, 80.0), point(4, 12, 90.0), point(1, 2, 70.0, "qlora")]
    chosen = choose(points, memory_limit_bytes=10, methods=METHODS)
    assert chosen is not None
    recommendation = Recommendation(
        point=chosen,
        memory_limit_bytes=10,
        headroom_bytes=10 - memory(chosen),
        changes_training=changes(chosen.config),
        alternatives=alternatives(chosen, points, memory_limit_bytes=10),
        hardware=HARDWARE,
        workload=WORKLOAD,
        stack=STACK,
    )
    document = json.loads(json.dumps(recommendation.to_json(), allow_nan=False))
    assert document["config"] == chosen.config.to_json()
    assert document["provenance"] == "measured"
    assert document["headroom_bytes"] == 1
    assert [a["role"] for a in document["alternatives"]] == ["faster, does not fit", "lighter", "other method"]
