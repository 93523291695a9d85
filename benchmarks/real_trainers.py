"""The exported files, run by the trainers themselves, beside the trials that they were exported from.

    python benchmarks/real_trainers.py OUT.jsonl [--model llama-3.2-1b] [--seq-len 2048] [--seconds 420]

For transformers and trl: full training, LoRA and QLoRA, without checkpointing and with it. Of each: one trial with the
trainer's habits, the file that `autofit recommend --format` writes of it, then the trainer with that file on random
tokens. Weights are random, too, in a folder beside OUT. OUT has what is known already; no case begins after --seconds.
One process runs at a time. It needs transformers and trl, and no network.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import runpy
import statistics
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from itertools import pairwise, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LOSS = {"transformers": "full", "trl": "chunked"}
"""trl has no other loss than its tiled one, transformers' Trainer none but the plain one."""
CASES = [
    {"for": trainer, "method": method, "checkpointing": checkpointing}
    for method, checkpointing, trainer in product(("lora", "qlora", "full"), ("none", "full"), LOSS)
]
WARM_UP = 2
"""Steps that are not timed, as in a trial."""
PROCESSES = multiprocessing.get_context("spawn")
MOST_SECONDS = 900.0
"""That a process may take."""


def main() -> int:
    """Run what is missing; 75 while something is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument(
        "--steps", type=int, default=7, help="optimizer steps of a trainer; the first two are not timed"
    )
    parser.add_argument("--seconds", type=float, default=420)
    asked = parser.parse_args()
    if asked.steps < WARM_UP + 2:
        parser.error(f"--steps {asked.steps}: at least {WARM_UP + 2} are needed, of which two are not timed")
    ends = time.monotonic() + asked.seconds
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    settings = {key: value for key, value in vars(asked).items() if key not in ("out", "seconds")}
    known = [json.loads(line) for line in lines]
    done = [row["case"] for row in known if row["trainer"] and row.get("settings") == settings]
    cases = [case for case in CASES if case not in done]
    if not cases:
        return 0
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as trials have it

    from autofit.trial.machine.detection import detect
    from autofit.trial.process.group_runner import GroupRunner

    device = detect("auto")
    with (
        tempfile.TemporaryDirectory(dir=asked.out.parent) as folder,
        GroupRunner(kind=device[0].kind) as runner,
    ):
        runner.start()
        source = Path(folder) / asked.model
        apart(device[0].kind, save, asked.model, str(source))
        for case in cases:
            if time.monotonic() > ends:
                return os.EX_TEMPFAIL
            row = {"case": case} | compared(case, asked, source, device, runner)
            row |= {"settings": settings, "recorded_at": datetime.now(UTC).isoformat(timespec="seconds")}
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(told(row), flush=True)
    return 0


def apart(kind: str, function: Any, *given: Any) -> Any:
    """What `function` returns in a process of its own, alone on the device: its memory is free again once it has ended.
    Raises `RuntimeError` with its last words if it fails."""
    from autofit.trial.machine import device_lock

    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=answer, args=(there, function, *given), daemon=True)
    with device_lock.held(device_lock.names(kind)):
        process.start()
        there.close()
        try:
            found, words = here.recv() if here.poll(MOST_SECONDS) else (None, [f"not done after {MOST_SECONDS:.0f} s"])
        except EOFError:
            found, words = None, ["it ended without a word"]
        process.kill()
        process.join()
    if words:
        raise RuntimeError("\n".join(words))
    return found


def answer(to: Connection, function: Any, *given: Any) -> None:
    """In the process of its own: send what `function` returns, or its last words."""
    try:
        to.send((function(*given), []))
    except BaseException:
        to.send((None, traceback.format_exc().splitlines()[-5:]))


def save(model: str, folder: str) -> None:
    """A folder with the model's architecture, random weights and a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from autofit.catalog.models import architecture, load

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(folder)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    made = AutoModelForCausalLM.from_config(architecture(load(model)), dtype=torch.bfloat16)
    made.save_pretrained(folder)


def compared(case: dict[str, str], asked: argparse.Namespace, source: Path, device: Any, runner: Any) -> dict[str, Any]:
    """The trial's figures and the trainer's; or what either of them said last."""
    from autofit import techniques
    from autofit.catalog.models import load
    from autofit.core.errors import AutofitError
    from autofit.export import export
    from autofit.operations.recommendation import of_trial
    from autofit.planning.requests import WorkloadOptions
    from autofit.store import Store
    from autofit.trial.request import TrialRequest

    trainer = case["for"]
    values = {"micro_batch": asked.micro_batch, "precision": asked.precision, "loss": LOSS[trainer]}
    values |= {key: value for key, value in case.items() if key != "for"}
    config = techniques.complete(values, techniques.recipe(device[0], load(str(source)), trainer))
    options = WorkloadOptions(
        model=str(source), seq_len=asked.seq_len, global_batch=asked.global_batch, trainer=trainer
    )
    job = options.job(device)
    request = TrialRequest(job=job, config=config, memory_limit_bytes=job.hardware.memory_bytes, compares_gradient=True)
    trial = request.trial(runner.attempt(request))
    row: dict[str, Any] = {"config": str(config), "trial": trial.to_json(), "trainer": None, "said": []}
    if trial.measurement is None:
        return row | {"said": [str(trial.outcome)]}
    file = source.parent / f"{'-'.join(case.values())}.{'py' if trainer == 'transformers' else 'yaml'}"
    steps = asked.seq_len, asked.global_batch, asked.steps
    try:
        with Store.open(f"sqlite:///{source.parent / 'trials.db'}") as store:
            file.write_text(export(of_trial(store.add(trial), store), format=trainer, source=str(source)).text)
        return row | {"trainer": apart(device[0].kind, trained, trainer, str(file), *steps)}
    except (AutofitError, RuntimeError) as error:
        return row | {"said": str(error).splitlines()}


def trained(trainer: str, file: str, seq_len: int, global_batch: int, steps: int) -> dict[str, Any]:
    """What the trainer took. What it imports counts neither for it nor against it."""
    import bitsandbytes  # noqa: F401
    import datasets  # noqa: F401
    import peft.tuners.lora  # noqa: F401
    import torch
    import trl
    from transformers import TrainerCallback

    from autofit.trial.measure import process_memory

    trl.SFTTrainer  # noqa: B018  # trl loads what is asked for
    made_by = {"transformers": from_script, "trl": from_yaml}[trainer]
    words = torch.randint(64, (steps * global_batch, seq_len), generator=torch.Generator().manual_seed(0))
    on_card = torch.cuda.is_available()
    before = process_memory.read().resident
    made = made_by(file, words, steps)
    made.args.output_dir = str(Path(file).with_suffix(""))

    began: list[float] = []

    class Clock(TrainerCallback):
        """Notes when each step begins."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if on_card:
                torch.cuda.synchronize()
            began.append(time.perf_counter())

    made.add_callback(Clock())
    process_memory.reset_peak()  # forget that of loading
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    made.train()
    seconds = statistics.median(after - earlier for earlier, after in pairwise(began[WARM_UP:]))
    found: dict[str, Any] = {"step_seconds": seconds, "tokens_per_second": global_batch * seq_len / seconds}
    if on_card:
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    else:
        found["peak_reserved_bytes"] = process_memory.read().peak_resident - before
    found["losses"] = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return found


def prepared(args: Any, steps: int) -> Any:
    """What is the user's own: a learning rate, and how long."""
    args.learning_rate, args.lr_scheduler_type = 1e-5, "constant"
    args.max_steps, args.save_strategy = steps, "no"
    args.logging_strategy, args.logging_steps, args.disable_tqdm = "steps", 1, True
    return args


def from_script(file: str, words: Any, steps: int) -> Any:
    """The Trainer of the exported script."""
    names = runpy.run_path(file)
    prepared(names["training_args"], steps)
    return names["make_trainer"]([{"input_ids": row, "labels": row} for row in words])


def from_yaml(file: str, words: Any, steps: int) -> Any:
    """The trainer that `trl sft --config FILE` makes."""
    import trl
    from datasets import Dataset

    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    _, args, model = parser.parse_args_and_config(["--config", file, "--learning_rate", "1e-5"])
    args.model_init_kwargs = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    return trl.SFTTrainer(
        model=model.model_name_or_path,
        args=prepared(args, steps),
        train_dataset=Dataset.from_dict({"input_ids": words.tolist()}),
        quantization_config=trl.get_quantization_config(model),
        peft_config=trl.get_peft_config(model),
    )


def told(row: dict[str, Any]) -> str:
    """One line."""
    name = " ".join(row["case"].values())
    if not row["trial"] or not row["trainer"]:
        return f"{name}: {row['said']}"
    trial, real = row["trial"]["measurement"], row["trainer"]
    parts = [f"{key} {real[key] / trial[key] - 1:+.1%}" for key in trial if key in real and key in LINE]
    return f"{name}: trainer beside trial: " + ", ".join(parts)


LINE = ("tokens_per_second", "peak_allocated_bytes", "peak_reserved_bytes")

if __name__ == "__main__":
    sys.exit(main())
