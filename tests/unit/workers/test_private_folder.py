"""A private Ray's folder is there for as long as its process, which alone has it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autofit.core.errors import EnvironmentLacks
from autofit.workers.cluster.private_folder import PrivateFolder

TAKES_ONE = """
import time
from autofit.workers.cluster.private_folder import PrivateFolder
folder = PrivateFolder()
(folder.path / "session_1").mkdir()
(folder.path / "session_1" / "raylet.out").write_text("a log")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_only_this_user_can_enter_whatever_ray_makes_of_its_own(place: Path) -> None:
    folder = PrivateFolder()
    folder.path.chmod(0o777)
    folder.path.parent.chmod(0o777)
    folder.close()
    following = PrivateFolder()
    assert following.path.parent.stat().st_mode & 0o777 == 0o700
    following.close()


def test_another_users_place_is_refused(place: Path) -> None:
    folder = PrivateFolder()
    folder.close()
    for file in folder.path.parent.iterdir():
        file.unlink()
    folder.path.parent.rmdir()
    folder.path.parent.symlink_to(place)
    with pytest.raises(EnvironmentLacks, match="not this user's"):
        PrivateFolder()


def test_folders_in_use_are_left_alone_and_those_of_the_dead_removed(place: Path) -> None:
    first, second = (
        subprocess.Popen([sys.executable, "-c", TAKES_ONE], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        assert first.stdout is not None and second.stdout is not None
        taken = [Path(process.stdout.readline().strip()) for process in (first, second)]  # type: ignore[union-attr]
        assert len(set(taken)) == 2
        own = PrivateFolder()
        assert own.path not in taken
        assert all((path / "session_1" / "raylet.out").read_text() == "a log" for path in taken)
        own.close()
        assert not own.path.exists()

        second.kill()
        second.wait()
        later = PrivateFolder()
        assert (taken[0] / "session_1").exists() and not (taken[1] / "session_1").exists()
        first.kill()
        first.wait()
        PrivateFolder().close()
        assert not taken[0].exists() and later.path.exists()
        later.close()
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_what_was_released_stays_until_the_next_is_taken(place: Path) -> None:
    folder = PrivateFolder()
    (folder.path / "raylet.out").write_text("why it did not start")
    folder.release()
    assert (folder.path / "raylet.out").exists()
    following = PrivateFolder()
    assert following.path == folder.path
    assert list(following.path.iterdir()) == []
    following.close()
