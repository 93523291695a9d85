"""A config.json is untrusted input: it is read and checked here, and reduced to the text model's fields or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.catalog.quiet import errors_only
from autofit.core.errors import UsageError, lines_of
from autofit.core.units import MIB, format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def is_path(name: str) -> bool:
    """Whether `name` is a file-system path: it exists, or is written as only a path can be."""
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        return True
    return "\0" not in name and os.path.exists(name)


def find(path: Path) -> Path:
    """The config.json at `path` (the file or its folder); raises `UsageError` if there is none."""
    try:
        if path.is_dir():
            path = path / "config.json"
        if path.is_file():
            return path
    except (OSError, ValueError) as error:
        raise UsageError(f"model path {str(path)!r} cannot be used: {error}") from error
    raise UsageError(f"model path {str(path)!r}: {_problem(path)}")


def _problem(path: Path) -> str:
    """Why there is no config.json at `path`, which is no file."""
    if not (path.parent.is_dir() and path.name == "config.json"):
        return "no such file"
    try:
        base = json.loads(read(path.with_name("adapter_config.json")))["base_model_name_or_path"]
        return f"the folder holds adapters of {base}: name that"
    except (UsageError, ValueError, RecursionError, LookupError, TypeError):
        return "the folder has no config.json"


def read(file: Path) -> str:
    """The text of `file`; raises `UsageError` if it cannot be read, is not text, or is too large for a config.json."""
    if file.suffix.lower() == ".gguf":
        raise UsageError(f"{file} is a GGUF file: give the folder of the model that it was made from")
    try:
        size = file.stat().st_size
        if size > 10 * MIB:  # real ones take kilobytes, but their folders also contain weights
            raise UsageError(f"{file} is not a config.json: its size is {format_bytes(size)}")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not a config.json: not a text file") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error


def parse(text: str, origin: str) -> dict[str, Any]:
    """The fields of the text model that the config.json `text` describes; `origin` names it in errors. Raises
    `UsageError` if it is not a JSON object, lacks `model_type`, names an architecture for which transformers has no
    causal language model of decoders alone. Code of a repository (`auto_map`) is never executed."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin} is not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{origin} is not a config.json: it holds a JSON {type(config).__name__}, not an object")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UsageError(f"{origin} has no model_type, so its architecture is unknown")
    text_model = _text_model(config, model_type, origin)
    _check_known(text_model["model_type"], text_model, origin)
    _check_decoder(text_model, origin)
    return text_model


@errors_only()
def built(config: Mapping[str, Any], origin: str) -> PretrainedConfig:
    """The transformers config with these fields, `use_cache` off; raises `UsageError` if transformers refuses them."""
    from transformers import CONFIG_MAPPING

    try:
        built_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    except Exception as error:
        # Each config class raises its own exceptions on validation, so no list of them would be complete.
        raise UsageError(f"{origin}: transformers refuses the config: {' '.join(lines_of(error))}") from error
    built_config.use_cache = False
    return built_config


def _text_model(config: dict[str, Any], model_type: str, origin: str) -> dict[str, Any]:
    """`config` itself or, for a multimodal model, the part that describes its language model."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        if "vision_config" in config:
            raise UsageError(f"{origin} ({model_type}) describes no separate text model: it has no text_config")
        return config
    text = dict(text)
    text.setdefault("model_type", _default_text_type(model_type))
    if not text["model_type"]:
        raise UsageError(f"{origin}: its text_config has no model_type, so the text model is unknown")
    # Whether input and output embeddings are tied is often stated only at the top level.
    if "tie_word_embeddings" in config:
        text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    # What is stored is the whole model.
    return {**text, **{key: config[key] for key in ("architectures", "quantization_config") if key in config}}


def _default_text_type(model_type: str) -> str:
    """The type of text model that transformers assumes for `model_type` if the file names none; empty if unknown."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return ""
    part = CONFIG_MAPPING[model_type].sub_configs.get("text_config")
    return str(getattr(part, "model_type", ""))


def _check_known(model_type: str, config: Mapping[str, Any], origin: str) -> None:
    import transformers

    if model_type in transformers.CONFIG_MAPPING:
        return
    reason = f"transformers {transformers.__version__} does not know the architecture {model_type!r}"
    if config.get("auto_map"):
        reason = f"it asks for code from its repository (auto_map), which is never executed, and {reason}"
    raise UsageError(f"{origin}: {reason}")


def _check_decoder(config: Mapping[str, Any], origin: str) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    model_type, fields = config["model_type"], built(config, origin)
    is_causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    wrong = None
    if fields.is_encoder_decoder:
        wrong = "set is_encoder_decoder to false"
    elif model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (is_causal and getattr(fields, "is_decoder", True)):
        wrong = "set is_decoder to true"
    if wrong is not None:
        remedy = f" (if this one has none, {wrong} in a copy of the file)" if is_causal else ""
        raise UsageError(f"{origin}: {model_type} has an encoder, and only decoders are trained here{remedy}")
    if not is_causal:
        raise UsageError(f"{origin}: transformers has no causal language model of the architecture {model_type!r}")
