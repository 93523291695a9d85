"""How long a data set's sequences are: files that say it, and what the micro-batches drawn from them are like."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import UsageError
from autofit.core.lengths import GROUPS, Lengths, padded, read_lengths
from autofit.core.workload import Workload
from autofit.planning.requests import WorkloadOptions

COUNTS = [max(2, int(random.Random(n).lognormvariate(6.0, 0.8))) for n in range(5000)]


def seconds(length: float) -> float:
    """Of a micro-step of some length: launches, products, attention, and kernels that come in tiles."""
    return 5.0 + 0.01 * length + 1e-5 * length**2 + 0.3 * (length % 64) / 64


def mean_of_drawn(sequences: int) -> float:
    """The mean over micro-batches that are drawn one by one from the whole data."""
    draw = random.Random(0)
    return sum(seconds(max(draw.choices(COUNTS, k=sequences))) for _ in range(20_000)) / 20_000


@pytest.mark.parametrize("sequences", [1, 2, 8, 32])
def test_few_lengths_stand_for_all_micro_batches(sequences: int) -> None:
    drawn, mixed = mean_of_drawn(sequences), padded(Lengths.of(COUNTS).tokens, sequences)
    measured = sum(weight * seconds(length) for length, weight in mixed.nodes)
    traced = [max(COUNTS), *(length for length, _ in padded(Lengths.of(COUNTS).tokens, 1).nodes)]
    predicted = sum(w * seconds(length) for length, w in zip(traced, mixed.weights(traced), strict=True))
    assert measured == pytest.approx(drawn, rel=0.03) and predicted == pytest.approx(drawn, rel=0.03)


@given(st.lists(st.integers(2, 10_000), min_size=1, max_size=400), st.sampled_from([1, 2, 4, 16]))
def test_the_nodes_are_lengths_that_there_are_and_keep_the_mean(counts: list[int], sequences: int) -> None:
    mixed = padded(Lengths.of(counts).tokens, sequences)
    assert all(min(counts) - 1 <= length <= max(counts) + 1 and 0.0 <= weight <= 1.0 for length, weight in mixed.nodes)
    mean = sum(weight * length for length, weight in mixed.nodes)
    assert mean == pytest.approx(mixed.moment(1), abs=0.51)
    assert sum(share for _, share in mixed.shares) == pytest.approx(1.0)


@given(st.lists(st.integers(2, 10_000), min_size=1, max_size=1000))
def test_a_summary_has_few_groups_the_longest_and_the_mean(counts: list[int]) -> None:
    lengths = Lengths.of(counts)
    assert len(lengths.tokens) <= GROUPS and lengths.longest == max(counts)
    assert lengths.tokens == tuple(sorted(lengths.tokens))
    if len(counts) % GROUPS == 0 or len(counts) <= GROUPS:
        assert sum(counts) / len(counts) == pytest.approx(sum(lengths.tokens) / len(lengths.tokens), abs=0.51)


def test_a_workload_keeps_the_longest_that_is_left() -> None:
    def resolved(seq_len: int) -> Workload:
        return WorkloadOptions(model="smollm2-135m", seq_len=seq_len, lengths=Lengths.of([30, 60, 90])).resolve()[1]

    whole, cut = resolved(2048), resolved(64)
    assert (whole.seq_len, whole.tokens_per_step) == (90, 60 * 64)
    assert (cut.seq_len, cut.lengths) == (64, (30, 60, 64))
    assert Workload.from_json(whole.to_json()) == whole and whole.key != cut.key
    with pytest.raises(UsageError, match="seq-len 9000 is longer than the 8192 positions"):
        WorkloadOptions(model="smollm2-135m", seq_len=10_000, lengths=Lengths.of([30, 9000])).resolve()


@pytest.mark.parametrize(
    "text",
    [
        "30\n60\n\n90\n",
        '{"input_ids": [1, 2], "labels": []}\n{"input_ids": [1, 2, 3]}',
        '{"length": 7, "text": "so"}',
        "[5, 6, 7]\n[5, 6]",
        "\N{BYTE ORDER MARK}30\n60\n90\n",
    ],
)
def test_numbers_and_token_ids_are_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text(text)
    expected = {"3": (30, 60, 90), "\N{BYTE ORDER MARK}": (30, 60, 90), '{"i': (2, 3), '{"l': (7,), "[5,": (2, 3)}
    assert read_lengths(file).tokens == next(value for begin, value in expected.items() if text.startswith(begin))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no sequence has a length"),
        ("12\n0\n", "line 2 of .* has 0 tokens: a next-token loss needs at least 2"),
        ("12\nseven\n", "line 2 of .* has neither a number of tokens nor tokens: 'seven'"),
        ('{"text": "a sentence"}', "line 1 of .* has neither"),
        ('{"input_ids": ["a", "b"]}', "line 1 of .* has neither"),
        ("3.5", "line 1 of .* has neither"),
        ("true", "line 1 of .* has neither"),
        ("[" * 100_000, "line 1 of .* has neither"),
        ("\n[512, 300, 1024, 77]\n", "one list in a single line: .* one number a line"),
    ],
)
def test_what_is_no_length_is_refused_by_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_lengths(file)


def test_a_file_that_is_no_text_or_is_not_there_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "data.arrow"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is no text"):
        read_lengths(binary)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_lengths(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot be read: embedded null byte"):
        read_lengths(tmp_path / "a\0b")
