"""Whatever architecture of transformers a config.json names, it is trained with its own loss or refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from autofit.catalog import architecture_file
from autofit.catalog.architecture_file import built
from autofit.catalog.models import Model, shape
from autofit.core.errors import UsageError
from autofit.training.decoder import decoder_layers, keep_layers
from autofit.training.loss_check import why_another_loss

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
        result = shape(model)
    except UsageError as refused:
        assert str(refused).startswith("config.json: ") and "\n" not in str(refused)
        return
    assert result.layers > 0 and result.hidden_size > 0
    assert result.parameters >= result.active_matmul_parameters > 0
    reason = why_another_loss(model)
    assert (reason is not None) == (model_type in OTHERWISE), reason
    assert "\n" not in (reason or "")


def test_heads_that_differ_between_layers_are_counted_layer_by_layer() -> None:
    if "gemma4_text" not in TYPES:
        pytest.skip("this transformers has no Gemma 4")
    dims = {"num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 6}
    result = shape(named("gemma4_text", **dims))  # every sixth layer is a global one
    assert result.attention_width == 8 * (5 * 256 + 512) // 6
    assert result.attention_heads == 8 >= result.key_heads > 0


@pytest.mark.parametrize(
    ("model_type", "fields", "experts", "per_token"),
    [
        ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 8, "moe_topk": [2, 2]}, 8, 2),  # a value for each layer
        ("dbrx", {"attn_config": {"rope_theta": 1e4}, "ffn_config": {"moe_num_experts": 4, "moe_top_k": 1}}, 4, 1),
    ],
)
def test_experts_are_counted_wherever_an_architecture_states_them(
    model_type: str, fields: dict[str, Any], experts: int, per_token: int
) -> None:
    if model_type not in TYPES:
        pytest.skip(f"this transformers has no {model_type}")
    result = shape(named(model_type, **fields))
    assert (result.experts, result.experts_per_token) == (experts, per_token)
    assert 0 < result.expert_parameters < result.parameters


def test_what_embeddings_of_every_layer_look_up_is_not_multiplied() -> None:
    if "gemma3n_text" not in TYPES:
        pytest.skip("this transformers has no Gemma 3n")
    dims = {"hidden_size_per_layer_input": 64, "num_hidden_layers": 5, "num_kv_shared_layers": 0}
    few, many = (shape(named("gemma3n_text", **dims, vocab_size_per_layer_input=n)) for n in (1000, 2000))
    assert many.parameters - few.parameters == 1000 * 64 * few.layers
    assert many.active_matmul_parameters == few.active_matmul_parameters


@pytest.mark.parametrize(
    ("model_type", "fields", "full", "sliding", "window"),
    [
        ("llama", {}, 2, 0, 0),
        ("mistral", {"sliding_window": 128}, 0, 2, 128),
        ("mistral", {"sliding_window": 128, "per_layer_config": {0: {"sliding_window": None}}}, 1, 1, 128),
        ("gemma3_text", {"num_hidden_layers": 6, "sliding_window": 512}, 1, 5, 512),
        ("qwen3_next", {"num_hidden_layers": 4}, 1, 0, 0),  # the others have linear attention
        ("mamba2", {}, 0, 0, 0),
    ],
)
def test_layers_are_told_apart_by_what_their_tokens_attend_to(
    model_type: str, fields: dict[str, Any], full: int, sliding: int, window: int
) -> None:
    if model_type not in TYPES:
        pytest.skip(f"this transformers has no {model_type}")
    result = shape(named(model_type, **fields))
    assert (result.full_attention_layers, result.sliding_layers, result.sliding_window) == (full, sliding, window)


def test_keys_wider_than_values_count_by_their_mean_width() -> None:
    dims = {"num_attention_heads": 4, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
    assert shape(named("deepseek_v3", **dims)).attention_width == 4 * 24


def test_of_an_encoder_with_a_decoder_the_decoder_alone_is_not_taken() -> None:
    with pytest.raises(UsageError, match="bart has an encoder, and only decoders are trained here"):
        named("bart")


@pytest.mark.parametrize(
    ("model_type", "field", "fields"),
    [
        ("qwen3_next", "layer_types", {"num_hidden_layers": 4}),
        ("falcon_h1", "layers_block_type", {"num_hidden_layers": 4}),
        ("bamba", "layers_block_type", {"num_hidden_layers": 4, "attn_layer_indices": [2]}),
        ("jamba", "layers_block_type", {"num_hidden_layers": 8}),
    ],
)
def test_layers_that_are_kept_keep_their_types(model_type: str, field: str, fields: dict[str, Any]) -> None:
    """Also where a config computes them from the number of layers."""
    if model_type not in TYPES:
        pytest.skip(f"this transformers has no {model_type}")
    config = built(named(model_type, **fields).config, "config.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    every = list(getattr(config, field))
    keep_layers(model, [2, 3])
    assert list(getattr(config, field)) == every[2:4]
    assert config.num_hidden_layers == len(decoder_layers(model)) == 2
