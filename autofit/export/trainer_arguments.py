"""A config in terms of transformers' TrainingArguments, which trl and other trainers inherit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autofit.core.lattice import Config, Value
from autofit.export import distributed
from autofit.export.document import Emit, Near, NeedsMore, Settings, Task, collect, merge, settings
from autofit.techniques.adapters import alpha, attention_projections
from autofit.techniques.axes.attention import IMPLEMENTATIONS
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.axes.optimizer import OPTIMIZERS, weight_decay
from autofit.techniques.axes.precision import product_format
from autofit.techniques.habits import has_habit, trained_format
from autofit.techniques.habits.habit import LogitsInEvaluation
from autofit.techniques.habits.known_trainers import Trainer, trainer_by_name
from autofit.techniques.selective import BUDGETS
from autofit.techniques.technique import MAX_GRADIENT_NORM

FILLED = ("lr", "betas", "eps", "weight_decay")
"""Arguments of DeepSpeed's own optimizer that Trainer fills in from its own arguments."""

SYNC_EACH_BATCH = ("accelerator_config", "gradient_accumulation_kwargs", "sync_each_batch")
"""The key that has FSDP reduce gradients after each micro-batch, and those that it is within. Trainer otherwise waits
for the last one (`_run_epoch` of transformers' trainer.py), and keeps them unsharded until then."""
SYNCHRONISED = {SYNC_EACH_BATCH[0]: {SYNC_EACH_BATCH[1]: {SYNC_EACH_BATCH[2]: True}}}
"""As was measured."""

LIGER_LAYERS = ("rope", "rms_norm", "swiglu", "geglu")
"""Liger's names for its kernels in decoder layers; a model has one of the last two."""

CHOOSE = "CHOOSE"
"""A word where a trainer expects a number, for what only the user can choose: the trainer refuses to start with it."""

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def compute_dtype(config: Config) -> str:
    """Torch's name for the dtype of matrix products and of frozen weights."""
    return TORCH_NAMES[product_format(config)]


def trained_dtype(task: Task) -> str:
    """Torch's name for the dtype of the weights that the optimizer updates.

    DeepSpeed itself keeps higher-precision copies, with the optimizer.
    """
    config = task.config
    by_habit = trained_format(config, task.workload.trainer)
    if by_habit is not None and config["method"] != "full":
        return by_habit
    if config["precision"] == "bf16":
        return "bfloat16"
    return compute_dtype(config) if distributed.by_deepspeed(task) else "float32"


def load_dtype(task: Task) -> str:
    """Torch's name for the dtype to load in: that of the trained weights for `full`, else that of the frozen base."""
    return trained_dtype(task) if task.config["method"] == "full" else compute_dtype(task.config)


def precision(task: Task) -> dict[str, object]:
    """The arguments `bf16` and `fp16`, which turn on mixed precision, and without either `tf32`. For pure bf16 both are
    off, and the model is loaded in bf16.

    Under DeepSpeed they must agree with its own configuration, which says `bf16` for pure and for mixed bf16 alike.
    """
    value = task.config["precision"]
    bf16 = value == "bf16-mixed" or (value == "bf16" and distributed.by_deepspeed(task))
    wide = {"tf32": value == "tf32"} if product_format(task.config) == "fp32" else {}
    return {"bf16": bf16, "fp16": value == "fp16-mixed", **wide}


def general_notes(task: Task, trainer: str, *, machines: str) -> list[str]:
    """Notes that no axis decides: `trainer` may load more than the model that was measured; it pads micro-batches of
    sequences with lengths unless it was measured so (`habits.masks_padding`); `machines` names its options for several
    machines."""
    config, notes = task.config, list[str]()
    if is_part(task):
        notes.append(f"the model: {trainer} loads the whole checkpoint, but only the text model was measured")
    measured_so = task.packs or task.workload.trainer is not None
    if not measured_so and config["micro_batch"] != 1 and config["attention"] == "sdpa":
        notes.append(
            NeedsMore(f"data: {trainer} passes a mask with what it pads, for which keys and values are repeated")
        )
    return notes + distributed.machine_notes(task, otherwise=machines) + distributed.saving_notes(task)


def run(task: Task, *, clips: bool = True) -> dict[str, object]:
    """Arguments that no axis decides: clipping as in trials or none, the output folder, and the CPU if that was
    measured."""
    device: dict[str, object] = {"use_cpu": True} if task.hardware.kind == "cpu" else {}
    return {
        "output_dir": "autofit-run",
        "max_grad_norm": MAX_GRADIENT_NORM if clips else 0.0,
        # The filter synchronises with the device after each micro-batch; trials do not.
        "logging_nan_inf_filter": False,
        **device,
    }


def translated(
    task: Task, base: Settings, table: Mapping[str, Emit], *, trainer: str, eval_key: str = "per_device_eval_batch_size"
) -> Settings:
    """`base`, with the settings of every axis of `table` and, under the trainer's `eval_key`, how many sequences to
    evaluate at a time. That is the workload's number. Where training alone counted, it is the micro-batch, because
    evaluation takes less memory than training on it."""
    size, notes = task.workload.eval_batch or task.config.get("micro_batch"), []
    if not task.workload.eval_batch and has_habit(LogitsInEvaluation, task.config, trainer):
        size = 1
        makes = f"{trainer} makes all logits in evaluation, but not in training"
        remedy = f"(`--for {trainer} --eval-batch 1` does)"
        notes.append(Near(f"evaluation: {makes}: one sequence at a time was not measured {remedy}"))
    evaluation = settings(*notes, training={} if size is None else {eval_key: size})
    return merge(base, evaluation, collect(table, task, trainer=trainer_by_name(trainer)))


def batch(value: Value, task: Task) -> Settings:
    """Micro-batch size and accumulation steps that give the workload's global batch."""
    size = int(value)
    return settings(
        training={
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": task.workload.batch_per_device // size,
            "auto_find_batch_size": False,
        }
    )


def batching(value: Value, *notes: str) -> Settings:
    """The argument that groups sequences by length, since transformers 5.2. The data section of an export says whether
    they are packed: see `Task.packs`."""
    return settings(*notes, training={"train_sampling_strategy": "group_by_length"} if value == "grouped" else {})


def packing_note(trainer: str) -> str:
    """The note where attention does not look beyond a packed sequence, as it does in trials."""
    return f"batching=packed: {trainer} keeps packed sequences apart: less attention than was measured"


def first_label_notes(value: Value, trainer: str) -> list[str]:
    """A note where the trainer leaves the label at the first token of a sequence to the data."""
    difference = f"{trainer} trains on a sequence's first token after another's last, if your data has a label there"
    return [Near(f"batching=padding-free: {difference}")] if value == "padding-free" else []


def liger(value: Value, task: Task, *, without_loss: bool = False) -> Settings:
    """The arguments that turn on those of Liger's kernels that were measured, and no others, for the axes `kernels` and
    `loss`; `without_loss` leaves out Liger's loss."""
    layers, loss = by_liger(task.config), task.config.get("loss") == "fused" and not without_loss
    switches = {
        **dict.fromkeys(LIGER_LAYERS, layers),
        "layer_norm": False,
        "cross_entropy": False,
        "fused_linear_cross_entropy": loss,
    }
    chosen = {"liger_kernel_config": switches} if layers or loss else {}
    return settings(training={"use_liger_kernel": layers or loss, **chosen})


def left_out_notes(task: Task, trainer: Trainer, name: str) -> list[str]:
    """A note where the trainer, called `name`, does without Liger's loss for this model."""
    if task.config.get("loss") != "fused" or not trainer.leaves_liger_out(task.model()):
        return []
    difference = f"{name} leaves Liger out for this model, and makes all logits: more memory than measured"
    return [NeedsMore(f"loss=fused: {difference}")]


def unsettable(value: Value, task: Task) -> Settings:
    """No settings: the trainer has the plain value alone, as it is known to (`Trainer.cannot`)."""
    return settings()


def optimizer_name(value: Value, trainer: str) -> tuple[str | None, list[str]]:
    """What `optim` calls an optimizer; without such a name, a note on what `trainer` does."""
    name = OPTIMIZERS[str(value)].trainer
    return name, [f"optimizer={value}: {trainer} has no name for it, and takes its default"] if name is None else []


def optimizer(value: Value, task: Task) -> Settings:
    """The argument `optim`, and the weight decay of trials."""
    name, notes = optimizer_name(value, "Trainer")
    if value == "adamw-foreach" and task.hardware.kind == "cpu":
        notes.append(
            Near(
                "optimizer=adamw-foreach: on a CPU Trainer's adamw_torch updates one tensor at a time: less memory "
                "than was measured"
            )
        )
    named = {} if name is None else {"optim": name}
    return settings(*notes, training={**named, "weight_decay": weight_decay(value)})


def compilation(value: Value, task: Task) -> Settings:
    """The argument `torch_compile`."""
    if value is not True:
        return settings(training={"torch_compile": False})
    note = (
        "compile=True: trials compile each decoder layer; Trainer also compiles the rest, loss included, and lets fp32 "
        "products use TF32. ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true makes it compile layer by layer, too"
    )
    return settings(Near(note), training={"torch_compile": True})


def offload(value: Value, task: Task) -> Settings:
    """No settings: those for offloading are written by `sharding`. A note if that cannot cover `value`."""
    if distributed.offload_is_covered(task):
        return settings()
    reason = f"not possible with sharding={task.config['sharding']}; it is left out"
    return settings(NeedsMore(f"offload={value}: {reason}"))


def fsdp_arguments(task: Task) -> dict[str, object]:
    return {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": distributed.reshards(task),
            "cpu_offload": task.config["offload"] == "params",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": distributed.sharded_layers(task),
        },
        **SYNCHRONISED,
    }


def sharding(
    value: Value, task: Task, *, trainer: str | None, fsdp: Callable[[Task], dict[str, object]] = fsdp_arguments
) -> Settings:
    """The argument `deepspeed`, those of `fsdp`, or what DDP needs. `trainer` reads the file; a script, for which it is
    None, itself sets what a file cannot say."""
    if distributed.by_deepspeed(task):
        notes = [] if trainer is None else distributed.nvme_notes(task)
        return settings(*notes, training={"deepspeed": distributed.deepspeed_config(task, filled=FILLED)})
    if distributed.by_fsdp(task):
        return settings(*distributed.fsdp_notes(task, narrow_sums=trainer is not None), training=fsdp(task))
    if value != "ddp":
        return settings()
    notes = []
    if trainer is not None and task.workload.trainer is None:
        note = f"sharding=ddp: {trainer} holds gradients twice, in the parameters and in DDP's buckets; trials once"
        notes.append(NeedsMore(note) if task.config["method"] == "full" else Near(note))
    # Otherwise Trainer searches for parameters without a gradient at every step.
    return settings(*notes, training={"ddp_find_unused_parameters": False})


def checkpointing(value: Value) -> dict[str, object] | None:
    """`gradient_checkpointing_kwargs` but for what is selected by `selective`; None where no layer is checkpointed."""
    if value == "none" or value in BUDGETS:
        return None
    kwargs: dict[str, object] = {"use_reentrant": False}
    name, _, every = str(value).partition("-")
    if name == "every":
        kwargs["every_n_layers"] = int(every)
    if name == "offload":
        kwargs["offload"] = True
    return kwargs


def attention(value: Value, task: Task) -> Settings:
    """`attn_implementation`, by which a trainer loads the model."""
    name = "sdpa" if value == "efficient" else IMPLEMENTATIONS[str(value)]
    return settings(model={"attn_implementation": name})


def rank(value: Value, task: Task) -> Settings:
    """The adapters' rank and scale, in trl's and axolotl's terms."""
    return settings(model={"lora_r": value, "lora_alpha": alpha(int(value))})


def target_modules(value: Value, task: Task) -> list[str] | str:
    """`target_modules` of a LoRA configuration, found in the architecture as in trials."""
    return attention_projections(task.meta_model()) if value == "attention" else "all-linear"


def is_part(task: Task) -> bool:
    """Whether the weights may be part of a larger checkpoint, such as a vision-language model's."""
    return str(task.model().config["model_type"]).endswith("_text")


def libraries(config: Config) -> list[str]:
    """Packages that the config needs in Trainer and its heirs, beside those that train, adapt and shard."""
    optimizer = OPTIMIZERS.get(str(config.get("optimizer")))  # a stored config may lack it
    packages = {
        "bitsandbytes": config["method"] == "qlora",
        "liger-kernel": config.get("loss") == "fused" or by_liger(config),
        "flash-attn": config.get("attention") == "flash",
    }
    if optimizer is not None and optimizer.package is not None:
        packages[optimizer.package] = True
    return [name for name, is_needed in packages.items() if is_needed]
