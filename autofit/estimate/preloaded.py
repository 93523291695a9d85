"""What every trace needs, imported: the server that forks estimating processes does so once for all of them."""

import importlib
import importlib.util
import warnings
from contextlib import nullcontext

from autofit.estimate.warm import without_collections
from autofit.training.postponed import import_postponed

NEEDED = ("autofit.estimate.estimator", "torch._dynamo", "transformers.modeling_utils", "peft", "bitsandbytes")
MAY_LACK = ("peft", "bitsandbytes")

with warnings.catch_warnings(), without_collections():
    warnings.simplefilter("ignore")
    import torch

    # Importing bitsandbytes takes memory of a GPU: the processes that need it import it themselves.
    on_gpu = torch.version.cuda is not None or torch.version.hip is not None
    with import_postponed("bitsandbytes") if on_gpu else nullcontext():
        for module in NEEDED:
            if module not in MAY_LACK or (importlib.util.find_spec(module) is not None):
                importlib.import_module(module)
