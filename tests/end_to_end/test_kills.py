"""A search of which a part is killed that no other test kills; `kills.py` has recorded many more, of all parts."""

from __future__ import annotations

from kills import VICTIMS, searched, world, wrong


def test_a_search_outlives_the_head_of_its_cluster() -> None:
    """Nothing is lost, doubled or left."""
    with world() as service:
        record = searched(service, VICTIMS.index("head"), seed=0)
        assert not wrong(record), record
