"""What a test has started and still runs, told by its environment: none may outlive what it was started for."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "AUTOFIT_TEST_FOLDER"
"""Names the folder of a test; whatever is started with it in its environment passes it on."""


def processes(folder: Path) -> dict[int, str]:
    """Command lines of all that was started from this test's folder and still runs, by process id."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                environment = (process / "environ").read_bytes()
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if f"{VARIABLE}={folder}".encode() in environment.split(b"\0"):
                found[int(process.name)] = line
    return found
