"""An architecture whose logits are made otherwise than our loss makes them is refused; the others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.catalog.models import Model, load, names
from autofit.training.loss_check import why_another_loss
from tests.tiny import COHERE, CTRL, FAMILIES, GEMMA2, GPT2, GRANITE, PHI, model

OURS = [*FAMILIES.values(), COHERE, GRANITE, PHI, GPT2, CTRL]


@pytest.mark.parametrize("known", OURS, ids=lambda known: known.name)
def test_what_is_trained_with_its_own_loss_is_taken(known: Model) -> None:
    assert why_another_loss(known) is None


@pytest.mark.parametrize("name", names())
def test_the_catalog_is_trained_with_its_own_losses(name: str) -> None:
    assert why_another_loss(load(name)) is None


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("hyperclovax", {"logits_scaling": 0.125}),  # a factor there, a divisor in Granite
        ("falcon_h1", {"lm_head_multiplier": 0.3}),
        ("modernbert-decoder", {"pad_token_id": 0}),  # a layer before the head
        ("recurrent_gemma", {"logits_soft_cap": 30.0}),
        ("xlstm", {"output_logit_soft_cap": 30.0}),
        ("roberta", {"is_decoder": True, "pad_token_id": 0}),
    ],
)
def test_what_would_be_trained_with_another_loss_is_refused(model_type: str, fields: dict[str, Any]) -> None:
    reason = why_another_loss(model(model_type, **fields))
    assert reason is not None and "\n" not in reason
    assert f"tiny-{model_type} would be trained with a loss other than its own" in reason
    assert "with random values a loss of" in reason


@pytest.mark.parametrize(
    ("other", "field"),
    [(GEMMA2, "final_logit_softcapping"), (COHERE, "logit_scale"), (GRANITE, "logits_scaling")],
    ids=["softcap", "factor", "divisor"],
)
def test_a_forgotten_field_is_seen(other: Model, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autofit.training.loss_module import LossModule

    whole = LossModule.head

    def forgetful(self: LossModule) -> Any:
        head = whole(self)
        head.softcap, head.scale = None, 1.0
        return head

    monkeypatch.setattr(LossModule, "head", forgetful)
    # Another value than elsewhere: what was found once is not asked again.
    changed = Model(name="x", config={**other.config, field: 30.0}, source="a test", parameters=None)
    assert why_another_loss(changed) is not None


def test_what_cannot_be_compared_is_refused_too() -> None:
    # Its head is narrower than its decoder.
    reason = why_another_loss(model("electra", embedding_size=32, is_decoder=True, pad_token_id=0))
    assert reason is not None and "they cannot be compared, RuntimeError" in reason


def test_nothing_else_is_drawn_from_and_nothing_is_measured_twice() -> None:
    before = torch.get_rng_state()
    fresh = model("llama", tie_word_embeddings=False, rope_theta=12345.0)
    assert why_another_loss(fresh) is None
    cached = why_another_loss.cache_info()
    assert why_another_loss(model("llama", tie_word_embeddings=False, rope_theta=12345.0)) is None
    assert why_another_loss.cache_info().misses == cached.misses
    assert torch.equal(before, torch.get_rng_state())
