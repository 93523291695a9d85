"""The smallest stack of decoder layers in which every layer of a model occurs between its actual neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Kinds = Sequence[Hashable]
_Context = tuple[Hashable, Hashable, Hashable]
"""The kinds of the preceding layer, of the layer itself, and of the following one."""


def representatives(kinds: Kinds) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(layers of the full stack that make up the small one, for every full layer its place in the small one).

    Two layers behave alike if they and both their neighbours are of the same kinds, of which the ends of the stack are
    one. Every stretch is cut out, largest first, without which all such contexts remain: three layers stay of a uniform
    stack, four where two kinds alternate.
    """
    contexts = set(_contexts(kinds, range(len(kinds))))
    kept = list(range(len(kinds)))
    length = len(kept) - 1
    while length > 0:
        cut = next((c for c in range(1, len(kept) - length) if _may_cut(kinds, kept, c, length, contexts)), None)
        if cut is None:
            length -= 1
        else:
            del kept[cut : cut + length]
            length = min(length, len(kept) - 1)
    place = {context: index for index, context in reversed(list(enumerate(_contexts(kinds, kept))))}
    return tuple(kept), tuple(place[context] for context in _contexts(kinds, range(len(kinds))))


def _contexts(kinds: Kinds, layers: Sequence[int]) -> list[_Context]:
    sequence = [_END, *(kinds[i] for i in layers), _END]
    return [(sequence[i - 1], sequence[i], sequence[i + 1]) for i in range(1, len(sequence) - 1)]


_END = object()


def _may_cut(kinds: Kinds, kept: list[int], start: int, length: int, contexts: set[_Context]) -> bool:
    """Whether `kept` without the `length` layers from `start` on has the same contexts."""
    stop = start + length
    if kinds[kept[start - 1]] != kinds[kept[stop - 1]] or (
        stop < len(kept) and kinds[kept[start]] != kinds[kept[stop]]
    ):
        return False
    return set(_contexts(kinds, kept[:start] + kept[stop:])) == contexts
