"""What ranks need, imported once in the process from which all of them are forked, and none of it ever scanned as
garbage: DeepSpeed and Trainer collect garbage again and again."""

import gc
import importlib

gc.disable()
for module in (
    *("torch", "deepspeed", "peft", "bitsandbytes", "transformers.models.llama.modeling_llama", "transformers.trainer"),
    "tests.tiny",
):
    importlib.import_module(module)
gc.freeze()
gc.enable()
