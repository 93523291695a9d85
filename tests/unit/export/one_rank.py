"""What one rank of a group makes of an exported file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, DistributedType
from transformers import training_args as training_args_module
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import IntervalStrategy

from autofit.training.engines import zero
from autofit.training.prerequisites import native_ops


@contextmanager
def script(file: Path) -> Iterator[dict[str, Any]]:
    """The names of the script in `file`; what it sets in this process is restored afterwards."""
    module = sys.modules["exported"] = ModuleType("exported")
    with patch.dict(os.environ), ExitStack() as accelerator:
        if file.name.endswith(".gpu.py"):
            os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
            backend = ("gloo", DistributedType.MULTI_GPU)
            accelerator.enter_context(patch.object(PartialState, "_prepare_backend", lambda *_, **__: backend))
            accelerator.enter_context(patch.object(training_args_module, "is_torch_bf16_gpu_available", lambda: True))
        exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
        yield module.__dict__
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()


def train(names: dict[str, Any], tokens: torch.Tensor, folder: Path) -> Any:
    """The script's Trainer after one step for each batch in `tokens`, [batches, sequences, SEQ_LEN]."""
    args = names["training_args"]
    args.output_dir, args.max_steps, args.save_strategy = str(folder), len(tokens), IntervalStrategy.NO
    args.logging_strategy, args.logging_steps, args.disable_tqdm = IntervalStrategy.STEPS, 1, True
    args.lr_scheduler_type, args.train_sampling_strategy = "constant", "sequential"
    trainer = names["make_trainer"]([{"input_ids": row, "labels": row} for row in tokens.flatten(0, 1)])
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    """The loss of every step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weight_decay(optimizer: torch.optim.Optimizer) -> float:
    """The largest of its groups': Trainer leaves norms out of it."""
    return float(max(group["weight_decay"] for group in optimizer.param_groups))


def facts(trainer: Any) -> dict[str, Any]:
    """What the libraries made of the script."""
    result: dict[str, Any] = {
        "losses": losses(trainer),
        "model": type(trainer.model_wrapped).__name__,
        "optimizer": type(getattr(trainer.optimizer.optimizer, "optimizer", trainer.optimizer.optimizer)).__name__,
    }
    result["weight_decay"] = weight_decay(trainer.optimizer)
    if trainer.is_deepspeed_enabled:
        result["deepspeed"] = trainer.model_wrapped.config
    if trainer.is_fsdp_enabled:
        layer = next(m for m in trainer.model.modules() if type(m).__name__.endswith("DecoderLayer"))
        result["sums"] = str(layer._get_fsdp_state()._mp_policy.reduce_dtype)
        parameters = list(layer.parameters())
        result["share"] = sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)
    if result["model"] == "DistributedDataParallel":
        result["view"] = trainer.model_wrapped.gradient_as_bucket_view
        result["searches"] = trainer.model_wrapped.find_unused_parameters
    return result


def by_deepspeed_alone(file: Path, source: Path, tokens: torch.Tensor) -> dict[str, Any]:
    """What `deepspeed.initialize` makes of the configuration in `file`, and the losses of its steps."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    engine, *_ = deepspeed.initialize(model=model, config=str(file), model_parameters=model.parameters())
    result = []
    for batch in tokens:
        step = 0.0
        own = batch[engine.global_rank :: engine.world_size].split(engine.train_micro_batch_size_per_gpu())
        for rows in own:
            loss = engine(input_ids=rows, labels=rows).loss
            engine.backward(loss)
            engine.step()
            step += loss.detach() / len(own)
        torch.distributed.all_reduce(step)
        result.append(step.item() / engine.world_size)
    return {
        "losses": result,
        "optimizer": type(engine.optimizer.optimizer).__name__,
        "weight_decay": weight_decay(engine.optimizer),
    }


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """What came of the file of `case`, on this rank of an existing group."""
    import deepspeed

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Trainer and DeepSpeed print
    rank, ranks = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    deepspeed.ops.__compatible_ops__ = {zero.INFERENCE_OP: False}  # it takes half a minute to compile
    native_ops.load("cpu_adam")
    file, source, tokens = Path(case["file"]), Path(case["source"]), case["tokens"]
    if file.suffix == ".json":
        return by_deepspeed_alone(file, source, tokens)
    with script(file) as names:
        return facts(train(names, tokens, file.parent / "run"))
