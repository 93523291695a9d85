"""Why a search does not recommend a more faithful method: what it began in vain, and which formats are slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from autofit.core.device.probe_findings import emulated
from autofit.core.frontier import least_practical_speed
from autofit.core.lattice import Config
from autofit.core.workload import METHODS
from autofit.prediction.probing import stored_probe
from autofit.store import Store
from autofit.techniques import Job
from autofit.techniques.axes.precision import product_format

if TYPE_CHECKING:
    from autofit.search.lattice_state import LatticeState


def impractical_methods(
    state: LatticeState, *, recommended: str, tokens_per_step: int, emulated_formats: Mapping[str, str]
) -> tuple[str, ...]:
    """A sentence for each more faithful method than the `recommended` one of which nothing has fitted, because its
    trials were ended as too slow: the most that the fastest of them can make, as far as they went. What is not proven
    is said to be so: the first micro-step may have generated kernels."""
    measured = state.fastest(METHODS)
    speeds = {method: point.measurement.tokens_per_second for method, point in measured.items()}
    proven = state.proven_step_seconds
    bounds = state.least_step_seconds | proven
    fastest: dict[str, Config] = {}
    for config in sorted(bounds, key=bounds.__getitem__):
        fastest.setdefault(config.text("method"), config)
    sentences = []
    for method in METHODS[: METHODS.index(recommended)]:
        if method in fastest and method not in measured:
            config = fastest[method]
            format_ = product_format(config)
            why = f", because {format_} is emulated here" if format_ in emulated_formats else ""
            most = tokens_per_step / bounds[config]
            practical = least_practical_speed(method, speeds)
            too_slow = "is too slow to be practical" if config in proven else "seems too slow to be practical"
            what = too_slow if most < practical else "was begun and not finished in its time"
            judged = "" if config in proven else ", by its first micro-step alone"
            sentences.append(f"{method} {what}: at most {most:,.3g} tokens/s{judged}{why} ({config})")
    return tuple(sentences)


def emulated_formats(job: Job, configs: Iterable[Config], store: Store) -> dict[str, str]:
    """What a probe of the device says of the number formats that these configs use and that it only emulates: a
    sentence for each."""
    probe = stored_probe(job.hardware, job.stack, store, job.model.digest)
    used = {product_format(config) for config in configs}
    sentence_by_format = {} if probe is None else emulated(probe)
    return {name: sentence for name, sentence in sentence_by_format.items() if name in used}
