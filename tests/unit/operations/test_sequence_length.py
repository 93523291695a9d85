"""The longest sequences that a config can train on: the longest that fits, and not one step more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.operations.made_trials import OPTIONS

from autofit.cli.text.predicted import longest_text
from autofit.core.lengths import Lengths
from autofit.core.units import GIB
from autofit.operations.sequence_length import STEP, longest_sequence
from autofit.prediction.estimation import Estimation
from autofit.techniques import complete

L4 = "l4"


def test_one_step_more_has_no_room() -> None:
    """Also where memory grows with the square of the length."""
    config = complete({"method": "lora", "micro_batch": 1, "attention": "eager"})
    tried: list[int] = []
    limit = 8 * GIB
    result = longest_sequence(OPTIONS, config, memory_limit_bytes=limit, report=tried.append, hardware=L4)
    assert result.estimate.likely_fits and result.seq_len % STEP == 0 and result.seq_len < result.most == 8192
    assert tried == list(range(1, len(tried) + 1)) and len(tried) <= 12
    more = replace(OPTIONS, seq_len=result.seq_len + STEP)
    assert not Estimation.of(more, config, memory_limit_bytes=limit, hardware=L4).estimate().likely_fits
    assert result.to_json()["seq_len"] == result.seq_len
    needed = result.estimate.device_bytes
    limits = (needed * percent // 100 for percent in range(101, 400))
    by_certainty = {e.certainty: e for limit in limits if (e := replace(result.estimate, memory_limit_bytes=limit))}
    for certainty, fit in (("sure", "fit"), ("likely", "likely fit")):
        text = longest_text(replace(result, estimate=by_certainty[certainty]))
        assert text.startswith(f"{result.seq_len:,} tokens are the longest sequences that {fit} l4\n\n{fit}s l4: ")


def test_no_longer_than_the_models_positions_or_the_users_data() -> None:
    config = complete({"method": "lora", "micro_batch": 1, "checkpointing": "full", "loss": "chunked"})
    whole = longest_sequence(OPTIONS, config, hardware=L4)
    assert (whole.seq_len, whole.most) == (8192, 8192)
    assert longest_text(whole).startswith("8,192 tokens fit, and none are longer")
    of_data = longest_sequence(replace(OPTIONS, lengths=Lengths.of([100, 300, 1000])), config, hardware=L4)
    assert (of_data.seq_len, of_data.most) == (1000, 1000)


@pytest.mark.parametrize(("mlp", "shortest"), [("whole", STEP), ("tiled", 5 * STEP)])
def test_where_nothing_fits_the_shortest_is_shown(mlp: str, shortest: int) -> None:
    """With MLPs in tiles, the shortest that has two: the model is 576 wide."""
    config = complete({"method": "full", "micro_batch": 1, "mlp": mlp})
    result = longest_sequence(OPTIONS, config, memory_limit_bytes=GIB, hardware=L4)
    assert (result.seq_len, result.estimate.likely_fits, result.to_json()["seq_len"]) == (shortest, False, None)
    assert longest_text(result).startswith(f"not even sequences of {shortest} tokens are sure to fit l4")
