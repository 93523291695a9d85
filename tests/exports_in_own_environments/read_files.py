"""Reads files by a trainer's own classes, and prints what it says of each; or prints all keys that these have.

    python read_files.py llamafactory|axolotl DOCUMENTS.json

DOCUMENTS.json is a list of files as dictionaries. Run by the Python of the trainer's environment. Printed last: the
trainer's keys, and for each file what is wrong with it, an empty text if nothing is.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main() -> None:
    _, trainer, documents = sys.argv
    keys, read = {"llamafactory": llamafactory, "axolotl": axolotl}[trainer]()
    wrongs = [wrong(read, document) for document in json.loads(Path(documents).read_text())]
    print(json.dumps({"version": version(trainer), "keys": sorted(keys), "wrong": wrongs}))


def wrong(read: Callable[[dict[str, Any]], object], document: dict[str, Any]) -> str:
    try:
        read(document)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def llamafactory() -> tuple[set[str], Callable[[dict[str, Any]], object]]:
    """`get_train_args`, for a card that computes in bf16."""
    from llamafactory.hparams import parser
    from transformers import training_args

    parser._check_extra_dependencies = lambda *_: None  # a file may ask for Liger, which is not installed
    parser.is_torch_bf16_gpu_available = training_args.is_torch_bf16_gpu_available = lambda: True
    training_args.is_torch_tf32_available = lambda: True
    training_args.enable_tf32 = lambda enable: None
    owners = [*parser._TRAIN_ARGS, parser.RayArguments]
    return {field.name for owner in owners for field in dataclasses.fields(owner) if field.init}, parser.get_train_args


def axolotl() -> tuple[set[str], Callable[[dict[str, Any]], object]]:
    """`validate_config`, for an H100."""
    from axolotl.integrations.liger.args import LigerArgs
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig

    card = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 1, "compute_capability": "sm_90"}

    def read(document: dict[str, Any]) -> object:
        document = DictDefault(document)
        prepare_plugins(document)
        return validate_config(document, capabilities=card, env_capabilities={"torch_version": "2.13.0"})

    return {name for owner in (AxolotlInputConfig, LigerArgs) for name in owner.model_fields}, read


if __name__ == "__main__":
    main()
