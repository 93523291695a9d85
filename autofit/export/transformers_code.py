"""The fixed pieces of Python from which exported scripts are assembled."""

from __future__ import annotations

CHUNK_THE_LOSS = '''
def chunk_the_loss(model):
    """Make `model` compute its loss a few rows of logits at a time; without labels nothing changes."""
    whole = model.forward

    def forward(
        input_ids=None, attention_mask=None, position_ids=None, labels=None, num_items_in_batch=None, **kwargs
    ):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        if labels is None:
            return whole(**inputs, **kwargs)
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        config, output = model.config.get_text_config(), model.get_output_embeddings()
        head = Head(
            weight=output.weight,
            bias=getattr(output, "bias", None),
            softcap=getattr(config, "final_logit_softcapping", None),
            scale=(getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0),
        )
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = KERNEL(hidden.flatten(0, 1), head, shifted.flatten())
        count = (shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=loss / count)

    model.forward = forward
'''
"""Installs a loss kernel, called KERNEL here, in a model; needs the measured `Head`, and `CausalLMOutput`."""

CHECKPOINTING_NAME = """\
# transformers 5.23 renamed gradient_checkpointing to activation_checkpointing.
CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = "gradient_checkpointing"

"""
"""Finds what the installed transformers calls checkpointing."""

LOAD = """\
    model = AutoModelForCausalLM.from_pretrained(SOURCE, **model_kwargs)
"""
LOAD_TEXT_PART = """\
    # The language model alone, as it was measured, even if SOURCE holds more.
    text = AutoConfig.from_pretrained(SOURCE).get_text_config()
    names = {r"^(model\\.)?language_model\\.(model\\.)?": "model.", r"^language_model\\.lm_head\\.": "lm_head."}
    model = AutoModelForCausalLM.from_pretrained(SOURCE, config=text, key_mapping=names, **model_kwargs)
"""

FUNCTIONS = '''\
def load_model():
    """The model as it was measured."""
    LOAD
    return model


def make_trainer(train_dataset):
    """A Trainer for items of `input_ids` and `labels`: SEQ_LEN tokens each, none of them padding."""
    if training_args.learning_rate is None:
        raise SystemExit("the learning rate is yours to choose: set LEARNING_RATE in this script")
    TRAINER
'''
"""LOAD stands for loading the model and applying the method and techniques to it; TRAINER for creating the trainer."""

MAIN = """\
if __name__ == "__main__":
    tokens = torch.load(sys.argv[1])[:, :SEQ_LEN]  # your data: token ids, [sequences, SEQ_LEN]
    make_trainer([{"input_ids": row, "labels": row} for row in tokens]).train()
"""
"""What the script does when run."""
