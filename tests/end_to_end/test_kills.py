"""Searches of which a part is killed that no other test kills; `kills.py` has recorded many more, of all parts."""

from __future__ import annotations

from kills import VICTIMS, searched, world, wrong

KILLED = ("head", "server")


def test_whatever_part_is_killed_no_search_loses_doubles_or_leaves_anything() -> None:
    with world() as service:
        for part in KILLED:
            said = searched(service, VICTIMS.index(part), seed=0)
            assert not wrong(said), said
