"""One search for each part of the service that may be killed; `kills.py` has recorded many more of them."""

from __future__ import annotations

from kills import VICTIMS, searched, world, wrong


def test_whatever_part_is_killed_no_search_loses_doubles_or_leaves_anything() -> None:
    with world() as service:
        for number in range(len(VICTIMS)):
            said = searched(service, number, seed=0)
            assert not wrong(said), said
