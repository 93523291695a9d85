"""Search methods replayed over recorded tables: the tables of RESULTS.md, and their figures as JSON.

    python benchmarks/replay.py --json FILE --page FILE [--methods a,b] [--draw]
    python benchmarks/replay.py --picture docs/search.svg

Every problem is searched under its table's own limit and, where fewer than a quarter of its configs run out of memory
there, under the highest limit, halfway between two neighbouring sizes, at which a quarter does.

The JSON keeps the figures of methods that this run leaves out, each with its date and revision. `--draw` writes the
page from it and runs nothing. Below its mark the page is the program's. `--picture` draws one search instead. Searches
are kept in recorded/searches: an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from autofit.bench import ours
from autofit.bench.oracle import searched
from autofit.bench.recorded import Recorded
from autofit.bench.replay import SEEDS, replay
from autofit.bench.tables import RECORDED, predictions_of, problems_of, read
from autofit.core.outcome import Fits, Measurement, OutOfMemory
from autofit.core.units import GIB, format_bytes
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.trial.machine.cores import cores

ZEN5 = [f"cpu-zen5-2c-{model}" for model in ("smollm2-135m", "gemma-3-270m", "smollm2-360m", "qwen2.5-0.5b")]
TABLES = [RECORDED / f"{name}.jsonl" for name in ("cpu-2c-smollm2-135m", "cpu-2c-pythia-160m", *ZEN5)]
OURS, THOROUGH = "autofit", "autofit-thorough"
SHARE = 0.25
"""Of the configs run out of memory under the lowered limits."""
TRIALS, RAN_OUT, FRONTIER = 8, 1, 0.99
"""The targets, in the median: trials until that near the best, those of a search that run out of memory, and the share
of the frontier after 20 trials of the search for all of it."""
MARK = "<!-- What follows is written by benchmarks/replay.py. -->\n"
JSON = Mapping[str, Any]


def main() -> None:
    """Run what is asked for and lacking, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=())
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.picture:
        return picture(asked.picture)
    document = json.loads(asked.json.read_text()) if asked.json.exists() else {"problems": []}
    if not asked.draw:
        document = merged(document, replayed(asked.methods))
        asked.json.write_text(json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")
    prose = asked.page.read_text().partition(MARK)[0]
    asked.page.write_text(f"{prose}{MARK}\n{tables_of(document)}")


def replayed(methods: Sequence[str]) -> dict[str, Any]:
    """The figures of these methods, or of all but Optuna's Gaussian process if none is named."""
    made = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), **code_here()}
    own_limits = {table.name: table.memory_limit_bytes for table in read(TABLES)}
    problems, ran = [], dict[str, Any]()
    for limit_of in (None, limit_for):
        found = replay(
            TABLES,
            methods=methods,
            seeds=SEEDS,
            limit_of=limit_of,
            keep=RECORDED / "searches",
            jobs=cores(),
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
        for problem in found.to_json()["problems"]:
            scores = {method["name"]: method["score"] for method in problem["methods"] if method["score"]}
            ran |= dict.fromkeys(scores, made)
            problems.append(figures_of(problem, scores, own_limits[problem["table"]]))
    digests = {file.stem: sha256(file.read_bytes()).hexdigest() for file in TABLES}
    return {"seeds": SEEDS, "tables": digests, "methods": ran, "problems": problems}


def figures_of(problem: JSON, scores: Mapping[str, Any], own_limit: int) -> dict[str, Any]:
    """What is kept of a problem that `autofit bench replay --json` has, and of its scores."""
    return {
        "name": problem["name"],
        "limit": problem["memory_limit_bytes"] if problem["memory_limit_bytes"] < own_limit else None,
        "configs": problem["configs"],
        "fitting": problem["fitting"],
        "best": problem["best"]["config"]["method"],
        "methods": {name: _figures(score) for name, score in scores.items()},
    }


def _figures(score: JSON) -> dict[str, Any]:
    """Pairs are median and 90th percentile, None where so many seeds never got there; but for the frontier, of which it
    is the median share of the hypervolume after 20 trials, and after 40."""
    figures: dict[str, Any] = {
        "trials": _pair(score["trials"]),
        "seconds": _pair(score["seconds"]),
        "out_of_memory": _pair(score["out_of_memory"]),
        "frontier": [_rounded(share["median"]) for share in score["hypervolume"][-2:]],
    }
    ended = score["ended"]
    if ended and ended["stated"]:
        figures["ended"] = {
            "seeds": ended["seeds"],
            "bound_held": ended["within_stated"],
            **{name: _pair(ended[name]) for name in ("trials", "seconds", "out_of_memory", "recommended", "stated")},
        }
    return figures


def _pair(spread: JSON) -> list[float | None]:
    return [_rounded(spread["median"]), _rounded(spread["p90"])]


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else float(f"{figure:.6g}")


def merged(before: JSON, now: JSON) -> dict[str, Any]:
    """`now`, with the methods that only `before` has, of the same problems of the same tables."""
    same = {table for table, digest in before.get("tables", {}).items() if now["tables"].get(table) == digest}
    old = {label(p): p["methods"] for p in before["problems"] if p["name"].partition("/")[0] in same}
    problems = [{**p, "methods": {**old.get(label(p), {}), **p["methods"]}} for p in now["problems"]]
    made = {**before.get("methods", {}), **now["methods"]}
    present = {name for problem in problems for name in problem["methods"]}
    return {**now, "methods": {name: made[name] for name in made if name in present}, "problems": problems}


def limit_for(recorded: Recorded, share: float = SHARE) -> int | None:
    """The highest memory limit, of those halfway between two neighbouring sizes, at which at least `share` of the
    configs runs out of memory; in bytes. None if as many do already, or if nothing would be left."""
    outcomes = [trial.outcome for trial in recorded.trials.values()]
    sizes = sorted((o.measurement.device_bytes for o in outcomes if isinstance(o, Fits)), reverse=True)
    ran_out = sum(isinstance(outcome, OutOfMemory) for outcome in outcomes)
    more = math.ceil(share * len(outcomes) - 1e-9) - ran_out  # 0.1 * 30 is a little more than 3
    if more <= 0:
        return None
    smallest_out = sizes[more - 1] if more <= len(sizes) else 0
    largest_in = next((size for size in sizes if size < smallest_out), None)
    return None if largest_in is None else (smallest_out + largest_in) // 2


def code_here() -> dict[str, Any]:
    """The checkout's revision, with a word on changes since, and the estimator's version."""

    def git(*asked: str) -> str:
        done = subprocess.run(["git", *asked], cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip()

    changed = ", with changes" if git("status", "--porcelain", "--", "../autofit") else ""
    return {"revision": (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed, "estimator": ESTIMATOR_VERSION}


def label(problem: JSON) -> str:
    """A problem's name, with its limit where that is below its table's."""
    return problem["name"] + (f" under {format_bytes(problem['limit'])}" if problem["limit"] else "")


def tables_of(document: JSON) -> str:
    """A row for each problem, and one for each method, as tables in Markdown."""
    title = ("problem", "trials", "seconds", "others' seconds", "out of memory", "slower by", "bound held")
    title += ("frontier", "frontier, thorough")
    problems = [problem for problem in document["problems"] if OURS in problem["methods"]]
    rows = [_problem_row(problem, _best_other(document, problem)) for problem in problems]
    text = _markdown((title, *rows, *([_all_row(problems)] if problems else [])))
    others = [name for name in document["methods"] if not name.startswith(OURS)]
    if others:
        title = ("method", "near the best on", "its seconds there", "autofit's", "ratio", "made", "revision")
        text += "\n" + _markdown((title, *(_method_row(document, name) for name in others)))
    return text


def _problem_row(problem: JSON, best_other: tuple[float, str] | None) -> tuple[str, ...]:
    own = problem["methods"][OURS]
    ended = own.get("ended")
    other = f"{best_other[0]:.3g} ({best_other[1]})" if best_other else ""
    ran_out = _two((ended or own)["out_of_memory"])
    slower = " / ".join("never" if s is None else f"{s:.1%}" for s in ended["recommended"]) if ended else ""
    held = f"{ended['bound_held']} of {ended['seeds']}" if ended else ""
    shares = [own["frontier"][-1], *_thorough([problem])]
    frontier, thorough, *_ = [*(f"{share:.1%}" for share in shares), ""]
    return label(problem), _two(own["trials"]), _two(own["seconds"]), other, ran_out, slower, held, frontier, thorough


def _thorough(problems: Iterable[JSON]) -> list[float]:
    """The shares of the frontiers after 20 trials of the search for all of it, where that was run."""
    return [p["methods"][THOROUGH]["frontier"][0] for p in problems if THOROUGH in p["methods"]]


def _all_row(problems: Sequence[JSON]) -> tuple[str, ...]:
    """On how many problems the targets are met, in the median of the seeds, and in how many searches the bound held."""
    own = [problem["methods"][OURS] for problem in problems]
    ended = [one["ended"] for one in own if "ended" in one]
    near = sum(one["trials"][0] is not None and one["trials"][0] <= TRIALS for one in own)
    few = sum(max(o["out_of_memory"][0], o.get("ended", o)["out_of_memory"][0]) <= RAN_OUT for o in own)
    held = f"{sum(one['bound_held'] for one in ended)} of {sum(one['seeds'] for one in ended)}"
    shares = sorted(one["frontier"][-1] for one in own)
    frontier = f"{shares[0]:.0%} to {shares[-1]:.0%}"
    whole = _thorough(problems)
    thorough = f"at least {FRONTIER:.0%} on {sum(share >= FRONTIER for share in whole)} of {len(whole)}"
    reached, within = (f"at most {n} on {many} of {len(own)}" for n, many in ((TRIALS, near), (RAN_OUT, few)))
    return "all", reached, "", "", within, "", held, frontier, thorough


def _best_other(document: JSON, problem: JSON) -> tuple[float, str] | None:
    """The median seconds of the other method that needs the fewest, with its name. Over a whole table it may also be
    one that is told the best training method, and searches that alone."""
    alone = problem["name"].replace("/any", f"/{problem['best']}")
    same = [p for p in document["problems"] if p["name"] in (problem["name"], alone) and p["limit"] == problem["limit"]]
    found = [
        (figures["seconds"][0], name if one is problem else f"{name}, {problem['best']} alone")
        for one in sorted(same, key=lambda p: p is not problem)
        for name, figures in one["methods"].items()
        if not name.startswith(OURS) and figures["seconds"][0] is not None
    ]
    return min(found, key=lambda pair: pair[0], default=None)


def _method_row(document: JSON, name: str) -> tuple[str, ...]:
    """On how many problems a method comes near the best in the median, and its seconds there beside ours, where both
    do."""
    ran = [p["methods"] for p in document["problems"] if {name, OURS} <= p["methods"].keys()]
    near = [methods for methods in ran if methods[name]["seconds"][0] is not None]
    both = [methods for methods in near if methods[OURS]["seconds"][0] is not None]
    its, own = (sum(methods[of]["seconds"][0] for methods in both) for of in (name, OURS))
    made = document["methods"][name]
    figures = f"{its:,.0f}", f"{own:,.0f}", f"{its / own:.2f}" if own else ""
    return f"`{name}`", f"{len(near)} of {len(ran)}", *figures, made["recorded_at"][:10], made["revision"] or ""


def _two(pair: Sequence[float | None]) -> str:
    return " / ".join("never" if figure is None else f"{figure:.3g}" for figure in pair)


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    title, *rest = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (title, ["---"] * len(title), *rest))


def picture(svg: Path) -> None:
    """One search of full fine-tuning over the first table: all configs, the frontier, and its trials in order."""
    import matplotlib
    from matplotlib.figure import Figure

    (table,) = read(TABLES[:1])
    recorded = next(r for r in problems_of([table]) if r.problem.method == "full")
    recorded = replace(recorded, problem=replace(recorded.problem, predictions=predictions_of(table)))
    trace = searched(recorded, ours.search, seed=0)
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    blue, orange, grey = "#0072B2", "#D55E00", "#9a9a9a"
    limit = recorded.problem.memory_limit_bytes / GIB

    def beside(text: str, height: float, above: int, colour: str) -> None:
        """A line of text that ends just left of the limit, `above` points above a height."""
        place = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": colour}
        axes.annotate(text, (limit, height), (-4, above), **place)

    axes.plot(*zip(*(_place(p.measurement) for p in recorded.points), strict=True), "o", ms=4, color=grey, mec="none")
    front = [_place(p.measurement) for p in recorded.frontier]
    fastest = front[-1][1]
    axes.step(*zip(*front, (limit, fastest), strict=True), where="post", color=blue, lw=1.2, zorder=1)
    beside("frontier of all configs", fastest, 5, blue)
    numbers: dict[object, list[str]] = {}
    for number, run in enumerate(trace.runs, start=1):
        numbers.setdefault(run.config, []).append(str(number))
    ran_out = []
    for config, ran in numbers.items():
        outcome, said = recorded.trials[config].outcome, ", ".join(ran)
        if isinstance(outcome, Fits):
            place = _place(outcome.measurement)
            axes.plot(*place, "o", ms=6, color=orange, mec="white", mew=0.6)
            axes.annotate(said, place, (0, 5), textcoords="offset points", ha="center", fontsize=8, color=orange)
        else:
            ran_out.append(said)
    if ran_out:
        beside(f"out of memory: {', '.join(ran_out)}", 0.0, 5, orange)
    axes.axvline(limit, color="black", lw=0.8, ls=":")
    size = format_bytes(recorded.problem.memory_limit_bytes)
    beside(f"limit {size}; {recorded.out_of_memory} configs need more", 1.2 * fastest, -11, "black")
    axes.set(xlabel="device memory, GiB", ylabel="tokens/s", ylim=(0, 1.2 * fastest))
    axes.set_title(f"{len(trace.runs)} trials of {len(recorded.trials)} configs", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "autofit", "svg.fonttype": "none"}):  # equal pictures, equal files
        figure.savefig(svg, format="svg", metadata={"Date": None})


def _place(measured: Measurement) -> tuple[float, float]:
    return measured.device_bytes / GIB, measured.tokens_per_second


if __name__ == "__main__":
    main()
