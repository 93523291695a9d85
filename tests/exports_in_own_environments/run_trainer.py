"""Has a trainer train as files say, by the trainer's own program, and writes down what it did.

    python run_trainer.py llamafactory|axolotl FOLDER...

Each FOLDER has `file.yaml` and `weights.pt`: parameters by name, which the model starts from. It gets `did.json` and
`output.txt`. Run by the Python of the trainer's environment, where autofit is not. The processor passes for a card
that computes in bf16, as trainers ask for one.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from live_bytes import LiveBytes
from transformers import training_args


def main() -> None:
    """Each file in a process of its own, forked from one that has imported the trainer."""
    torch.set_num_threads(1)
    training_args.is_torch_bf16_gpu_available = lambda: True
    train = {"llamafactory": llamafactory, "axolotl": axolotl}[sys.argv[1]]()
    for folder in map(Path, sys.argv[2:]):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            transformers.Trainer.train = watched(transformers.Trainer.train, folder)
            train(folder / "file.yaml")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)


def llamafactory() -> Callable[[Path], None]:
    """`llamafactory-cli train FILE`. It imports torchaudio, whose packages need CUDA's libraries; nothing here uses
    it."""
    sys.modules["torchaudio"] = module_from_spec(ModuleSpec("torchaudio", None))
    from llamafactory.hparams import parser
    from llamafactory.train.tuner import run_exp

    def train(file: Path) -> None:
        sys.argv = ["llamafactory-cli", str(file)]
        run_exp()

    parser.is_torch_bf16_gpu_available = lambda: True
    return train


def axolotl() -> Callable[[Path], None]:
    """What `axolotl train FILE` starts in each process."""
    import axolotl.train  # noqa: F401
    from axolotl.cli import config
    from axolotl.cli.train import do_cli

    def train(file: Path) -> None:
        sys.argv = ["axolotl"]
        do_cli(config=str(file))

    config.is_torch_bf16_gpu_available = lambda: True
    return train


def watched(train: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`Trainer.train` that gives the model the folder's weights first, and writes down what it does."""

    def watched_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = described(self.model)
        give(self.model, torch.load(folder / "weights.pt", weights_only=False))
        batches: list[list[int]] = []
        step = self.training_step

        def noted_step(model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
            batches.append(list(inputs["input_ids"].shape))
            return step(model, inputs, *more, **others)

        self.training_step = noted_step
        with LiveBytes() as counter:
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                counter.note(tensor)
            result = train(self, *args, **kwargs)
        history = [entry for entry in self.state.log_history if "loss" in entry]
        optimizer = self.optimizer.optimizer
        did = {
            "parameters": parameters,
            "batches": batches,
            "losses": [float(entry["loss"]) for entry in history],
            "gradient_norms": [float(entry["grad_norm"]) for entry in history],
            "peak_bytes": counter.peak,
            "optimizer": name_of(optimizer),
            "weight_decay": max(group["weight_decay"] for group in optimizer.param_groups),
            "attention": self.model.config._attn_implementation,
        }
        (folder / "did.json").write_text(json.dumps(did))
        return result

    return watched_train


def described(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Of each parameter its shape, its format and whether it is trained; of what is packed in 4 bits, its bytes."""
    return {
        name: ["4 bits", p.nbytes] if hasattr(p, "quant_state") else [list(p.shape), str(p.dtype), p.requires_grad]
        for name, p in model.named_parameters()
    }


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """With its library. bitsandbytes has two names for one in 8 bits: AdamW8bit, or AdamW that was asked for 8 bits."""
    kind = type(optimizer)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__.removesuffix('8bit')}"


def give(model: torch.nn.Module, weights: dict[str, torch.nn.Parameter]) -> None:
    """Give the parameters of `model` these values. What is packed in 4 bits may be packed in another format."""
    for name, parameter in model.named_parameters():
        given = weights[name]
        if hasattr(parameter, "quant_state"):
            packed = given.data.flatten().view(parameter.dtype)
            parameter.data.copy_(packed.view_as(parameter))
            parameter.quant_state = model.get_submodule(name.rpartition(".")[0]).quant_state = given.quant_state
        else:
            parameter.data.copy_(given.data)


if __name__ == "__main__":
    main()
