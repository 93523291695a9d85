"""The worlds that searches are tested in."""

from unit.search.conftest import job, lattice, truth

__all__ = ["job", "lattice", "truth"]
