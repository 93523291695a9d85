"""What is installed is pinned exactly, and the packaging files agree with one another."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins(file: str) -> dict[str, str]:
    """Name to exact version; every line but a comment is a pin."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    matches = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if match is None]
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def test_no_package_is_pinned_twice() -> None:
    assert not pins("constraints.txt").keys() & pins("constraints-cuda.txt").keys()


def test_everything_that_pyproject_names_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = pins("constraints.txt")
    extras = project["optional-dependencies"]
    everywhere = pins("constraints-cuda.txt") | locked
    for text in [*project["dependencies"], *extras["dev"], *extras["docs"], *extras["bench"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text
    for text in [*extras["cuda"], *extras["flash"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(everywhere[canonicalize_name(requirement.name)]), text


def test_what_rays_dashboard_needs_is_pinned() -> None:
    """The image installs ray[default]; of its direct needs none is left to the day of the build."""
    from importlib.metadata import requires

    everywhere = pins("constraints.txt") | pins("constraints-cuda.txt")
    needed = [Requirement(text) for text in requires("ray") or []]
    dashboard = [r for r in needed if r.marker and r.marker.evaluate({"extra": "default"})]
    assert dashboard
    assert [r.name for r in dashboard if canonicalize_name(r.name) not in everywhere] == []


def test_image_is_built_from_every_pin() -> None:
    dockerfile = (ROOT / "k8s/Dockerfile").read_text()
    for file in ("constraints.txt", "constraints-cuda.txt"):
        assert f"-c {file}" in dockerfile
        assert f"!{file}" in (ROOT / "k8s/Dockerfile.dockerignore").read_text().split()


def test_type_checkers_read_the_package() -> None:
    assert (ROOT / "autofit/py.typed").exists()
