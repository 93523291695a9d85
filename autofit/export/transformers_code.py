"""The fixed pieces of Python that exported scripts are put together from."""

from __future__ import annotations

SELECTIVE = '''
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._grouped_mm.default,
]
if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):  # there once bitsandbytes is imported
    KEPT.append(torch.ops.bitsandbytes.gemm_4bit.default)


def selective_contexts():
    """Contexts of a checkpoint that keeps the results of matrix products and attention only.

    TensorBoard's callback cannot write arguments that hold a function: report elsewhere.
    """
    return create_selective_checkpoint_contexts(KEPT)
'''
"""Selective checkpointing as it is measured; needs `create_selective_checkpoint_contexts`."""

CHUNKED = '''
def rows_loss(model, hidden, labels):
    """Summed cross-entropy of some rows; hidden [rows, hidden_size], labels [rows]."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden)
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def chunk_the_loss(model):
    """Make `model` compute its loss a few rows of logits at a time; without labels nothing changes."""
    whole = model.forward

    def forward(
        input_ids=None, attention_mask=None, position_ids=None, labels=None, num_items_in_batch=None, **kwargs
    ):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        if labels is None:
            return whole(**inputs, **kwargs)
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        rows = max(256, hidden.numel() // model.get_output_embeddings().weight.shape[0])
        parts = [
            checkpoint(rows_loss, model, some, theirs, use_reentrant=False)
            for some, theirs in zip(hidden.split(rows), labels.split(rows))
        ]
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=torch.stack(parts).sum() / count)

    model.forward = forward
'''
"""A chunked loss; needs `checkpoint` and `CausalLMOutput`."""

CHECKPOINTING_NAME = """\
# transformers 5.23 renamed gradient_checkpointing to activation_checkpointing.
CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = "gradient_checkpointing"

"""
"""The name that the installed transformers has for checkpointing."""

FUNCTIONS = '''\
def load_model():
    """The model as it was measured."""
    model = AutoModelForCausalLM.from_pretrained(SOURCE, **model_kwargs)
    model.config.use_cache = False
    ...
    return model


def make_trainer(train_dataset):
    """A Trainer for items of `input_ids` and `labels`: SEQ_LEN tokens each, none of them padding."""
    return Trainer(model=load_model(), args=training_args, train_dataset=train_dataset)
'''
"""`...` stands for what the method and techniques do to the loaded model."""

MAIN = """\
if __name__ == "__main__":
    tokens = torch.load(sys.argv[1])[:, :SEQ_LEN]  # your data: token ids, [sequences, SEQ_LEN]
    make_trainer([{"input_ids": row, "labels": row} for row in tokens]).train()
"""
"""What the script does when it is run."""
