"""The kinds of work for which a device has a speed of its own: a step is counted in them, a probe measures them."""

from __future__ import annotations

FORMATS = ("fp32", "bf16", "fp16")
"""Number formats, by the names that a config's precision has for them."""
LAYOUTS = {"nt": "forward", "nn": "gradient of the input", "tn": "gradient of the weight"}
"""How the two factors of a product lie in memory, `n` row by row and `t` column by column; and the product of a linear
layer that is so: x @ w.T, g @ w, g.T @ x."""
WIDE = 24_576
"""Rows or columns of a matrix from which on a product with it counts as wide."""
PASSES = ("forward", "backward")
MEMORY_BOUND = ("elementwise", "cast", "transcendental", "reduction", "softmax")
"""Classes of operations that take as long as their bytes do: arithmetic on each element, a change of format, functions
such as exp and silu, sums, and softmax with its gradient."""
PLACES = ("near", "far")
"""Whether an operation finds what it reads in the device's caches, because it moves few bytes, or in its memory."""
LAUNCH = "launch"
"""Operations, in host time."""
FRESH = "fresh"
"""Bytes of results so large that a processor's system hands out new pages for each of them."""

FLOP, BYTE, OPERATION = "FLOP", "byte", "operation"

LINK, HOST_LINK, DISK_READ, DISK_WRITTEN, HOST_UPDATE = TRANSFERS = (
    "between ranks",
    "to and from the host",
    "read from disk",
    "written to disk",
    "updated on the host",
)
"""Bytes that a rank sends to others, or that cross the link to its host, one way or the other; that the ranks of a host
together read from its disk and write to it; and that an optimizer reads and writes there for all of them."""


def product(number_format: str, layout: str) -> str:
    """FLOPs of products of two matrices."""
    return f"product/{number_format}/{layout}"


def wide_product(number_format: str, layout: str) -> str:
    """FLOPs of products with a matrix as wide as a vocabulary, which a processor may be several times slower at."""
    return f"product/{number_format}/{layout}/wide"


def operands(number_format: str, layout: str) -> str:
    """Bytes of the factors and of the result of such a product."""
    return f"operands/{number_format}/{layout}"


def called(number_format: str) -> str:
    """Products of two matrices, in the time that the smallest takes."""
    return f"called/{number_format}"


def batched(number_format: str) -> str:
    """FLOPs of products of many small matrices, as in attention that is not fused."""
    return f"batched/{number_format}"


def attention(number_format: str, direction: str) -> str:
    """FLOPs of fused attention; `direction` is one of `PASSES`."""
    return f"attention/{number_format}/{direction}"


def attended(number_format: str, direction: str) -> str:
    """Bytes of the queries, keys, values and results of fused attention."""
    return f"attended/{number_format}/{direction}"


def memory_bound(operation: str, number_format: str, place: str) -> str:
    """Bytes read and written by an operation of one of the classes `MEMORY_BOUND`."""
    return f"{operation}/{number_format}/{place}"


def four_bit(number_format: str) -> str:
    """Bytes read and written to unpack 4-bit weights into a format."""
    return f"dequantise-4bit/{number_format}"


def update(number_format: str) -> str:
    """Bytes read and written by a fused optimizer's update of weights in a format."""
    return f"update/{number_format}"


DEQUANTISE_8BIT, QUANTISE_8BIT, UPDATE_8BIT = "dequantise-8bit", "quantise-8bit", "update/8bit"
"""Bytes read and written: of optimizer states in 8 bits, unpacked and packed again, or all in one kernel."""

KINDS: tuple[str, ...] = (
    *(product(f, layout) for f in FORMATS for layout in LAYOUTS),
    *(wide_product(f, layout) for f in FORMATS for layout in LAYOUTS),
    *(operands(f, layout) for f in FORMATS for layout in LAYOUTS),
    *(called(f) for f in FORMATS),
    *(batched(f) for f in FORMATS),
    *(attention(f, direction) for f in FORMATS for direction in PASSES),
    *(attended(f, direction) for f in FORMATS for direction in PASSES),
    *(memory_bound(c, f, place) for c in MEMORY_BOUND for f in FORMATS for place in PLACES),
    *(four_bit(f) for f in FORMATS),
    DEQUANTISE_8BIT,
    QUANTISE_8BIT,
    *(update(f) for f in FORMATS),
    UPDATE_8BIT,
    FRESH,
    LAUNCH,
)
"""Every kind, in the order of arrays over them."""
INDEX = {kind: place for place, kind in enumerate(KINDS)}


def unit(kind: str) -> str:
    """What a kind's amounts are counted in."""
    if kind == LAUNCH or kind.startswith("called"):
        return OPERATION
    return FLOP if kind.split("/")[0] in ("product", "batched", "attention") else BYTE


def format_of(kind: str) -> str | None:
    """The number format that a kind is in; None where it has none."""
    return next((part for part in kind.split("/") if part in FORMATS), None)
