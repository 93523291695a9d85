"""The catalog's models are the published ones, and what comes from outside becomes a model or one clear line."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from autofit.catalog.model_shape import drops_out, measure
from autofit.catalog.models import Model, architecture, load, names, notes, shape
from autofit.core.errors import UsageError

NAMES = {
    "smollm2-135m", "smollm2-360m", "smollm2-1.7b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b",
    "qwen2.5-32b", "qwen2.5-72b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
    "qwen3-30b-a3b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b", "mixtral-8x7b",
    "gemma-2-2b", "gemma-2-9b", "gemma-3-270m", "gemma-3-1b", "gemma-3-4b", "phi-4", "olmo-2-7b",
    "pythia-160m",
}  # fmt: skip
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

every_name = pytest.mark.parametrize("name", names())


def written(folder: Path, config: object) -> Path:
    """`config` as the config.json of `folder`."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return file


def refusal(path: object) -> str:
    """The one line with which `load` refuses `path`."""
    with pytest.raises(UsageError) as caught:
        load(str(path))
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_the_catalog_has_the_models() -> None:
    assert set(names()) == NAMES
    assert list(names()) == sorted(names())


@every_name
def test_parameters_are_the_published_count(name: str) -> None:
    model = load(name)
    assert measure(architecture(model), name).parameters == model.parameters


@every_name
def test_entries_say_where_they_come_from(name: str) -> None:
    model = load(name)
    hub_id, _, rest = model.source.partition(", ")
    assert hub_id.count("/") == 1 and rest.startswith("config.json")
    assert model.config["model_type"]
    assert shape(model).vocabulary_size == model.config["vocab_size"]
    assert shape(model).layers == model.config["num_hidden_layers"]


def test_models_differ_and_digests_with_them() -> None:
    assert len({load(name).digest for name in names()}) == len(names())


def test_names_are_found_in_any_case() -> None:
    assert load("Llama-3.1-8B") == load("llama-3.1-8b")


@every_name
def test_the_shape_that_the_catalog_brings_along_is_that_of_the_built_model(name: str) -> None:
    model = load(name)
    assert shape(model) == measure(architecture(model), name)


def test_a_dense_shape() -> None:
    llama = shape(load("llama-3.1-8b"))
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert llama.linear_parameters == 32 * (attention + 3 * 4096 * 14336)
    assert llama.embedding_parameters == 128256 * 4096
    assert not llama.tied_embeddings
    assert llama.active_matmul_parameters == llama.linear_parameters + 128256 * 4096
    assert (llama.hidden_size, llama.attention_width, llama.experts, llama.experts_per_token) == (4096, 4096, 0, 0)
    assert (llama.attention_heads, llama.key_heads) == (32, 8)


def test_a_tied_shape_counts_the_head_once() -> None:
    small = shape(load("qwen3-0.6b"))
    assert small.tied_embeddings
    assert small.active_matmul_parameters == small.linear_parameters + small.embedding_parameters
    assert (small.hidden_size, small.attention_width) == (1024, 16 * 128)


def test_a_mixture_of_experts_shape() -> None:
    mixture = shape(load("qwen3-30b-a3b"))
    assert (mixture.experts, mixture.experts_per_token) == (128, 8)
    assert mixture.expert_parameters == 48 * 128 * 3 * 2048 * 768
    router, head = 48 * 128 * 2048, 151936 * 2048
    chosen = mixture.expert_parameters // 16
    assert mixture.active_matmul_parameters == mixture.linear_parameters + router + head + chosen


@pytest.mark.parametrize(
    ("config", "drops"),
    [
        (TINY, False),
        ({**TINY, "attention_dropout": 0.1}, True),
        ({**TINY, "attention_dropout": 0.0}, False),
        # What the architecture itself does where the file says nothing.
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 512}, True),
        # Other heads than the language model's: GPT-NeoX's for classes drops out, GPT-2's for a summary, too.
        ({"model_type": "gpt_neox", **{k: v for k, v in TINY.items() if k != "model_type"}}, False),
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 512, **NO_DROPOUT}, False),
        ({**TINY, "model_type": "phimoe", "num_local_experts": 2, "router_jitter_noise": 0.01}, True),
    ],
)
def test_dropout_is_told_from_the_config(config: dict[str, Any], drops: bool) -> None:
    model = Model(name="any", config=config, source="here", parameters=None)
    assert drops_out(architecture(model)) is shape(model).dropout is drops


def test_a_shape_is_measured_once() -> None:
    assert shape(load("smollm2-135m")) is shape(load("smollm2-135m"))


def test_architecture_is_fresh_and_does_not_cache() -> None:
    model = load("llama-3.2-1b")
    before = json.dumps(model.config, sort_keys=True)
    first, second = architecture(model), architecture(model)
    assert first.use_cache is False
    assert first is not second
    first.hidden_size = 1
    assert second.hidden_size == 2048
    assert json.dumps(model.config, sort_keys=True) == before


def test_architecture_leaves_out_how_weights_were_stored() -> None:
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4}, "torch_dtype": "float16", "use_cache": True}
    config = architecture(Model(name="tiny", config={**TINY, **stored}, source="here", parameters=None))
    assert getattr(config, "quantization_config", None) is None
    assert config.use_cache is False


def test_the_digest_ignores_what_changes_no_shape() -> None:
    def digest(**changes: object) -> str:
        return Model(name="any", config={**TINY, **changes}, source="here", parameters=None).digest

    plain = digest()
    assert len(plain) == 16 and int(plain, 16) >= 0
    assert digest(transformers_version="4.0", torch_dtype="bfloat16", architectures=["X"], _name_or_path="y") == plain
    assert digest(dtype="float32", bos_token_id=7) == plain
    assert digest(rope_theta=10000) == digest(rope_theta=10000.0) != plain
    assert digest(hidden_size=128) != plain


def test_a_model_is_a_value() -> None:
    model = load("smollm2-135m")
    assert pickle.loads(pickle.dumps(model)) == model
    assert hash(model) == hash(load("smollm2-135m"))
    with pytest.raises(AttributeError):
        model.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("by", ["folder", "file", "relative"])
def test_a_config_file_becomes_a_model(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog_model = load("smollm2-135m")
    extra = {"torch_dtype": "bfloat16", "transformers_version": "4.48.0", "architectures": ["LlamaForCausalLM"]}
    file = written(tmp_path / "my-model", {**catalog_model.config, **extra})
    monkeypatch.chdir(tmp_path)
    path = {"folder": str(file.parent), "file": str(file), "relative": "my-model"}[by]
    model = load(path)
    assert model.name == "my-model"
    assert model.digest == catalog_model.digest
    assert model.parameters is None
    assert shape(model).parameters == catalog_model.parameters


def test_a_file_of_another_name_gives_its_own(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY))
    assert load(str(file)).name == "tiny"


def test_unknown_names_get_the_nearest() -> None:
    assert "did you mean llama-3.1-8b" in refusal("llama3.1-8b")
    assert "valid: " in refusal("gpt-17")
    assert "unknown model ''" in refusal("")


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    marked = load(str(written(tmp_path / "marked", "\N{BYTE ORDER MARK}" + json.dumps(TINY))))
    assert marked.config == load(str(written(tmp_path / "plain", TINY))).config


def test_paths_without_a_config(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere.json")
    assert "no such file" in refusal("./nowhere")
    assert "the folder has no config.json" in refusal(tmp_path)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    binary = tmp_path / "model.safetensors"
    binary.write_bytes(b"\x80\x81\xff" * 100)
    assert "not a text file" in refusal(binary)
    with binary.open("wb") as file:
        file.truncate(11 * 1024**2)
    assert "is not a config.json: its size is 11 MiB" in refusal(binary)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not valid JSON"),
        ("{'model_type': 'llama'}", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1, 2]", "holds a JSON list, not an object"),
        ({"hidden_size": 64}, "has no model_type"),
        ({**TINY, "model_type": 7}, "has no model_type"),
        ({**TINY, "model_type": "llama-9000"}, "does not know the architecture 'llama-9000'"),
        ({"model_type": "t5"}, "t5 has an encoder, and only decoders are trained here"),
        ({"model_type": "bart"}, "bart has an encoder, and only decoders are trained here"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "set is_decoder to true"),
        ({"model_type": "distilbert"}, "distilbert has an encoder, and only decoders are trained here"),
        ({**TINY, "hidden_size": "wide"}, "transformers refuses the config"),
        ({**TINY, "model_type": "x", "auto_map": {"AutoConfig": "configuration_x.XConfig"}}, "auto_map"),
        (
            {"model_type": "gemma3", "text_config": {**TINY, "model_type": "x", "auto_map": {"AutoConfig": "x.X"}}},
            "auto_map",
        ),
        ({"model_type": "qwen2_vl", "vision_config": {}, "hidden_size": 64}, "no text_config"),
        ({"model_type": "llava", "text_config": {"hidden_size": 64}}, "text_config has no model_type"),
        ({"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 64}}, "no causal language model"),
    ],
)
def test_unusable_configs_get_one_clear_line(content: object, says: str, tmp_path: Path) -> None:
    file = written(tmp_path, content)
    message = refusal(file)
    assert says in message
    assert str(file) in message


def test_code_beside_a_config_is_never_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (tmp_path / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w').close()")
    written(tmp_path, {**TINY, "model_type": "x", "auto_map": {"AutoConfig": "configuration_x.XConfig"}})
    assert "never executed" in refusal(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("auto_map", [{}, {"AutoConfig": "configuration_x.XConfig"}])
def test_an_architecture_that_transformers_has_needs_no_code(auto_map: dict[str, str], tmp_path: Path) -> None:
    """Repositories keep the code of architectures that transformers has taken over since."""
    marker = tmp_path / "executed"
    (tmp_path / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w').close()")
    written(tmp_path, {**TINY, "auto_map": auto_map})
    model = load(str(tmp_path))
    assert shape(model).hidden_size == 64 and architecture(model).hidden_size == 64
    assert not marker.exists()


@pytest.mark.parametrize(
    ("adapters", "says"),
    [
        ('{"base_model_name_or_path": "acme/base"}', "adapters of acme/base"),
        ("{", "no config.json"),
        ("[]", "no config"),
    ],
)
def test_a_folder_of_adapters_names_their_base(adapters: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(adapters)
    assert says in refusal(tmp_path)


def test_a_gguf_file_is_no_architecture(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    assert "is a GGUF file" in refusal(file)


def test_a_decoder_that_cannot_be_loaded_may_have_the_sizes_of_one_that_can(tmp_path: Path) -> None:
    sizes = {key: value for key, value in load("qwen2.5-7b").config.items() if isinstance(value, int)}
    written(tmp_path, {**sizes, "model_type": "qwen2_vl", "vision_config": {}})
    assert refusal(tmp_path).endswith("--model qwen2.5-7b")
    written(tmp_path, {**sizes, "num_hidden_layers": 5, "model_type": "qwen2_vl", "vision_config": {}})
    assert "--model" not in refusal(tmp_path)


def test_what_transformers_warns_of_is_not_said(tmp_path: Path) -> None:
    """Here that a field of the rotation is odd."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    rope |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
    written(tmp_path, {**TINY, "rope_parameters": rope})
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger, level = logging.getLogger("transformers"), logging.getLogger("transformers").level
    logger.addHandler(handler)
    try:
        model = load(str(tmp_path))
        shape(model)
        assert (said, logger.level) == ([], level)
        CONFIG_MAPPING["llama"].from_dict(dict(model.config))
        assert said
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**TINY, "architectures": ["LlamaForCausalLM"]}, None),
        ({**TINY, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "mistral3", "text_config": TINY, "architectures": ["MForConditionalGeneration"]}, "text model"),
        ({**TINY, "quantization_config": {"quant_method": "gptq"}}, "quantised (gptq)"),
        ({"model_type": "mistral3", "text_config": TINY, "quantization_config": {"quant_method": "fp8"}}, "(fp8)"),
    ],
)
def test_what_is_left_out_of_a_file_is_noted(config: object, says: str | None, tmp_path: Path) -> None:
    found = notes(load(str(written(tmp_path, config))))
    assert len(found) == (says is not None) and all(str(says) in note for note in found)


def test_fields_that_contradict_each_other_are_refused_when_built(tmp_path: Path) -> None:
    written(tmp_path, {**TINY, "pad_token_id": 9999})
    with pytest.raises(UsageError, match="no model can be built from it") as caught:
        shape(load(str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ({"num_hidden_layers": 0}, "it has 0 layers"),
        ({"num_hidden_layers": 10**8}, "it has 100,000,000 layers; at most 10,000 are supported"),
        ({"vocab_size": 0}, "it has 0 tokens in its vocabulary"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_model_that_nobody_means_is_refused(size: dict[str, int], says: str, tmp_path: Path) -> None:
    written(tmp_path, {**TINY, **size})
    with pytest.raises(UsageError, match=f"no model can be built from it: {says}"):
        shape(load(str(tmp_path)))


def test_of_a_vision_language_model_the_text_model_is_taken(tmp_path: Path) -> None:
    text = {key: value for key, value in load("gemma-3-1b").config.items() if key != "model_type"}
    written(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 32}})
    model = load(str(tmp_path))
    assert model.config["model_type"] == "gemma3_text"
    assert shape(model).parameters == load("gemma-3-1b").parameters


def test_what_the_whole_says_of_tied_embeddings_holds_for_the_text_model(tmp_path: Path) -> None:
    text = {**TINY, "model_type": "mistral"}
    untied = written(tmp_path / "untied", {"model_type": "mistral3", "text_config": text})
    tied = written(tmp_path / "tied", {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": True})
    assert not shape(load(str(untied))).tied_embeddings
    assert shape(load(str(tied))).tied_embeddings


def test_the_catalog_needs_no_heavy_import() -> None:
    code = (
        "import sys; from autofit.catalog.models import load, names; [load(name).digest for name in names()];"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
