"""Whatever architecture of transformers a config.json names, it is trained with its own loss or refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from autofit.catalog import architecture_file
from autofit.catalog.models import Model, shape
from autofit.core.errors import UsageError
from autofit.training.own_logits import why_another_loss

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def named(model_type: str, **fields: Any) -> Model:
    """As a config.json with these fields and no others becomes a model; raises `UsageError` if it does not."""
    text = json.dumps({"model_type": model_type, "num_hidden_layers": 2, **fields})
    config = architecture_file.parse(text, "config.json")
    return Model(name=f"any-{model_type}", config=config, source="config.json", parameters=None)


OTHERWISE = {
    "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "inkling_text", "megatron-bert",
    "modernbert-decoder", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "xlm-roberta", "xlm-roberta-xl", "xlstm", "xmod",
}  # fmt: skip
"""Those whose logits are made otherwise even where the config.json says nothing of it; read in transformers 5.23."""


@pytest.mark.parametrize("model_type", TYPES)
def test_every_architecture_is_taken_or_refused_in_one_line(model_type: str) -> None:
    try:
        model = named(model_type)
        found = shape(model)
    except UsageError as refused:
        assert str(refused).startswith("config.json: ") and "\n" not in str(refused)
        return
    assert found.layers > 0 and found.hidden_size > 0
    assert found.parameters >= found.active_matmul_parameters > 0
    reason = why_another_loss(model)
    assert (reason is not None) == (model_type in OTHERWISE), reason
    assert "\n" not in (reason or "")


def test_heads_that_differ_between_layers_are_counted_layer_by_layer() -> None:
    if "gemma4_text" not in TYPES:
        pytest.skip("this transformers has no Gemma 4")
    dims = {"num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 6}
    found = shape(named("gemma4_text", **dims))  # every sixth layer is a global one
    assert found.attention_width == 8 * (5 * 256 + 512) // 6
    assert found.attention_heads == 8 >= found.key_heads > 0
