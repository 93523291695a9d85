"""What is wanted of a search, and whether the scores of a replay reach it. Only computes: no result is written here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "autofit"
WARM = "autofit-warm"
THOROUGH = "autofit-thorough"
ANY = "any"
"""The method of a problem in which all training methods of a table are searched side by side."""
NEAR = 0.01
"""A search has found the best once it is within this distance of it."""
TRIALS = 8, 15
"""Median and 90th percentile of the trials allowed."""
TIMES_FEWER = 3.0
OUT_OF_MEMORY = 1
AFTER, SHARE = 20, 0.99
HONEST = 0.95
NEVER = "never"
JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One figure on one problem."""

    reached: bool | None
    """None where it cannot be judged."""
    measured: str


def figure(value: float | None) -> str:
    """Three significant digits, all digits of a large number, and a word for what was never reached."""
    return NEVER if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def pair(spread: JSON) -> str:
    """Median and 90th percentile."""
    return f"{figure(spread['median'])} / {figure(spread['p90'])}"


def scores(problem: JSON) -> dict[str, JSON]:
    """The scores of the methods that have run, by name."""
    return {method["name"]: method["score"] for method in problem["methods"] if method["score"] is not None}


def others(problem: JSON) -> dict[str, JSON]:
    """The scores of methods that are neither ours nor variants of it."""
    return {name: score for name, score in scores(problem).items() if not name.startswith(OURS)}


def reached(score: JSON, within: float = NEAR) -> JSON:
    """When a method first came `within` this distance of the best."""
    found: JSON = next(entry for entry in score["reached"] if entry["within"] == within)
    return found


def quickest(problem: JSON, unit: str) -> tuple[str, float] | None:
    """Which of the others needs the fewest `trials` or `seconds` in the median, and how many; None if none comes that
    near."""
    known = {name: reached(score)[unit]["median"] for name, score in others(problem).items()}
    got = {name: value for name, value in known.items() if value is not None}
    return min(got.items(), key=lambda entry: entry[1]) if got else None


def steadiest(wholes: Sequence[JSON]) -> tuple[str, list[float]] | None:
    """Which one of the others needs the fewest seconds for all these whole tables together, and how many for each, in
    the median; None if none comes near the best of each. Of a method that searches all of a table or one training
    method alone, the better counts."""
    found: dict[str, list[float]] = {}
    for problem in wholes:
        known = others(problem)
        best: dict[str, float] = {}
        for method in problem["methods"]:
            seconds = reached(known[method["name"]])["seconds"]["median"] if method["name"] in known else None
            if seconds is not None:
                name = method.get("of", method["name"])
                best[name] = min(seconds, best.get(name, seconds))
        for name, seconds in best.items():
            found.setdefault(name, []).append(seconds)
    on_all = {name: seconds for name, seconds in found.items() if len(seconds) == len(wholes)}
    return min(on_all.items(), key=lambda entry: sum(entry[1])) if on_all else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Everywhere:
    """One of the other methods, as if it were the only one there is for all problems."""

    name: str
    ran: int
    """Problems that it has run."""
    near: int
    """Of these, the problems on which it comes near the best in the median."""
    seconds: float
    """Its trial-seconds until then, over those of these problems together on which ours comes near, too."""
    ours: float
    """Ours on the same problems."""


def everywhere(problems: Sequence[JSON]) -> list[Everywhere]:
    """Each of the others over all problems: those that come near the best on most come first."""
    needed: dict[str, dict[int, float | None]] = {}
    for number, problem in enumerate(problems):
        for name, score in scores(problem).items():
            needed.setdefault(name, {})[number] = reached(score)["seconds"]["median"]
    own = {number: seconds for number, seconds in needed[OURS].items() if seconds is not None}
    found = []
    for name in dict.fromkeys(name for problem in problems for name in others(problem)):
        near = {n: seconds for n, seconds in needed[name].items() if seconds is not None}
        both = near.keys() & own.keys()
        found.append(
            Everywhere(
                name=name,
                ran=len(needed[name]),
                near=len(near),
                seconds=math.fsum(near[n] for n in both),
                ours=math.fsum(own[n] for n in both),
            )
        )
    return sorted(found, key=lambda of: (-of.near, of.seconds))


def times_fewer(problem: JSON) -> float | None:
    """How many times our trial-seconds the best of the others needs; None if either never gets there."""
    best, own = quickest(problem, "seconds"), reached(scores(problem)[OURS])["seconds"]["median"]
    return None if best is None or own is None else best[1] / own


def whole_tables(problems: Sequence[JSON]) -> list[JSON]:
    """The problems that are whole tables: all training methods side by side, or the only one that the table has.

    The others are credited there, too, with what they need if they search the best config's training method alone.
    """
    methods: dict[str, set[str]] = {}
    for problem in problems:
        methods.setdefault(problem["table"], set()).add(problem["method"])
    own = {(problem["table"], problem["memory_limit_bytes"], problem["method"]): problem for problem in problems}
    found = []
    for (table, limit, method), problem in own.items():
        if method == ANY:
            best = problem["best"]["config"]["method"]
            alone = own.get((table, limit, best))
            found.append(problem if alone is None else _credited(problem, alone, best))
        elif methods[table] == {method}:
            found.append(problem)
    return found


def _credited(problem: JSON, alone: JSON, method: str) -> JSON:
    known = others(alone)
    more = [
        {**entry, "name": f"{entry['name']} on {method} alone", "of": entry["name"]}
        for entry in alone["methods"]
        if entry["name"] in known
    ]
    return {**problem, "methods": [*problem["methods"], *more]}


def with_whole_tables(problems: Sequence[JSON]) -> list[JSON]:
    """All problems, those that are whole tables as `whole_tables` has them."""
    wholes = {(problem["name"], problem["memory_limit_bytes"]): problem for problem in whole_tables(problems)}
    return [wholes.get((problem["name"], problem["memory_limit_bytes"]), problem) for problem in problems]


def of_trials(problem: JSON) -> Verdict:
    spread = reached(scores(problem)[OURS])["trials"]
    found = zip((spread["median"], spread["p90"]), TRIALS, strict=True)
    enough = [value is not None and value <= most for value, most in found]
    return Verdict(reached=all(enough), measured=pair(spread))


def of_seconds(problem: JSON) -> Verdict:
    if not others(problem):
        return Verdict(reached=None, measured="no other method has run")
    if reached(scores(problem)[OURS])["seconds"]["median"] is None:
        return Verdict(reached=False, measured=NEVER)
    best, times = quickest(problem, "seconds"), times_fewer(problem)
    if best is None or times is None:
        return Verdict(reached=True, measured="no other method gets there")
    return Verdict(reached=times >= TIMES_FEWER, measured=f"`{best[0]}` needs {figure(times)} times as many")


def of_out_of_memory(problem: JSON) -> Verdict:
    """Out-of-memory trials until the search was near the best, or of whole searches that it ended itself, if more."""
    score = scores(problem)[OURS]
    spreads = [score["out_of_memory"], *([score["ended"]["out_of_memory"]] if score["ended"] else [])]
    most = max(spread["median"] for spread in spreads)
    return Verdict(reached=most <= OUT_OF_MEMORY, measured=figure(most))


def of_frontier(problem: JSON) -> Verdict:
    """Judges the search that goes on for the frontier, where it has run: the other stops before that many trials."""
    known = scores(problem)
    score = known.get(THOROUGH, known[OURS])
    share = next(entry["median"] for entry in score["hypervolume"] if entry["trials"] == AFTER)
    return Verdict(reached=share >= SHARE, measured=f"{share:.1%}")


def of_stated_regret(problem: JSON) -> Verdict:
    ended = scores(problem)[OURS]["ended"]
    if not ended or ended.get("within_stated") is None:
        return Verdict(reached=None, measured="no search stated a bound")
    held, seeds = ended["within_stated"], ended["seeds"]
    return Verdict(reached=held >= HONEST * seeds, measured=f"{held} of {seeds} searches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A figure that is wanted of our search."""

    text: str
    judge: Callable[[JSON], Verdict]
    """Judges a problem that our method has run."""
    cases: Callable[[Sequence[JSON]], Sequence[JSON]] = list
    """Selects or makes the cases to judge from the problems."""


WANTED = (
    Wanted(
        text=f"within {NEAR:.0%} of the best after at most {TRIALS[0]} trials (median) and {TRIALS[1]} (p90)",
        judge=of_trials,
    ),
    Wanted(
        text=f"at most 1/{TIMES_FEWER:.0f} of the trial-seconds of the best other method, to come within {NEAR:.0%} of "
        "the best of a whole table",
        judge=of_seconds,
        cases=whole_tables,
    ),
    Wanted(text=f"at most {OUT_OF_MEMORY} out-of-memory trial in a whole search (median)", judge=of_out_of_memory),
    Wanted(
        text=f"at least {SHARE:.0%} of the frontier's hypervolume after {AFTER} trials (median), by the search for "
        f"the whole frontier (`{THOROUGH}`)",
        judge=of_frontier,
    ),
    Wanted(
        text=f"the regret bound that it states when it stops holds in at least {HONEST:.0%} of the searches",
        judge=of_stated_regret,
    ),
)
