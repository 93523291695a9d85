"""An emulated card beside the real ones: the configs that ran on an H100 and an H200, on the card that is not there.

    python benchmarks/emulated_beside_real.py [TABLE.jsonl ...] [--home .venv/emulated-card] [--json FILE]

Each config of the recorded tables that trained there is trained by `autofit trial` on the emulated card of that name,
under the same limit. Prints by how many bytes the peaks differ, and exits with 1 if any differs by more than a page.
Times there mean nothing, and none is shown. Some 8 s per config.

`make emulated-card` builds what it runs on. With another torch than the tables', which is said, another allocator is
compared: name theirs in tests/emulated_card/pins.txt, and use an environment with their other libraries.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Measurement
from autofit.core.units import MIB
from autofit.operations.recording.table_file import RecordedTable, is_table, read_table

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "recorded"
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
PAGE = 2 * MIB
"""What the allocator takes from the driver at a time for small blocks."""


def main() -> int:
    """Run them all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE.jsonl")
    parser.add_argument("--home", type=Path, default=ROOT / ".venv" / "emulated-card")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    files = asked.tables or [file for file in sorted(RECORDED.glob("h?00/*.jsonl")) if is_table(file)]
    rows: list[dict[str, Any]] = []
    for table in map(read_table, files):
        for config, measured in trained(table):
            rows.append(compared(table, config, measured, asked.home))
            if asked.json is not None:
                found = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}
                asked.json.write_text(json.dumps(found, indent=1) + "\n")
            print(
                table.name, config, *(f"{peak}: {rows[-1]['more_bytes'][peak]:+d} bytes" for peak in PEAKS), flush=True
            )
    releases = sorted({(row["real_torch"], row["emulated_torch"]) for row in rows})
    for real, emulated in releases:
        if real != emulated:
            print(f"torch {emulated} was compared with {real}", file=sys.stderr)
    return any(abs(more) > PAGE for row in rows for more in row["more_bytes"].values())


def trained(table: RecordedTable) -> Iterator[tuple[Config, Measurement]]:
    """Each config that fitted, with what its trial measured. Lengths are left out: the table keeps their sum."""
    if table.workload.lengths is None:
        yield from ((t.config, t.outcome.measurement) for t in table.trials if isinstance(t.outcome, Fits))


def compared(table: RecordedTable, config: Config, measured: Measurement, home: Path) -> dict[str, Any]:
    """By how many bytes the emulated peaks are more than the real ones. Raises `SystemExit` if it cannot run."""
    of, card = table.workload, table.hardware.name
    asked = ["--model", of.model, "--seq-len", str(of.seq_len), "--global-batch", str(of.global_batch)]
    cards = [sys.executable, str(ROOT / "tests" / "emulated_card" / "cards.py"), "--home", str(home), card]
    if table.memory_limit_bytes < (table.hardware.memory_bytes or 0):
        asked += ["--memory-limit", f"{table.memory_limit_bytes}B"]
    with tempfile.TemporaryDirectory() as folder:
        trial = [sys.executable, "-m", "autofit.cli.main", "trial", *asked, "--config", str(config), "--json"]
        done = subprocess.run([*cards, *trial, "--store", f"{folder}/trials.db"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{config} did not train on the emulated {card}:\n{done.stdout}{done.stderr}")
    ran = json.loads(done.stdout)
    return {
        "table": table.name,
        "hardware": card,
        "model": of.model,
        "config": str(config),
        "real_torch": table.stack.torch,
        "emulated_torch": ran["stack"]["torch"],
        "more_bytes": {peak: ran["measurement"][peak] - getattr(measured, peak) for peak in PEAKS},
    }


if __name__ == "__main__":
    sys.exit(main())
