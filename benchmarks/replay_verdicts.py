"""What is wanted of a search, and whether the scores of a replay reach it. Computed only: no figure is written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OURS = "autofit"
WARM = "autofit-warm"
NEAR = 0.01
"""Within which distance of the best a search has found it."""
TRIALS = 8, 15
"""Median and 90th percentile."""
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
    """Three digits, all of a large number, and a word for what was never reached."""
    return NEVER if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def pair(spread: JSON) -> str:
    """Median and 90th percentile."""
    return f"{figure(spread['median'])} / {figure(spread['p90'])}"


def scores(problem: JSON) -> dict[str, JSON]:
    """Of the methods that have run."""
    return {method["name"]: method["score"] for method in problem["methods"] if method["score"] is not None}


def others(problem: JSON) -> dict[str, JSON]:
    """Of those that are not ours, nor variants of it."""
    return {name: score for name, score in scores(problem).items() if not name.startswith(OURS)}


def reached(score: JSON, within: float = NEAR) -> JSON:
    """When a method was so near."""
    found: JSON = next(entry for entry in score["reached"] if entry["within"] == within)
    return found


def quickest(problem: JSON, unit: str) -> tuple[str, float] | None:
    """Which of the others needs the fewest `trials` or `seconds` in the median, and how many; None if none comes so
    near."""
    known = {name: reached(score)[unit]["median"] for name, score in others(problem).items()}
    got = {name: value for name, value in known.items() if value is not None}
    return min(got.items(), key=lambda entry: entry[1]) if got else None


def times_fewer(problem: JSON) -> float | None:
    """How many times our trial-seconds the best of the others needs; None where one of the two never gets there."""
    best, own = quickest(problem, "seconds"), reached(scores(problem)[OURS])["seconds"]["median"]
    return None if best is None or own is None else best[1] / own


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
        return Verdict(reached=True, measured="none of the others gets there")
    return Verdict(reached=times >= TIMES_FEWER, measured=f"{figure(times)} times (`{best[0]}`)")


def of_out_of_memory(problem: JSON) -> Verdict:
    """Until it was near, and of whole searches where our method has ended them itself: whichever is more."""
    score = scores(problem)[OURS]
    spreads = [score["out_of_memory"], *([score["ended"]["out_of_memory"]] if score["ended"] else [])]
    most = max(spread["median"] for spread in spreads)
    return Verdict(reached=most <= OUT_OF_MEMORY, measured=figure(most))


def of_frontier(problem: JSON) -> Verdict:
    score = scores(problem)[OURS]
    share = next(entry["median"] for entry in score["hypervolume"] if entry["trials"] == AFTER)
    return Verdict(reached=share >= SHARE, measured=f"{share:.1%}")


def of_stated_regret(problem: JSON) -> Verdict:
    ended = scores(problem)[OURS]["ended"]
    if not ended or ended.get("within_stated") is None:
        return Verdict(reached=None, measured="no search stated one")
    held, seeds = ended["within_stated"], ended["seeds"]
    return Verdict(reached=held >= HONEST * seeds, measured=f"{held} of {seeds} searches")


WANTED: Mapping[str, Callable[[JSON], Verdict]] = {
    f"within {NEAR:.0%} of the best after at most {TRIALS[0]} trials (median) and {TRIALS[1]} (p90)": of_trials,
    f"at least {TIMES_FEWER:.0f} times fewer trial-seconds to {NEAR:.0%} than the best of the others": of_seconds,
    f"at most {OUT_OF_MEMORY} out-of-memory trial in a whole search (median)": of_out_of_memory,
    f"at least {SHARE:.0%} of the frontier's hypervolume after {AFTER} trials (median)": of_frontier,
    f"the regret that it states when it stops holds in at least {HONEST:.0%} of the searches": of_stated_regret,
}
"""What the figure is, in words, and how it is judged on a problem that our method has run."""
