"""What every trace needs, imported: the server that forks estimating processes does so once for all of them.

Left to themselves, the processes would each import it during their first trace, which takes longer than the trace.
"""

import importlib
import importlib.util
import warnings

from autofit.training.postponed import import_postponed

# Importing bitsandbytes touches the device, whose memory this server would then hold: the processes that need it do so.
with warnings.catch_warnings(), import_postponed("bitsandbytes"):
    warnings.simplefilter("ignore")
    for module in ("autofit.estimate.estimator", "torch._dynamo", "transformers.modeling_utils", "peft"):
        if module != "peft" or importlib.util.find_spec("peft") is not None:
            importlib.import_module(module)
