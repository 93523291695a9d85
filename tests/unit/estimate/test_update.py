"""The optimizer's part: layers that stand for others change no byte."""

from __future__ import annotations

import pytest
from test_trace import GQA, MIXTURE, TIED, history, job

from autofit.catalog.models import Model
from autofit.estimate.cuda_kernels import cuda_scratch
from autofit.estimate.update import trace_updates
from autofit.techniques import complete, parse

MODELS = {"gqa": GQA, "tied": TIED, "mixture": MIXTURE}
CASES = [
    ("gqa", "method=full,precision=bf16-mixed,optimizer=adamw"),
    ("gqa", "method=full,precision=bf16,optimizer=adamw-8bit"),
    ("gqa", "method=qlora,precision=bf16,optimizer=paged-adamw-8bit"),
    ("tied", "method=full,precision=bf16,optimizer=adafactor"),
    ("tied", "method=lora,precision=bf16-mixed,optimizer=adamw-foreach,targets=attention"),
    ("mixture", "method=full,precision=bf16,optimizer=lion-8bit"),
]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_layers_that_stand_for_others_give_the_update_of_them_all(name: str, text: str) -> None:
    def traced(of: Model, *, exact: bool) -> object:
        tape = trace_updates(complete(parse(text)), job(of), cuda_scratch, exact=exact)
        return history(tape), [len(w) for w in tape.work.values()], tape.elsewhere

    assert traced(MODELS[name], exact=False) == traced(MODELS[name], exact=True)
