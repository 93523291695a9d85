"""A file's keys, each read as the type that it must have; what is left over is named, never ignored in silence."""

from __future__ import annotations

import difflib
import json
import os.path
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from autofit.core.errors import UsageError
from autofit.trainers.run import NotCounted, UnknownKey, Where

_PEFT_CHOOSES = "peft chooses, mostly q and v projections; targets=attention stands for them"
"""Where no modules are named (peft, utils/constants.py)."""
_TAKE_TEXT = ("deepspeed", "fsdp_config", "accelerator_config", "gradient_checkpointing_kwargs")
"""Keys whose settings a file may hold as JSON text or, but for the last, in a file of their own."""
_UNSET: tuple[object, ...] = (None, False, 0, "", [], {})
"""Values of a key that are as good as none."""
EFFECTS = ("more", "less", "unknown")
"""What a key that is not counted may do to memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """The keys that a trainer has."""

    read: frozenset[str]
    """Keys that decide the config or the workload."""
    irrelevant: frozenset[str]
    not_counted: Mapping[str, tuple[str, str]]
    """Key -> its effect on memory if it is set, and what it is."""

    @property
    def all(self) -> frozenset[str]:
        return self.read | self.irrelevant | self.not_counted.keys()


@cache
def known_keys(trainer: str) -> KnownKeys:
    """The keys of a trainer, with those that it inherits, as `known_keys.yaml` lists them."""
    import yaml

    sections = yaml.safe_load(
        resources.files("autofit.trainers").joinpath("known_keys.yaml").read_text(encoding="utf-8")
    )
    section = sections[trainer]
    chain = [section, *([sections[section["inherits"]]] if "inherits" in section else [])]
    not_counted = {
        key: (effect, what) for part in chain for effect in EFFECTS for key, what in part.get(effect, {}).items()
    }
    return KnownKeys(
        read=frozenset(key for part in chain for key in part["read"]),
        irrelevant=frozenset(key for part in chain for key in part["irrelevant"]),
        not_counted=not_counted,
    )


class Keys:
    """The keys of one file. A key whose value is null is not set, as in every trainer."""

    def __init__(self, values: Mapping[str, Any], trainer: str) -> None:
        self._values = values
        self._trainer_keys = known_keys(trainer)
        self.assumed: list[str] = []
        self.notes: list[str] = []
        self._not_counted: list[NotCounted] = []
        self._unknown: list[UnknownKey] = []

    def value(self, name: str) -> Any:
        """The value as it is in the file; None where it is not set."""
        assert name in self._trainer_keys.read, f"{name} is not among the keys that are read"
        return self._values.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false. Raises `UsageError`, as the others do, for a value of another type."""
        value = self.value(name)
        words = {"true": True, "false": False, "yes": True, "no": False, "auto": True}
        parsed = value if isinstance(value, bool) else words.get(str(value).lower())
        if value is not None and parsed is None:
            raise _wrong(name, value, "true or false")
        return default if parsed is None else parsed

    def count(self, name: str, default: int) -> int:
        """A whole number of at least 1; a default that decides is added to `assumed`."""
        value = self.value(name)
        if value is None:
            self.assumed.append(f"{name} is {default} unless it is set")
            return default
        number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 12 else value
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise _wrong(name, value, "a whole number of at least 1")
        return number

    def fraction(self, name: str, default: float) -> float:
        """A number from 0 to 1."""
        value = default if self.value(name) is None else self.value(name)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise _wrong(name, value, "a number") from None
        if isinstance(value, bool) or not 0.0 <= number < 1.0:
            raise _wrong(name, value, "a number of at least 0 and below 1")
        return number

    def text(self, name: str) -> str | None:
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, value, "text")
        return value or None

    def names(self, name: str) -> list[str]:
        """A list of names, which some trainers also take as one text with commas."""
        value = self.value(name) or []
        listed = value.split(",") if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise _wrong(name, value, "a list of names")
        return [item.strip() for item in listed if item.strip()]

    def targets(self, name: str, default: Sequence[str] = ()) -> str:
        """The value of `targets` that stands for a list of modules; how the list differs goes to `not_counted`."""
        modules = self.names(name) or default
        if not modules:
            self.count_not(name, "less", _PEFT_CHOOSES)
            return "attention"
        targets, differs = _targets_of(modules)
        if differs is not None:
            self.count_not(name, "less", f"{differs}; targets={targets} stands for it")
        return targets

    def mapping(
        self, name: str, allowed: Collection[str] | None = None, where: Where | None = None
    ) -> Mapping[str, Any]:
        """The mapping under a key, as `settings_of` reads it; keys in it that are not `allowed` are listed as
        unknown."""
        value = self.value(name) or {}
        settings = settings_of(name, value, where)
        if settings is None:
            raise _wrong(name, value, "a mapping of keys" + ("" if where is None else ", or a JSON file that is here"))
        if allowed is not None:
            self._unknown += [_unknown(inner, allowed, f"{name}.") for inner in settings if inner not in allowed]
        return settings

    def one_of(self, name: str, meanings: Mapping[str, Any], value: str) -> Any:
        """What `value`, the file's or its default, stands for; raises `UsageError` with the nearest for another."""
        if value not in meanings:
            matches = difflib.get_close_matches(value, meanings, n=2, cutoff=0.5) or sorted(meanings)[:8]
            raise UsageError(f"{name} is {value!r}: autofit knows {' and '.join(matches)}")
        return meanings[value]

    def is_null(self, name: str) -> bool:
        """Whether the file has the key and leaves it empty, which means something of its own for a few."""
        return name in self._values and self.value(name) is None

    def assume(self, sentence: str) -> None:
        self.assumed.append(sentence)

    def note(self, sentence: str) -> None:
        """Say what else the user must know of how the file is read."""
        self.notes.append(sentence)

    def has_set(self, *beginnings: str) -> bool:
        """Whether the file sets a key that begins so."""
        return any(key.startswith(beginnings) and value not in _UNSET for key, value in self._values.items())

    def count_not(self, key: str, effect: str, because: str) -> None:
        """Say that something the file asks for is not part of any estimate."""
        self._not_counted.append(NotCounted(key=key, effect=effect, because=because))

    @property
    def ray_workers(self) -> int | None:
        """The ranks that a trainer asks of Ray; None where it does not."""
        return None if self.value("ray_num_workers") is None else self.count("ray_num_workers", 1)

    @property
    def not_counted(self) -> tuple[NotCounted, ...]:
        """What readers have reported, and every key that is set and known to be outside of estimates."""
        known = self._trainer_keys.not_counted
        set_keys = [k for k, v in self._values.items() if k in known and v not in _UNSET]
        listed = (NotCounted(key=key, effect=known[key][0], because=known[key][1]) for key in set_keys)
        return (*self._not_counted, *listed)

    @property
    def unknown(self) -> tuple[UnknownKey, ...]:
        """Keys that the trainer does not have."""
        unknown = [_unknown(key, self._trainer_keys.all) for key in self._values if key not in self._trainer_keys.all]
        return (*unknown, *dict.fromkeys(self._unknown))


def _unknown(key: str, candidates: Collection[str], above: str = "") -> UnknownKey:
    matches = difflib.get_close_matches(str(key), sorted(candidates), n=2, cutoff=0.7)
    return UnknownKey(key=f"{above}{key}", nearest=tuple(above + name for name in matches))


def _wrong(name: str, value: object, expected: str) -> UsageError:
    return UsageError(f"{name} is {value!r}: it must be {expected}")


def _targets_of(modules: Sequence[str]) -> tuple[str, str | None]:
    """The value of `targets` that is nearest to a list of modules, and how the list differs from it; None if it does
    not. Names are those of Llama and its heirs, and the fused ones of Phi-3."""
    names = {module.rsplit(".", 1)[-1] for module in modules}
    if names & {"all-linear", "all"}:
        return "all-linear", None
    all_attention = names >= {"q_proj", "k_proj", "v_proj", "o_proj"} or names >= {"qkv_proj", "o_proj"}
    if names <= {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query_key_value"}:
        return "attention", None if all_attention else "not every projection of attention is adapted"
    all_mlp = names >= {"gate_proj", "up_proj", "down_proj"} or names >= {"gate_up_proj", "down_proj"}
    return "all-linear", None if all_attention and all_mlp else "not every linear layer is adapted"


def settings_in_text(values: Mapping[str, Any], where: Where) -> dict[str, Mapping[str, Any]]:
    """The settings that a trainer's file with these keys holds as text or in other files, by key."""
    texts = {name: values[name] for name in _TAKE_TEXT if isinstance(values.get(name), str)}
    settings = {name: settings_of(name, text, where) for name, text in texts.items()}
    return {name: mapping for name, mapping in settings.items() if mapping is not None}


def settings_of(name: str, value: object, where: Where | None = None) -> Mapping[str, Any] | None:
    """The mapping that the key `name` holds as itself or as JSON text, which begins with a brace (transformers'
    training_args.py). With `where`, any other text names a file beside the user's own or in a folder above it.

    None for what is no mapping, and for a file that is not here. Raises `UsageError` for what is not JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parsed(value, name)
    elif isinstance(value, str) and where is not None:
        value = _in_file(value, where)
    return value if isinstance(value, dict) else None


def _in_file(file: str, where: Where) -> object:
    for path in (where.folder / file, *(folder / file for folder in where.folder.resolve().parents)):
        if os.path.isfile(path):  # unlike `Path.is_file`, false of a text that is too long for a name
            try:
                return _parsed(path.read_text(encoding="utf-8-sig"), str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{path} cannot be read: {error}") from error
    return None


def _parsed(text: str, origin: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin} is not JSON: {error}") from error
