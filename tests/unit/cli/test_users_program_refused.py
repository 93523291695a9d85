"""A user's own program that no search could measure is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import model_in
from unit.cli.conftest import Autofit

SPACE = "axes: {method: [full], micro_batch: [2, 4]}"


@pytest.mark.parametrize(
    ("command", "more", "program", "message"),
    [
        ("search", (), "no-such-program {micro_batch}", "no-such-program is not found"),
        ("search", (), "python train.py", "the space varies micro_batch, which the command ignores"),
        ("search", (), "python train.py {micro}", "did you mean micro_batch?"),
        ("search", ("--devices", "2"), "python train.py {micro_batch}", "one device for now"),
        ("search", ("--for", "trl"), "python train.py {micro_batch}", "whatever --for trl says"),
        (
            "search",
            ("--in-place", "--hardware", "h100-80g,l40s"),
            "python train.py {micro_batch}",
            "one kind of hardware",
        ),
        ("trial", ("--config", "micro_batch=2", "--profile", "p.json"), "python train.py", "autofit's own step"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    autofit: Autofit, tmp_path: Path, command: str, more: tuple[str, ...], program: str, message: str
) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    model_in(tmp_path / "small")
    space = ("--space", "space.yaml") if command == "search" else ()
    done = autofit(command, "--model", "./small", "--seq-len", "32", *space, *more, "--command", program)
    assert done.code == 2 and message in done.err
