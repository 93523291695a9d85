"""The job and the config of an ordinary run of a Trainer, read from its arguments and from the model that it trains.

What no axis can say, or nobody can see from here, is a `UsageError`. What the script changes of the named model, of its
optimizer's settings and of its adapters beside rank and targets is not compared: its trial is of its own command.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autofit.catalog.models import names
from autofit.core.errors import UsageError
from autofit.core.lattice import Config, Value
from autofit.planning.requests import WorkloadOptions, hub_id
from autofit.techniques import Job, complete
from autofit.techniques.adapters import unwrap
from autofit.trainers import training_arguments
from autofit.trainers.keys import Keys
from autofit.trainers.run import Run, Where
from autofit.trainers.trainer import READERS
from autofit.trial.machine.detection import detect

if TYPE_CHECKING:
    from transformers import TrainingArguments

UNSEEN = frozenset({"use_cpu"})
"""Keys that say on which device a run is, which is known here."""
LENGTH = "how long its sequences are is not known: say it, as in TrainerCallback(record=True, seq_len=2048)"
SECRET_NAME = re.compile(
    r"(^-*|[.+]|(hf|hub|face|gh|auth|access|api|session|bearer|wandb)[._-]?)token$"
    r"|(access|api|private|wandb)[._-]?key$|(password|passwd|secret)$",
    re.IGNORECASE,
)
"""Of options and variables. The tokens of a vocabulary, such as `--eos_token`, are none."""
SECRET_VALUE = re.compile(r"hf_\w{20,}|\w+://[^/\s:@]*:[^/\s@]+@")
"""A hub token, and an address with a password."""
NOT_COMMANDS = ("ipykernel", "default_worker.py", "spawn_main")
"""Words of processes that others have started in a way of their own: notebooks, Ray's workers, Python's."""


def own_command(secrets: Sequence[str] = ()) -> str:
    """This process's command line as `--command` takes it. Raises `UsageError` if it has none, or one with a secret."""
    words = sys.orig_argv
    if not sys.argv[0] or any(mark in word for mark in NOT_COMMANDS for word in words):
        raise UsageError("it has no command of its own, as in a notebook or in a worker of Ray")
    for word in words:
        name, has_value, _ = word.partition("=")
        is_secret = SECRET_NAME.search(name) and (has_value or name.startswith("-"))
        if is_secret or SECRET_VALUE.search(word) or any(secret in word for secret in secrets):
            option = name if name.startswith("-") else "a word"
            raise UsageError(f"{option} of its command line may hold a secret: give that by the environment")
    return shlex.join(word.replace("{", "{{").replace("}", "}}") for word in words)


def options_of(args: TrainingArguments, model: Any, config: Config, seq_len: int | None) -> WorkloadOptions:
    """The workload options that name what a run trains, and by which command. Raises `UsageError`."""
    length = seq_len or getattr(args, "max_length", None)
    if length is None:
        raise UsageError(LENGTH)
    return WorkloadOptions.of(
        model=_named(model),
        command=own_command([args.hub_token] if args.hub_token else []),
        seq_len=length,
        global_batch=config.number("micro_batch") * args.gradient_accumulation_steps,
        lora_dropout=0.0 if config["method"] == "full" else float(_adapters(model).lora_dropout),
    )


def job_of(options: WorkloadOptions, args: TrainingArguments) -> Job:
    """The job of a run on this machine. Raises `UsageError` for a model that is not found."""
    named, workload = options.resolve()
    hardware, stack = detect(args.device.type)
    return Job(model=named, workload=workload, hardware=hardware, stack=stack)


def config_of(args: TrainingArguments, model: Any, optimizer: Any) -> Config:
    """The config that a run trains. Raises `UsageError` for what no config says."""
    _check_alone(args, model)
    run = _arguments(args)
    for ignored in run.not_counted:
        if ignored.key not in UNSEEN:
            raise UsageError(f"no axis says {ignored.key} ({ignored.because})")
    _check_uncompiled(args, model)
    _check_optimizer(args, model, optimizer)
    _check_checkpointing(unwrap(model), run.config)
    _check_kernels(args, model)
    values: dict[str, Value] = {**dict(run.config.items), **_method(args, model)}
    values["attention"] = _attention(unwrap(model))
    values["precision"] = _precision(args, model, str(values["method"]))
    return complete(values)


def _arguments(args: TrainingArguments) -> Run:
    """What the arguments alone decide."""
    # A script may have classes of its own that derive from trl's.
    of_trl = next((kind for kind in type(args).__mro__ if kind.__module__.partition(".")[0] == "trl"), None)
    if of_trl is None:
        return READERS["transformers"].read(args.to_dict(), Where(devices=1))
    if of_trl.__name__ != "SFTConfig" or args.loss_type != "nll":
        loss = f" with loss_type {args.loss_type}" if of_trl.__name__ == "SFTConfig" else ""
        raise UsageError(f"no axis says what a run of {of_trl.__name__}{loss} computes")
    if args.packing or args.padding_free:
        raise UsageError("it packs several sequences into a row, which no config without --lengths says")
    return READERS["trl"].read(args.to_dict(), Where(devices=1))


def _check_alone(args: TrainingArguments, model: Any) -> None:
    """Raise `UsageError` unless one process trains the whole model on one device."""
    if args.world_size > 1 or args.n_gpu > 1:
        raise UsageError(f"it trains on {max(args.world_size, args.n_gpu)} devices, and only runs on one are stored")
    if args.distributed_state is not None and args.distributed_state.distributed_type != "NO":
        raise UsageError(f"it trains by {args.distributed_state.distributed_type.value}: only plain runs are stored")
    if args.auto_find_batch_size:
        raise UsageError("its micro-batch is not known before it fits (auto_find_batch_size)")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != args.device.type or next(iter(devices)).index not in (None, 0):
        where = " and ".join(sorted(map(str, devices)))
        raise UsageError(f"its weights are on {where}, and only runs on one device, the first, are stored")


def _check_uncompiled(args: TrainingArguments, model: Any) -> None:
    """Raise `UsageError` for what is compiled, whose batches cannot be counted, and for what others have rewritten."""
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )
    if compiled or args.torch_compile or backend != "no":
        raise UsageError("its model is compiled, so that the tokens of its batches cannot be counted")
    if "unsloth" in sys.modules:
        raise UsageError("unsloth has replaced parts of its model")


def _named(model: Any) -> str:
    """What `--model` takes for the model: the catalog's name, a hub id or a folder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base = unwrap(model)
    if type(base).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UsageError(f"a {type(base).__name__} is no causal language model of transformers")
    name = str(getattr(base.config, "_name_or_path", None) or "")
    if not name:
        raise UsageError("its model does not say where it was loaded from")
    return next((n for n in names() if hub_id(n).lower() == name.lower()), name)


def _check_optimizer(args: TrainingArguments, model: Any, optimizer: Any) -> None:
    """Raise `UsageError` unless the optimizer is the one that the arguments name, and updates all that is trained."""
    from transformers import Trainer

    own = getattr(optimizer, "optimizer", optimizer)  # inside of accelerate's
    kind, _ = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if type(own) is not kind:
        raise UsageError(f"its optimizer is a {type(own).__name__} of the script's own, and not what optim names")
    updated = {id(parameter) for group in own.param_groups for parameter in group["params"]}
    if updated != {id(parameter) for parameter in model.parameters() if parameter.requires_grad}:
        raise UsageError("its optimizer updates others than the weights that are trained")


def _check_checkpointing(base: Any, config: Config) -> None:
    is_on = any(getattr(module, "gradient_checkpointing", False) for module in base.modules())
    if is_on != (config["checkpointing"] != "none"):
        state = "on" if is_on else "off"
        raise UsageError(f"checkpointing is {state} in its model, and its arguments say {config['checkpointing']}")


def _check_kernels(args: TrainingArguments, model: Any) -> None:
    """Raise `UsageError` for Liger's kernels that the script has put in by itself."""
    if args.use_liger_kernel:
        return
    for module in model.modules():
        forward = getattr(module.forward, "__func__", module.forward)
        sources = (type(module).__module__, getattr(forward, "__module__", None) or "")
        if "liger_kernel" in (source.partition(".")[0] for source in sources):
            raise UsageError("its model has Liger's kernels, and use_liger_kernel is off: which ones is not known")


def _adapters(model: Any) -> Any:
    """The configuration of a model's adapters, as peft keeps it. Raises `UsageError` for others than plain LoRA."""
    configs = list(model.peft_config.values())
    if len(configs) != 1:
        raise UsageError(f"it has {len(configs)} sets of adapters")
    adapters = configs[0]
    kind = getattr(adapters.peft_type, "value", adapters.peft_type)
    if kind != "LORA":
        raise UsageError(f"no axis says adapters of the kind {kind}")
    return adapters


def _method(args: TrainingArguments, model: Any) -> dict[str, Value]:
    """The method and, of adapters, their rank and targets."""
    stored = getattr(unwrap(model).config, "quantization_config", None)
    four_bit = bool(getattr(model, "is_loaded_in_4bit", False))
    if stored is not None and not four_bit:
        raise UsageError("no axis says how its weights are quantised")
    if not getattr(model, "peft_config", None):
        if four_bit:
            raise UsageError("its weights are in 4 bits and it has no adapters")
        return {"method": "full"}
    if four_bit:
        _check_nf4(stored, args, model)
    from peft.tuners.lora import LoraLayer

    adapters = _adapters(model)
    keys = Keys(
        {"lora_target_modules": [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]},
        "trl",
    )
    targets = keys.targets("lora_target_modules")
    for ignored in keys.not_counted:
        raise UsageError(f"no axis says the targets of its adapters ({ignored.because.partition(';')[0]})")
    return {"method": "qlora" if four_bit else "lora", "rank": int(adapters.r), "targets": targets}


def _check_nf4(stored: Any, args: TrainingArguments, model: Any) -> None:
    """Raise `UsageError` for 4-bit weights that are not those of the axis, or whose products are wider."""
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    trained = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    products = {{"bf16": "bfloat16", "fp16": "float16"}[_autocast(args)]} if _autocast(args) != "no" else trained
    computes = str(settings.get("bnb_4bit_compute_dtype")).removeprefix("torch.")
    if products != {computes}:
        raise UsageError(f"no axis says products in {computes} beside its 4-bit weights (bnb_4bit_compute_dtype)")
    if settings.get("bnb_4bit_quant_type") != "nf4" or not settings.get("bnb_4bit_use_double_quant"):
        raise UsageError("no axis says its 4-bit weights: qlora has nf4 with double quantisation")


def _attention(base: Any) -> str:
    name = str(getattr(base.config, "_attn_implementation", None))
    if name not in training_arguments.ATTENTION:
        raise UsageError(f"no axis says the attention kernel {name}")
    return training_arguments.ATTENTION[name]


def _autocast(args: TrainingArguments) -> str:
    """`no`, `bf16` or `fp16`: what the Trainer tells accelerate, whose launcher may say it instead."""
    said = str(getattr(args, "mixed_precision", None) or ("bf16" if args.bf16 else "fp16" if args.fp16 else "no"))
    if said not in ("no", "bf16", "fp16"):
        raise UsageError(f"no axis says mixed precision of {said}")
    return said


def _precision(args: TrainingArguments, model: Any, method: str) -> str:
    """The precision, from the formats of the weights and of autocast."""
    import torch

    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad and p.is_floating_point()}
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}[_autocast(args)]
    names = {
        (torch.float32, torch.bfloat16): "bf16-mixed",
        (torch.float32, torch.float16): "fp16-mixed",
        (torch.float32, None): "fp32",
        (torch.bfloat16, None): "bf16",
        (torch.bfloat16, torch.bfloat16): "bf16",
    }
    if len(trained) != 1 or (next(iter(trained)), autocast) not in names:
        formats = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in trained)) or "none"
        raise UsageError(f"no axis says its precision: trained weights in {formats}, autocast to {autocast}")
    (dtype,) = trained
    if method == "full" and frozen:
        raise UsageError("no axis says which weights are trained: some are frozen, without adapters")
    # A 4-bit base usually has its norms and embeddings in fp32 (peft's prepare_model_for_kbit_training).
    if not frozen <= {autocast or dtype, *([torch.float32] if method == "qlora" else [])}:
        formats = " and ".join(sorted(str(other).removeprefix("torch.") for other in frozen))
        raise UsageError(f"no axis says its precision: frozen weights in {formats}, products in {autocast or dtype}")
    precision = names[dtype, autocast]
    return "tf32" if precision == "fp32" and args.device.type == "cuda" and _multiplies_in_tf32() else precision


def _multiplies_in_tf32() -> bool:
    """Whether products of fp32 may be in TF32. Asked in the older way where the newer one has set it, torch raises."""
    import torch

    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    return newer == "tf32" if newer != "none" else torch.get_float32_matmul_precision() != "highest"
