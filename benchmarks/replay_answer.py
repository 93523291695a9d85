"""What the page of a replay's results says first: the answer, what it rests on, and every problem against the best of
the other methods."""

from __future__ import annotations

import math
from collections.abc import Sequence

from replay_verdicts import (
    JSON,
    NEAR,
    NEVER,
    OURS,
    TIMES_FEWER,
    WANTED,
    Verdict,
    Wanted,
    everywhere,
    figure,
    others,
    pair,
    quickest,
    reached,
    scores,
    steadiest,
    times_fewer,
    whole_tables,
    with_whole_tables,
)
from replay_words import count, listed, name_of, percent, percents, span, table

LEFT_OUT = (
    "**What trial-seconds leave out.** Ours are of trials alone. Before the first one, `autofit search` estimates "
    "every config of the space, which costs no device but time: some 15 s on two cores for the space `cpu` "
    "([README.md](README.md#measured-so-far)), as long as two of these trials take. It may also stop a hopeless trial "
    "after two steps; a replay charges every trial in full."
)
"""What a real search does that its replay does not count, for and against it."""


def answer(document: JSON, problems: Sequence[JSON]) -> list[str]:
    """The answer in a few sentences, what it rests on, and the targets."""
    held = sum(bool(verdicts := judged(w, problems)) and all(v.reached for _, v in verdicts) for w in WANTED)
    return [
        _trials(document, problems) + _recommended(problems),
        *_seconds(problems),
        _frontier(problems),
        f"**{held} of {len(WANTED)} targets are met everywhere.**",
        _wanted(problems),
        *_two_readings(problems),
        *_everywhere(problems),
        _seeds(),
        LEFT_OUT,
        *_fitted(document),
        _against_the_best(problems),
    ]


def _trials(document: JSON, problems: Sequence[JSON]) -> str:
    near = [reached(scores(problem)[OURS])["trials"] for problem in problems]
    medians, tails = ([spread[which] for spread in near] for which in ("median", "p90"))
    tables = len({problem["table"] for problem in problems})
    return (
        f"Over {count(len(problems), 'problem')} of {count(tables, 'recorded table')}, `{OURS}` had run a config "
        f"within {NEAR:.0%} of the best after {span(medians, 'trial')} (median of {count(document['seeds'], 'seed')}; "
        f"90th percentile: {span(tails, 'trial')})."
    )


def _recommended(problems: Sequence[JSON]) -> str:
    """How far from the best is what the searches recommend when they end, which is what a user gets."""
    ends = [(name_of(problem), scores(problem)[OURS]["ended"]) for problem in problems]
    known = {name: ended["recommended"] for name, ended in ends if ended and ended.get("recommended")}
    if not known:
        return ""
    worst = max(known.values(), key=lambda spread: math.inf if spread["median"] is None else spread["median"])["median"]
    beyond = [f"{name} {percents(s)}" for name, s in known.items() if s["p90"] is None or s["p90"] > NEAR]
    said = (
        f" What it recommends in the end is at most {percent(worst)} slower than the best in the median of the seeds; "
        f"at the 90th percentile it is within {NEAR:.0%} of the best"
    )
    if not beyond:
        return f"{said} everywhere."
    return f"{said} on {len(known) - len(beyond)} of {len(known)} problems, but not on {listed(beyond)}."


def _seconds(problems: Sequence[JSON]) -> list[str]:
    """Trial-seconds against the best of the other methods, on whole tables and on single problems."""
    wholes = whole_tables(problems)
    names = {name_of(problem) for problem in wholes}
    parts = [
        f"{span(compared, 'time')} as many trial-seconds on {where} (fewer than {TIMES_FEWER:.0f} times on "
        f"{sum(times < TIMES_FEWER for times in compared)} of {len(compared)})"
        for where, some in (
            ("whole tables", wholes),
            ("problems of one training method", [p for p in problems if name_of(p) not in names]),
        )
        if (compared := [times for problem in some if (times := times_fewer(problem)) is not None])
    ]
    if not parts:
        return []
    rivals = {name for problem in problems for name in others(problem)}
    return [
        f"The best of {count(len(rivals), 'other method')}, chosen separately for each problem and with hindsight, "
        f"needed {listed(parts)}. **A whole table** (`/any`) has all its training methods side by side, as `autofit "
        "search` gets them by default (`--method any`); its best is the fastest config of the most faithful method "
        "that fits. There the other methods may search all of it or, as if that method were known, it alone."
    ]


def _two_readings(problems: Sequence[JSON]) -> list[str]:
    """Trial-seconds on whole tables against the best of the others by either reading: the best of each table, or the
    one method that is best over all of them."""
    wholes = [problem for problem in whole_tables(problems) if others(problem)]
    steady = steadiest(wholes)
    if steady is None:
        return []
    name, every = steady
    rows = []
    for problem, seconds in zip(wholes, every, strict=True):
        own, best, times = reached(scores(problem)[OURS])["seconds"], quickest(problem, "seconds"), times_fewer(problem)
        fewer = None if own["median"] is None else seconds / own["median"]
        rows.append(
            (name_of(problem), figure(own["median"]), _named(best), figure(times), figure(seconds), figure(fewer))
        )
    told = (
        f'**Two readings of "the best of the others"** on whole tables, in trial-seconds to come within {NEAR:.0%} of '
        "the best (medians). With hindsight it is another method on every table; what could be chosen beforehand is "
        f"one method for all tables, and of those that come that near on each, `{name}` needs the fewest in all (as if "
        "the training method were known, where that is better). The target is judged by the first."
    )
    title = ("whole table", "ours", "best with hindsight", "times ours", f"`{name}` everywhere", "times ours")
    return [f"{told}\n\n{table(title, rows)}"]


def _everywhere(problems: Sequence[JSON]) -> list[str]:
    """Each other method as the only choice for all problems, because no user knows which would be lucky on theirs."""
    found = [of for of in everywhere(problems) if of.ours]
    if not found:
        return []
    own = sum(reached(scores(problem)[OURS])["seconds"]["median"] is not None for problem in problems)
    rows = [
        (f"`{of.name}`", f"{of.near} of {of.ran}", figure(of.seconds), figure(of.ours), figure(of.seconds / of.ours))
        for of in found
    ]
    told = (
        f"**One method for every problem.** `{OURS}` comes within {NEAR:.0%} of the best on {own} of "
        f"{count(len(problems), 'problem')} (medians); of the others, each by itself:"
    )
    title = ("method", "problems on which it gets there", "its trial-seconds there, in all", "ours there", "times ours")
    return [f"{told}\n\n{table(title, rows)}"]


def _frontier(problems: Sequence[JSON]) -> str:
    last = [scores(problem)[OURS]["hypervolume"][-1]["median"] for problem in problems]
    return (
        f"When `{OURS}` stops by itself, it has found {min(last):.0%} to {max(last):.0%} of the whole frontier's "
        "hypervolume (medians): the frontier that a search prints is partial unless it is told to go on "
        "(`--thorough`)."
    )


def _seeds() -> str:
    return (
        "**What seeds vary**: every speed is drawn anew within its recorded spread, the same for all methods, and "
        "whatever is random in a method. Nothing in our search is, except for the order in which it is shown the "
        "configs, so its medians and 90th percentiles are often equal: more seeds would not make up for more tables."
    )


def _fitted(document: JSON) -> list[str]:
    """What the estimator, on which our search relies, was fitted to."""
    found = document.get("fitted")
    if found is None:
        return []
    tables = {name: found["tables"][name] for name in dict.fromkeys(p["table"] for p in document["problems"])}
    inside = [name for name, said in tables.items() if said["in_fit"]]
    beside = {n: s["configs_in_fit"] for n, s in tables.items() if s["hardware_in_fit"] and not s["in_fit"]}
    apart = [name for name, said in tables.items() if not said["hardware_in_fit"]]
    fits = "; ".join(f"{what} to {listed(names)}" for what, names in found["what"].items())
    text = f"**What was fitted to what**, before these searches: {fits}. "
    text += f"Of the tables above, {listed(inside)} is in a fit. " if inside else "No table above is in a fit. "
    if beside:
        shared = listed(f"{name} (which shares {count(shared, 'config')} with them)" for name, shared in beside.items())
        text += f"But those files are of the same machine as {shared}. "
    if apart:
        text += f"**Held out of these fits, machine and all: {listed(apart)}.** "
    return [text + found["by_hand"], _watched(tables, found.get("tuned", {}))]


def _watched(tables: JSON, tuned: JSON) -> str:
    """What was not held out: numbers of the search that were chosen by replays, and what a person chose."""
    unseen = [name for name, said in tables.items() if said.get("unseen")]
    text = "**Held out concerns the estimator alone.**"
    if tuned:
        clean = [name for name in tables if not any(name in names for names in tuned.values())]
        by = "; ".join(f"{what}: {listed(names)}" for what, names in tuned.items())
        rest = f"Of the tables above, {listed(clean)} had no part in these" if clean else "No table above is left out"
        text += (
            f" Some numbers of the search were chosen by replaying tables with several values of them: {by}. {rest}."
        )
    text += (
        " The search's other rules and thresholds, such as the order in time and the order of the training methods, "
        "were chosen while replays of recorded tables were watched, every machine's included."
    )
    if not unseen:
        return (
            f"{text} How it does on a table that nobody had seen is shown by none of them; "
            "[README.md](README.md#the-tables) keeps what the first search showed that was replayed over each."
        )
    return (
        f"{text} **Not so {listed(unseen)}: this search is the first that was replayed over it, with rules that were "
        "chosen before anybody had seen it.**"
    )


def _wanted(problems: Sequence[JSON]) -> str:
    rows = []
    for wanted in WANTED:
        verdicts = judged(wanted, problems)
        rows.append((wanted.text, _verdict([v for _, v in verdicts]), _failed(verdicts)))
    return table((f"target for `{OURS}`", "met", "where not"), rows)


def judged(wanted: Wanted, problems: Sequence[JSON]) -> list[tuple[JSON, Verdict]]:
    """The cases that are judged, each with its verdict."""
    return [(case, wanted.judge(case)) for case in wanted.cases(problems)]


def _verdict(verdicts: Sequence[Verdict]) -> str:
    good, unknown = (sum(verdict.reached is which for verdict in verdicts) for which in (True, None))
    if unknown == len(verdicts):
        return "not judged"
    if good == len(verdicts):
        return "**yes**, everywhere"
    return f"on {good} of {len(verdicts)}" if good else "**no**"


def _failed(verdicts: Sequence[tuple[JSON, Verdict]]) -> str:
    if len({v.measured for _, v in verdicts}) == 1 and not any(v.reached for _, v in verdicts):
        return f"everywhere: {verdicts[0][1].measured}"
    return "; ".join(f"{name_of(problem)}: {v.measured}" for problem, v in verdicts if not v.reached)


def _against_the_best(problems: Sequence[JSON]) -> str:
    """Ours beside the best of the others on each problem, which nobody could have picked beforehand."""
    rows = []
    for problem in with_whole_tables(problems):
        own, times = reached(scores(problem)[OURS]), times_fewer(problem)
        trials, seconds = quickest(problem, "trials"), quickest(problem, "seconds")
        rows.append(
            (
                name_of(problem),
                pair(own["trials"]),
                _named(trials),
                pair(own["seconds"]),
                _named(seconds),
                "" if times is None else figure(times),
            )
        )
    title = (
        "problem",
        "our trials",
        "fewest trials of the others",
        "our seconds",
        "fewest seconds of the others",
        "seconds, others / ours",
    )
    told = (
        f"Trials and trial-seconds to come within {NEAR:.0%} of the best. Ours: median / 90th percentile; the others: "
        "the median of whichever method needs the fewest on that problem."
    )
    return f"{told}\n\n{table(title, rows)}"


def _named(best: tuple[str, float] | None) -> str:
    return NEVER if best is None else f"{figure(best[1])} (`{best[0]}`)"
