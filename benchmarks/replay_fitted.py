"""What the constants of the estimator and of the search were fitted to, held against the tables on which searches are
judged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autofit.hardware import Hardware

FITTED = {
    "the guess of a processor's speed (`estimate/speed.py`)": ("cpu-2c-every-axis",),
    "the model of the C library's heap (`estimate/heap.py`, but for what offload adds, which no table here has)": (
        "cpu-2c-every-axis",
        "cpu-2c-main-job-trials",
    ),
}
"""By what was fitted, the files in recorded/ that it was fitted to."""
BY_HAND = (
    "Which causes count in the heap was worked out by looking at all tables, and which operations pay for what in time "
    "at all but those of the Zen 5 machine."
)
"""What no fit chose but a person."""
_FOUR = ("cpu-2c-smollm2-135m", "cpu-2c-pythia-160m", "cpu-zen5-2c-smollm2-135m", "cpu-zen5-2c-gemma-3-270m")
TUNED = {
    "how little counts what is only shown beside the recommendation (`BESIDE` and `AREA_BESIDE` of "
    "`search/advice.py`)": _FOUR,
    "from which gain on a config is tried that is likelier to run out of memory (`MUCH`, there)": (
        *_FOUR,
        "cpu-zen5-2c-smollm2-360m",
    ),
}
"""By which number of the search was chosen from replays with several values of it, the tables that these were of, and
those that had shown that it was needed."""
FIRST_SEARCH = {
    "cpu-zen5-2c-gemma-3-270m": "00cee1d7c2aa4416",
    "cpu-zen5-2c-smollm2-360m": "98e25fc23c6405bd",
    "cpu-zen5-2c-qwen2.5-0.5b": "83fee032b9fadc3b",
}
"""The tables that nobody had seen while the search's rules and thresholds were chosen, each with the digest of the
search (`code_of`) that was the first to be replayed over it. Replays of every other table were watched meanwhile; so
may these have been, once the search is another."""
Measured = tuple[str, str, str]
"""Hardware, workload and config of one trial, each as text that is equal for equal ones."""


def fitted_to(tables: Iterable[Path], recorded: Path, search: str) -> dict[str, Any]:
    """What was fitted to what and, for each of the tables, whether it is in a fit itself, whether a fit has trials of
    its hardware, how many of its configs a fit has, measured another time, and whether the `search` of this digest is
    the first that was replayed over it; as a JSON object."""
    files = {name: recorded / f"{name}.jsonl" for names in FITTED.values() for name in names}
    known = {trial for file in files.values() for trial in measured(file)}
    return {
        "what": {what: list(names) for what, names in FITTED.items()},
        "trials": len(known),
        "by_hand": BY_HAND,
        "tuned": {what: list(names) for what, names in TUNED.items()},
        "tables": {
            table.stem: {
                "in_fit": table.stem in files,
                "hardware_in_fit": bool({h for h, _, _ in measured(table)} & {h for h, _, _ in known}),
                "configs_in_fit": len(set(measured(table)) & known),
                "unseen": FIRST_SEARCH.get(table.stem) == search,
            }
            for table in tables
        },
    }


def measured(file: Path) -> list[Measured]:
    """The trials of a recorded table, or of an export of `autofit db export`."""
    header, *rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [
        (
            Hardware.from_json((row if "hardware" in row else header)["hardware"]).key,
            json.dumps((row if "workload" in row else header)["workload"], sort_keys=True),
            json.dumps(row["config"], sort_keys=True),
        )
        for row in rows
    ]
