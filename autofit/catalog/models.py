"""From names to architectures: from the catalog, a config.json, or the hub; no weights are ever read."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.catalog import architecture_file, hub
from autofit.catalog.answer_cache import cached_answer
from autofit.catalog.model_shape import ModelShape, measure
from autofit.core.document import Document
from autofit.core.errors import EnvironmentLacks, UsageError, unknown
from autofit.core.workload import digest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STORAGE_KEYS = frozenset(
    {
        "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "auto_map", "dtype",
        "quantization_config", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Keys of a config.json that say how weights were stored or loaded; not part of the architecture that is built."""
VOLATILE_KEYS = STORAGE_KEYS | {"bos_token_id", "cache_implementation", "eos_token_id"}
"""Keys on which no shape in a training step depends, and which the digest therefore leaves out: the above, and those
for text generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Document):
    """A causal language model's architecture. A value: equal configs have equal digests, whatever their source."""

    name: str
    """Catalog name, hub id, or the name of the folder or file that held the config.json."""
    config: Mapping[str, Any] = field(hash=False)
    """The architecture's fields as in config.json, including `model_type`; must not be modified."""
    source: str
    """Where the fields come from: `<hub id or folder>, <file name>`."""
    parameters: int | None
    """Published number of distinct parameters, a tied embedding counted once; None if none is published."""
    digest: str = field(init=False, compare=False)
    """That of `config` without volatile keys. Computed once: it is asked for many times for every config of a
    lattice."""

    def __post_init__(self) -> None:
        stable = {key: _canonical(value) for key, value in self.config.items() if key not in VOLATILE_KEYS}
        object.__setattr__(self, "digest", digest(stable))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object: the constructor's arguments."""
        return {"name": self.name, "config": dict(self.config), "source": self.source, "parameters": self.parameters}


@cache
def names() -> tuple[str, ...]:
    """Every name of the catalog, sorted."""
    entries = resources.files("autofit.catalog").joinpath("models").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")))


def listing() -> list[dict[str, Any]]:
    """The models of the catalog with what a user chooses by, as JSON values."""
    entries = {name: _entry(name) for name in names()}
    return [
        {"name": name, "parameters": entry["parameters"], "source": entry["source"], "note": entry.get("note")}
        for name, entry in entries.items()
    ]


def load(name: str) -> Model:
    """The model for a catalog name (case-insensitive), a config.json or its folder, or a hub id; tried in that order.

    Raises `UsageError` for an unknown name, and as `architecture_file.parse` does; `EnvironmentLacks` if the hub denies
    access or cannot be reached, unless the catalog has a model with that hub id, which is then returned.
    """
    if name.lower() in names():
        return _of_catalog(name.lower())
    if architecture_file.is_path(name):
        return _of_path(Path(name).expanduser())
    if name.count("/") == 1 and all(name.split("/")):
        return _of_hub(name)
    raise unknown("model", name, names())


def architecture(model: Model) -> PretrainedConfig:
    """A fresh transformers config of the model, with `use_cache` off. Raises `UsageError` if transformers refuses the
    fields."""
    fields = {key: value for key, value in model.config.items() if key not in STORAGE_KEYS}
    return architecture_file.built(copy.deepcopy(fields), model.source)


def quantisation(model: Model) -> Mapping[str, Any]:
    """How the checkpoint's weights are quantised (`quantization_config`); empty where they are not."""
    stored = model.config.get("quantization_config")
    return stored if isinstance(stored, Mapping) else {}


def notes(model: Model) -> tuple[str, ...]:
    """What figures of the model leave out of what its file describes, one sentence each."""
    note = _entry(model.name).get("note") if in_catalog(model) else None
    found = [] if note is None else [note]
    architectures = model.config.get("architectures")
    stored_as = architectures[0] if isinstance(architectures, list) and architectures else ""
    if re.search(r"For(?!CausalLM)[A-Z]", str(stored_as)):
        what = "its text model alone is" if "ConditionalGeneration" in stored_as else "a causal language model is"
        found.append(f"the file is of a {stored_as}: {what} counted")
    if stored := quantisation(model):
        method = stored.get("quant_method", "bitsandbytes")
        found.append(f"the checkpoint is quantised ({method}): its weights count as 16-bit ones unless method=qlora")
    return tuple(found)


def positions(model: Model) -> int | None:
    """The longest sequence that the architecture supports, in tokens; None if it sets no limit. Where the config does
    not name it so, transformers' config class knows other names and defaults. Raises `UsageError` as `architecture`."""
    stated = model.config.get("max_position_embeddings")
    # transformers takes seconds to import, and an answer from the store need not wait for that.
    longest = stated if stated is not None else getattr(architecture(model), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def shape(model: Model) -> ModelShape:
    """The model's architecture in numbers. For models in the catalog it is stored there; for any other, the first call
    on a machine imports torch and builds the model on the meta device. Raises `UsageError` if it cannot be built."""
    if model.digest not in _SHAPES:
        if in_catalog(model):
            entry = _entry(model.name)
            said = {field: entry["config"].get(key) for field, key in _IN_CONFIG.items()}
            counts = {**said, "parameters": entry["parameters"], **entry["shape"]}
        else:
            text = json.dumps([list(ModelShape.__dataclass_fields__), dict(model.config)], sort_keys=True)
            counts = cached_answer("shape", text, lambda: asdict(measure(architecture(model), model.source)))
        _SHAPES[model.digest] = ModelShape(**counts)
    return _SHAPES[model.digest]


def in_catalog(model: Model) -> bool:
    """Whether the model is exactly the one in the catalog under its name."""
    return model.name in names() and _of_catalog(model.name).digest == model.digest


_SHAPES: dict[str, ModelShape] = {}
_IN_CONFIG = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "vocabulary_size": "vocab_size",
    "attention_heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
}
"""Fields of a shape -> fields of the config that say the same: an entry of the catalog does not repeat them."""
_SIZE = re.compile(r"(?<![a-z0-9.])(?:\d+x)?\d+(?:\.\d+)?[bm](?![a-z0-9])")
"""A number of parameters in a model's name: 8b, 0.5b, 8x7b, 135m."""
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""The fields of a config that say how large a decoder is."""


@cache
def _of_catalog(name: str) -> Model:
    entry = _entry(name)
    return Model(name=name, config=entry["config"], source=entry["source"], parameters=entry["parameters"])


@cache
def _entry(name: str) -> dict[str, Any]:
    file = resources.files("autofit.catalog").joinpath("models", f"{name}.json")
    entry: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return entry


def _of_path(path: Path) -> Model:
    file = architecture_file.find(path)
    config = _parsed(architecture_file.read(file), str(file))
    # The name config.json says nothing about the model; its folder is named after it.
    holder = file.resolve()
    name = holder.parent.name if holder.name == "config.json" else holder.stem
    return Model(name=name or str(path), config=config, source=f"{file.parent}, {file.name}", parameters=None)


def _of_hub(hub_id: str) -> Model:
    try:
        text = hub.config_text(hub_id)
    except EnvironmentLacks as error:
        catalog_name = next((n for n in names() if _of_catalog(n).source.split(",")[0].lower() == hub_id.lower()), None)
        if catalog_name is not None:
            return _of_catalog(catalog_name)
        matches = _named_like(hub_id.rsplit("/", 1)[-1].lower())
        hint = f"; or name what it is built like: --model {' or --model '.join(matches)}" if matches else ""
        raise EnvironmentLacks(error.message, remedy=f"{error.remedy}{hint}") from error
    source = f"{hub_id}, config.json"
    return Model(name=hub_id, config=_parsed(text, source), source=source, parameters=None)


def _named_like(name: str) -> list[str]:
    """The catalog's models of the size in a hub id's `name` with a similar one, or of a family that it has in it."""
    of_its_size = [n for n in names() if _SIZE.findall(n) and _SIZE.findall(n) == _SIZE.findall(name)]
    of_its_family = [n for n in of_its_size if re.split(r"[\d-]", n)[0] in name]
    return difflib.get_close_matches(name, of_its_size, n=2, cutoff=0.5) or of_its_family


def _parsed(text: str, origin: str) -> dict[str, Any]:
    """The answer of `architecture_file.parse`, which asks transformers, from the cache if it is there."""
    try:
        return cached_answer("text model", text, lambda: architecture_file.parse(text, origin))
    except UsageError as error:
        if like := _built_like(text):
            raise UsageError(f"{error}; its decoder has the sizes of {like}: --model {like}") from error
        raise


def _built_like(text: str) -> str | None:
    """The catalog's model whose decoder has the sizes that the config.json `text` states; None if there is none."""
    with suppress(ValueError, RecursionError, AttributeError):
        config = json.loads(text)
        config = config.get("text_config") or config
        for name in names():
            if all(value == config.get(key) for key, value in _of_catalog(name).config.items() if key in _SIZES):
                return name
    return None


def _canonical(value: Any) -> Any:
    """`value` with integral floats as integers: 10000.0 and 10000 are the same number, and configs use both."""
    if isinstance(value, Mapping):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
