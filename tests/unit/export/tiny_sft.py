"""trl's own trainer on a tiny model, as `trl sft --config FILE` would run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def save_tiny_llama(folder: str) -> str:
    """Writes a Llama of four small layers and a tokenizer into the folder, and returns it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save(LlamaConfig(vocab_size=64, num_hidden_layers=4, **sizes), folder)


def save(config: Any, folder: str) -> str:
    """Writes a model of this architecture and a tokenizer into the folder, and returns it."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(folder)
    return folder


def parse(file: Path, *more: str) -> tuple[Any, Any]:
    """SFTConfig and ModelConfig; every key is known to one of them. No model is in ZeRO-3's shares afterwards."""
    import trl

    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    _, training, model = parser.parse_args_and_config(
        ["--config", str(file), "--learning_rate", "1e-4", *more], fail_with_unknown_args=True
    )
    unset_hf_deepspeed_config()
    return training, model


def train(args: Any, model: Any, folder: Path, *, steps: int) -> Any:
    """The trainer after so many steps on sequences of sixteen tokens."""
    made = trainer(args, model, folder, [list(range(2, 50))] * 8, steps=steps)
    made.train()
    return made


def trainer(args: Any, model: Any, folder: Path, rows: list[list[int]], *, steps: int) -> Any:
    """The trainer of so many steps on these tokens, which has not begun."""
    import trl
    from datasets import Dataset

    args.output_dir, args.max_steps, args.save_strategy = str(folder), steps, "no"
    args.model_init_kwargs = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    return trl.SFTTrainer(
        model=model.model_name_or_path,
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        quantization_config=trl.get_quantization_config(model),
        peft_config=trl.get_peft_config(model),
    )
