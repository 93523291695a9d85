"""Files are whole or not there, and a full disk is the environment's fault."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from unit.cli.conftest import Autofit

from autofit import __version__
from autofit.cli.output import PLOTLY, write, write_page
from autofit.core.errors import EnvironmentLacks, UsageError

ASKED = ("--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4")


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "chart.html"
    file.write_text("before")
    file.chmod(0o640)
    with files_no_larger_than(100_000), pytest.raises(EnvironmentLacks, match=r"cannot be written.*free some space"):
        write(file, [b"x" * 60_000, b"x" * 60_000])
    assert file.read_text() == "before"
    write(file, [b"after"])
    assert file.read_text() == "after"
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["chart.html"]


class Page(HTMLParser):
    """What a page refers to, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [str(value) for name, value in attrs if name in ("src", "href", "data", "action")]


def figure() -> Any:
    from plotly.graph_objects import Figure

    return Figure().add_scatter(y=[1, 2], name="</script><script>alert(1)</script>")


def test_pages_share_a_script_and_need_no_network(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_page(tmp_path / name, figure())
        text = (tmp_path / name).read_text()
        page = Page(text)
        assert page.references == [PLOTLY]
        assert page.tags[0] == "html" and not {"link", "iframe"} & set(page.tags)
        assert len(text) < 1_000_000
        assert "<script>alert(1)" not in text
    assert sorted(os.listdir(tmp_path)) == ["a.html", "b.html", PLOTLY]
    assert "plotly.js v" in (tmp_path / PLOTLY).read_text()[:200]


def test_a_page_without_a_folder_holds_its_script(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    write_page(Path("-"), figure())
    assert Page(capsysbinary.readouterr().out.decode()).references == []


def test_chunks_that_fail_leave_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "trials.jsonl", chunks())
    assert os.listdir(tmp_path) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write(tmp_path / "link", [b"text"])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"text"


def test_devices_are_written_to() -> None:
    write(Path("/dev/null"), [b"text"])
    with pytest.raises(EnvironmentLacks, match="No space left on device"):
        write(Path("/dev/full"), [b"text"])


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        write(tmp_path, [b"text"])


@pytest.mark.parametrize(
    "words",
    [
        ("recommend", *ASKED, "-o", "/dev/full"),
        ("frontier", *ASKED, "--png", "/dev/full"),
        ("db", "export", "/dev/full"),
    ],
)
def test_a_full_disk_ends_with_4(autofit: Autofit, filled: Path, words: tuple[str, ...]) -> None:
    done = autofit(*words)
    assert (done.code, done.out) == (4, "")
    assert (
        done.err
        == "autofit: /dev/full cannot be written: No space left on device (free some space, or write elsewhere)\n"
    )


def test_standard_output_on_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autofit.cli.main", "models"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 4
    assert done.stderr == "autofit: nothing more can be written: No space left on device (free some space)\n"


def test_standard_output_that_is_closed() -> None:
    shell = ["sh", "-c", 'exec "$0" -m autofit.cli.main models >&-', sys.executable]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "autofit", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")
