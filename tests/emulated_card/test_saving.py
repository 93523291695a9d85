"""What transformers' Trainer takes to save a checkpoint, against what an estimate says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autofit import estimate
from tests.emulated_card.cards import Machine

TRAINED = '''
import json, os, signal, socket, sys
from contextlib import contextmanager
import torch
from torch.profiler import ProfilerActivity, profile
from autofit.training.postponed import import_postponed

folder, method, sharding = sys.argv[1:]
with import_postponed("bitsandbytes"):  # it asks for the card, which no fork survives
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
    if sharding.startswith("zero"):
        import deepspeed

def two_ranks():
    """Go on as two ranks, each forked from here with all that is imported; if one fails, all end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    for rank in "01":
        if os.fork() == 0:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            return
    if os.wait()[1] or os.wait()[1]:
        os.killpg(0, signal.SIGKILL)
    sys.exit()

if sharding != "none":
    two_ranks()
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
width = model.config.hidden_size
if method == "lora":
    from peft import LoraConfig, get_peft_model
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model.to(torch.bfloat16), adapters)
more = {}
if sharding.startswith("zero"):
    zero = {"stage": int(sharding[4:]), "reduce_bucket_size": width**2, "stage3_prefetch_bucket_size": width**2}
    zero |= {"stage3_param_persistence_threshold": 10 * width, "stage3_gather_16bit_weights_on_model_save": True}
    more["deepspeed"] = {
        "zero_optimization": zero, "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": 1.0,
    }
if sharding == "fsdp":
    layers = ["LlamaDecoderLayer" if model.config.model_type == "llama" else "MixtralDecoderLayer"]
    wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": layers}
    more |= {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True, **wrapped}}

class Watched(Trainer):
    """Tells what its tensors take of the host at most, and of the card, in each part of saving."""

    def save_model(self, *args, **kwargs):
        with self.watched("model"):
            super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, folder):
        with self.watched("states"):
            super()._save_optimizer_and_scheduler(folder)

    @contextmanager
    def watched(self, part):
        torch.cuda.reset_peak_memory_stats()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        device = torch.cuda.max_memory_allocated()
        traced = f"{self.args.output_dir}/trace-{os.environ.get('RANK', 0)}.json"
        profiler.export_chrome_trace(traced)
        with open(traced) as file:
            events = [e for e in json.load(file)["traceEvents"] if e["name"] == "[memory]"]
        most = now = 0
        for event in sorted(events, key=lambda e: e["ts"]):
            now += 0 if event["args"]["Device Type"] else event["args"]["Bytes"]  # 0 is the host
            most = max(most, now)
        print("\\n" + json.dumps({"part": part, "host": most, "device": device}), flush=True)

tokens = torch.ones(8, dtype=torch.long)
arguments = TrainingArguments(
    output_dir=os.environ["SAVED"], per_device_train_batch_size=1, max_steps=2, save_steps=2, bf16=True, report_to=[],
    optim="adamw_torch_fused", disable_tqdm=True, **more,
)
Watched(model=model, args=arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 4).train()
'''
DENSE = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 512},
    **{"intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
}
EXPERTS = {
    **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 8000, "hidden_size": 256},
    **{"intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
    **{"num_local_experts": 8, "num_experts_per_tok": 2},
}
LEFT_OUT = 4_000_000
"""More bytes than those of adapters and their states, which estimates of saving leave out."""


def saved(home: Path, folder: Path, model: dict[str, Any], method: str, sharding: str) -> tuple[list[Any], Any]:
    """What each rank of the Trainer took in each part of saving, and what the estimate says."""
    ranks = 1 if sharding == "none" else 2
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "train.py").write_text(TRAINED)
    with Machine(home, *["a10g"] * ranks) as machine:
        # Another test may have told DeepSpeed to run on the processor.
        own = {"SAVED": str(folder / "saved"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"}
        environment = {**os.environ, **machine.environment, **own}
        words = [sys.executable, "-W", "ignore", str(folder / "train.py"), str(folder / "model"), method, sharding]
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=600, start_new_session=True
        )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"part"')]
    assert len(found) == 2 * ranks, done.stderr[-3000:]
    config = f"method={method},sharding={sharding},optimizer=adamw,precision=bf16-mixed"
    job = {"seq_len": 8, "global_batch": ranks, "devices": ranks, "hardware": "a10g", "store": str(folder / "store.db")}
    return found, estimate(str(folder / "model"), config, **job, advice=False).to_json()


@pytest.mark.parametrize(
    ("model", "method", "sharding"),
    [(DENSE, "full", "fsdp"), (DENSE, "lora", "zero2"), (EXPERTS, "full", "none")],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_saving_takes_what_the_estimate_says(
    home: Path, tmp_path: Path, model: dict[str, Any], method: str, sharding: str
) -> None:
    found, estimate = saved(home, tmp_path, model, method, sharding)
    parts = [[each for each in found if each["part"] == part] for part in ("model", "states")]
    copied = estimate["saving_host_bytes"] - estimate["machine_host_bytes"]
    assert copied == pytest.approx(max(sum(each["host"] for each in part) for part in parts), abs=LEFT_OUT)
    device = max(each["device"] for each in found)
    assert estimate["phase_peaks"]["saving"] == pytest.approx(device, rel=0.03)
