"""The page of a replay's results: the answer first, then how it was measured, every figure, and the plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replay_answer import answer
from replay_verdicts import ANY, JSON, NEAR, OURS, WARM, pair, reached, scores
from replay_words import count, listed, name_of, percents, table

from autofit.units import format_bytes

PLOTS = {
    "speed": "Best speed found so far, trial by trial",
    "hypervolume": "Share of the frontier found so far, trial by trial",
    "seconds": "Best speed found so far, by seconds of trials",
}
"""The plots of every problem, with their headings."""
END = ("own stop", "trials", "slower by", "recommended, slower by", "stated", "right")
"""Columns on the searches that a method itself ended."""
DIGITS = 12
"""Hexadecimal digits of a file's SHA-256 that are shown."""
REPLAYED = ("python", "optuna", "deepspeed", "accelerate", "scipy", "xgboost", "numpy", "torch", "transformers")
"""Libraries of the replay, in the order in which the page names them."""


def page(document: JSON, *, present: str | None = None) -> str:
    """The whole page, in Markdown. `present` is the digest of our search's present code: if that of the document is
    another, the page says so."""
    problems = [problem for problem in document["problems"] if OURS in scores(problem)]
    parts = [
        "# Search methods over recorded tables: results",
        *_outdated(document, present),
        *(answer(document, problems) if problems else []),
        *_warm_start(problems),
        _made(document),
        "## Every method",
        _legend(),
        *(_section(problem) for problem in document["problems"]),
        "## Plots",
        "Lines are medians over the seeds; the shaded band spans the 10th to 90th percentiles of our searches. The "
        "vertical axis shows the remaining gap on a logarithmic scale, so that the last few per cent are visible.",
        *(_pictures(problem) for problem in document["problems"] if is_drawn(problem)),
    ]
    return "\n\n".join(parts) + "\n"


def is_drawn(problem: JSON) -> bool:
    """Whether the problem has plots: those under a limit that a rule has lowered have none."""
    return bool(scores(problem)) and problem.get("lowered_to") is None


def slug(problem: JSON) -> str:
    """The same, as part of a file name."""
    return name_of(problem).replace("/", "-").replace(" ", "-")


def picture(problem: JSON, kind: str) -> str:
    """The file of a plot, relative to the page's folder."""
    return f"plots/{slug(problem)}-{kind}.svg"


def _warm_start(problems: Sequence[JSON]) -> list[str]:
    """What the trials of the other tables are worth, where tables were replayed together."""
    pairs = [(problem, known[OURS], known[WARM]) for problem in problems if WARM in (known := scores(problem))]
    if not pairs:
        return []
    rows = []
    for problem, cold, warm in pairs:
        costs = (pair(reached(score)[unit]) for unit in ("trials", "seconds") for score in (cold, warm))
        ends = ("" if score["ended"] is None else pair(score["ended"]["trials"]) for score in (cold, warm))
        rows.append((name_of(problem), *costs, *ends))
    title = (
        "problem",
        *(column for unit in ("trials", "seconds", "own stop") for column in (unit, f"{unit}, warm")),
    )
    told = (
        f"What a search gains from the trials of the other tables (`{WARM}`): trials and trial-seconds to come within "
        f"{NEAR:.0%} of the best, and trials until it stops by itself."
    )
    ends = [warm["ended"] for _, _, warm in pairs if warm["ended"] is not None and warm["ended"]["stated"] is not None]
    held, stated = (sum(end[count] for end in ends) for count in ("within_stated", "seeds"))
    honest = f"The regret bound that `{WARM}` stated when it stopped held in {held} of {stated} searches."
    return [f"{told}\n\n{table(title, rows)}\n\n{honest}"]


def _made(document: JSON) -> str:
    """Hardware, stack, seeds, versions, and the commands."""
    lines = [
        "## How it was measured",
        f"Made by `{document['command']}`{_code(document)}, with {count(document['seeds'], 'seed')}, 0 to "
        f"{document['seeds'] - 1}.{_partly(document['problems'])}{_also(document)} Libraries of the methods: "
        f"{_versions(document['libraries'])}. Problems, seeds and methods are described in "
        "[README.md](README.md#search-methods-replayed-over-recorded-tables).",
        "A problem is one training method of a table, or the whole table. The tables hold real trials (`autofit bench "
        "record`), run one after the other in shuffled order, each in its own process under the table's memory limit:",
        table(
            ("table", "workload", "space", "limit", "configs", "fit", "out of memory", "recorded", "sha256"),
            [_recorded(document, name) for name in dict.fromkeys(p["table"] for p in document["problems"])],
        ),
        *_lowered(document["problems"]),
    ]
    for site, tables in _sites(document["problems"]).items():
        lines.append(f"{', '.join(tables)}: {site}.")
    if document["left_out"]:
        lines.append(f"Left out, because nothing fits: {', '.join(document['left_out'])}.")
    return "\n\n".join(lines)


def _outdated(document: JSON, present: str | None) -> list[str]:
    """That the search's code has changed since."""
    made = document.get("code")
    if made is None or present is None or made.get("search") == present:
        return []
    return [
        f"**The search has changed since these searches were run, at revision {made['revision']}.** `make results` "
        "runs them again."
    ]


def _code(document: JSON) -> str:
    """The code that the searches were run by."""
    made = document.get("code")
    if made is None:
        return ""
    search = f"; code of the search `{made['search'][:DIGITS]}`" if "search" in made else ""
    return f" at revision {made['revision']} (version {made['estimator']} of the estimator{search})"


def _partly(problems: Sequence[JSON]) -> str:
    """Which methods have run on some of the problems only."""
    names = dict.fromkeys(method["name"] for problem in problems for method in problem["methods"])
    ran = {name: sum(name in scores(problem) for problem in problems) for name in names}
    some = [f"`{name}` on {n} of {len(problems)}" for name, n in ran.items() if n < len(problems)]
    return f" Every method ran on every problem, except {', '.join(some)}." if some else ""


def _also(document: JSON) -> str:
    """What came from earlier runs."""
    said = ""
    for run in document.get("also", ()):
        of = f" at revision {run['revision']}" if run["revision"] else ", at a revision that it does not name"
        when = f"{run['recorded_at'][:10]}{of}"
        if run["left_out"] is not None:
            said += f" `{run['file']}` of {when} is left out: {run['left_out']}."
        elif run["methods"]:
            names = listed(f"`{name}`" for name in run["methods"])
            said += f" The figures of {names} are those of an earlier run, `{run['file']}` of {when}."
    return said


def _lowered(problems: Sequence[JSON]) -> list[str]:
    """By which rule limits were lowered."""
    shares = dict.fromkeys(share for problem in problems if (share := problem.get("lowered_to")) is not None)
    return [
        f"Problems of which fewer than {share:.0%} of the configs run out of memory under the table's limit are "
        "replayed under a lower one, too: the highest of those halfway between two neighbouring sizes at which at "
        f"least {share:.0%} do. What exceeds it counts as out of memory, after the seconds that it took when it fitted."
        for share in shares
    ]


def _recorded(document: JSON, table: str) -> tuple[str, ...]:
    """A table's row, with the counts under the highest limit that was replayed."""
    mine = [problem for problem in document["problems"] if problem["table"] == table]
    limit, own = max(problem["memory_limit_bytes"] for problem in mine), mine[0]["table_limit_bytes"]
    mine = [problem for problem in mine if problem["memory_limit_bytes"] == limit]
    # All methods together count those of which nothing fits, too.
    mine = [problem for problem in mine if problem["method"] == ANY] or mine
    header, w = document["tables"][table], mine[0]["workload"]
    counts = (sum(problem[key] for problem in mine) for key in ("configs", "fitting", "out_of_memory"))
    return (
        table,
        f"{w['model']}, {w['seq_len']} tokens x {w['global_batch']} sequences",
        f"`{header['space']}`",
        format_bytes(limit) + ("" if limit == own else f", recorded under {format_bytes(own)}"),
        *(str(count) for count in counts),
        header["recorded_at"][:10],
        f"`{header['sha256'][:DIGITS]}`",
    )


def _sites(problems: Iterable[JSON]) -> dict[str, list[str]]:
    """Hardware and stack in words, each with the tables that were recorded on it."""
    found: dict[str, list[str]] = {}
    for problem in problems:
        hardware = problem["hardware"]
        cores = f", {count(hardware['cores'], 'core')}" if hardware["cores"] else ""
        words = (
            f"{hardware['device_name']} (`{hardware['name']}`{cores}, {format_bytes(hardware['memory_bytes'])}); "
            f"{_versions(problem['stack'])}"
        )
        tables = found.setdefault(words, [])
        if problem["table"] not in tables:
            tables.append(problem["table"])
    return found


def _versions(libraries: JSON) -> str:
    known = [name for name in REPLAYED if name in libraries] + [name for name in libraries if name not in REPLAYED]
    return ", ".join(f"{name} {libraries[name]}" for name in known if libraries[name] is not None)


def _legend() -> str:
    return (
        "Median / 90th percentile over the seeds; `never`: half of the seeds (median), or more than a tenth (90th "
        "percentile), did not get there. Out of memory: number of out-of-memory trials before reaching 1 %. Frontier "
        "after N: share of the exhaustive frontier's hypervolume after N trials; a search that has ended counts with "
        "its last value. Own stop: how many searches the method itself ended; then their trials, how much slower the "
        "best that they had run was than the problem's, and how much slower what they recommended was. Stated: how "
        "much slower the recommended config is at most, as the search itself stated; right: in how many searches that "
        "held."
    )


def _section(problem: JSON) -> str:
    best = problem["best"]
    config = ", ".join(f"{axis} {value}" for axis, value in best["config"].items() if axis != "method")
    method = f" of {best['config']['method']}" if problem["method"] == ANY else ""
    lines = [
        f"### {name_of(problem)}",
        f"{count(problem['configs'], 'config')}: {problem['fitting']} fit "
        f"{format_bytes(problem['memory_limit_bytes'])}, {problem['out_of_memory']} run out of memory, "
        f"{problem['frontier']} are on the frontier. The fastest{method}, {best['tokens_per_second']:,.0f} tokens/s: "
        f"{config}.",
    ]
    known = scores(problem)
    if known:
        some = next(iter(known.values()))
        within = [f"{entry['within']:.0%}" for entry in some["reached"]]
        after = [str(entry["trials"]) for entry in some["hypervolume"]]
        costs = (f"{unit} to {distance}" for unit in ("trials", "seconds") for distance in within)
        to_best = ("method", *costs, "out of memory")
        rest = ("method", *(f"frontier after {n}" for n in after), *END)
        lines.append(table(to_best, [(_ours(name), *_to_best(score)) for name, score in known.items()]))
        lines.append(table(rest, [(_ours(name), *_rest(score)) for name, score in known.items()]))
    lines += [f"`{m['name']}` was not run: {m['not_run']}" for m in problem["methods"] if m["not_run"] is not None]
    return "\n\n".join(lines)


def _ours(name: str) -> str:
    return f"**`{name}`**" if name in (OURS, WARM) else f"`{name}`"


def _to_best(score: JSON) -> tuple[str, ...]:
    return (
        *(pair(entry["trials"]) for entry in score["reached"]),
        *(pair(entry["seconds"]) for entry in score["reached"]),
        pair(score["out_of_memory"]),
    )


def _rest(score: JSON) -> tuple[str, ...]:
    shares = tuple(percents(entry) for entry in score["hypervolume"])
    ended = score["ended"]
    if ended is None:
        return (*shares, *("" for _ in END))
    recommended, stated, held = (ended.get(of) for of in ("recommended", "stated", "within_stated"))
    return (
        *shares,
        f"{ended['seeds']} of {score['seeds']}",
        pair(ended["trials"]),
        percents(ended["regret"]),
        "" if recommended is None else percents(recommended),
        "" if stated is None else percents(stated),
        "" if held is None else f"{held} of {ended['seeds']}",
    )


def _pictures(problem: JSON) -> str:
    pictures = (f"![{text}: {name_of(problem)}]({picture(problem, kind)})" for kind, text in PLOTS.items())
    return "\n\n".join([f"### Plots of {name_of(problem)}", *pictures])
