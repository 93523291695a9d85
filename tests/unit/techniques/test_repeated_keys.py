"""attention=efficient: sdpa with keys and values repeated for the heads that share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.catalog.models import Model
from autofit.core.lattice import Value
from autofit.estimate.estimator import Estimator
from autofit.estimate.time.guessed_rates import prior
from autofit.prediction.estimation import site as catalog_site
from tests.tiny import LLAMA, accumulate, built, config, gradients, job, model, relative_error, rows

WINDOWED = model("mistral", sliding_window=4)
"""Its mask has transformers repeat keys by itself."""


@pytest.mark.parametrize("tiny", [LLAMA, WINDOWED], ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("more", [{}, {"checkpointing": "save-attention"}, {"method": "lora"}], ids=str)
def test_repeated_keys_train_as_shared_ones_do(tiny: Model, more: dict[str, Value]) -> None:
    plain = config(precision="fp32", attention="sdpa", micro_batch=2, **more)
    steps = [built(plain, tiny), built(plain.replace(attention="efficient"), tiny)]
    losses = [accumulate(step, rows()) for step in steps]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert relative_error(gradients(steps[1]), gradients(steps[0])) < 1e-6


def test_a_model_trained_so_still_writes_as_it_did() -> None:
    """A token at a time attends to all before it."""
    written = []
    for attention in ("sdpa", "efficient"):
        torch.manual_seed(1)
        whole: Any = built(config(precision="fp32", attention=attention), LLAMA).module.model
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        written.append(whole.eval().generate(rows()[:1, :4], **options))
    assert written[0].equal(written[1])


def test_a_trace_of_a_t4_has_the_kernel_that_keeps_no_scores() -> None:
    t4 = catalog_site("t4")[0]
    estimator = Estimator(job(hardware=t4, seq_len=512), prior(t4))
    wide, narrow = (
        estimator.estimate(
            config(precision="fp16-mixed", attention=attention, micro_batch=2), memory_limit_bytes=t4.memory_bytes
        )
        for attention in ("sdpa", "efficient")
    )
    scores = 2 * LLAMA.config["num_attention_heads"] * 512**2 * 2  # of one layer, in 16 bits
    assert wide.peak_allocated_bytes - narrow.peak_allocated_bytes > LLAMA.config["num_hidden_layers"] * scores
    assert narrow.tokens_per_second and wide.tokens_per_second and narrow.tokens_per_second > wide.tokens_per_second


@pytest.mark.parametrize(("attention", "repeated"), [("sdpa", False), ("efficient", True)])
def test_torch_is_given_a_key_for_every_head(attention: str, repeated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no mask, beside which it would have one kernel fewer."""
    attend, given = torch.nn.functional.scaled_dot_product_attention, []

    def seen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        given.append((query.shape[1], key.shape[1], value.shape[1], options["attn_mask"], options["is_causal"]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    accumulate(built(config(attention=attention), LLAMA), rows())
    heads, keys = LLAMA.config["num_attention_heads"], LLAMA.config["num_key_value_heads"]
    assert heads > keys
    shared = heads if repeated else keys
    assert set(given) == {(heads, shared, shared, None, True)}
