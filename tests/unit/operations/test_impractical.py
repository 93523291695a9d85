"""What a search says of a method that it began and did not finish."""

from __future__ import annotations

from unit.operations.made_trials import fits, make_job, make_trial
from unit.search.made_truth import cpu_lattice

from autofit.core.outcome import TimedOut
from autofit.core.units import GIB
from autofit.operations.searching.impractical import impractical_methods
from autofit.search.lattice_state import LatticeState
from autofit.techniques import complete


def test_a_method_whose_trials_were_all_cut_is_named_with_its_speed_and_its_cause() -> None:
    state = LatticeState(cpu_lattice(make_job()), 10 * GIB)
    state.learn(make_trial(complete({"method": "lora", "precision": "fp32"}), fits(2, 160), limit=10 * GIB))
    slow = {"bf16": 128.0, "bf16-mixed": 64.0}
    cut = [
        make_trial(
            complete({"method": "full", "precision": precision}),
            TimedOut(reason="slow", deadline_seconds=60.0, least_step_seconds=least, is_proven=True),
        )
        for precision, least in slow.items()
    ]
    state.recall_bounds(cut)

    def said(recommended: str, formats: dict[str, str]) -> tuple[str, ...]:
        return impractical_methods(state, recommended=recommended, tokens_per_step=512, emulated_formats=formats)

    (sentence,) = said("lora", {"bf16": "bf16 is emulated here: 90 times slower than fp32."})
    fastest = cut[1].config
    assert sentence == (
        f"full is too slow to be practical: at most 8 tokens/s, because bf16 is emulated here ({fastest})"
    )
    assert "because" not in said("lora", {})[0]
    assert said("full", {}) == ()
    state.learn(make_trial(complete({"method": "full", "precision": "fp32"}), fits(8, 50), limit=10 * GIB))
    assert said("lora", {}) == (), "its own line says how fast it is"


def test_what_only_a_first_micro_step_shows_is_said_to_be_so() -> None:
    state = LatticeState(cpu_lattice(make_job()), 10 * GIB)
    state.learn(make_trial(complete({"method": "lora", "precision": "fp32"}), fits(2, 160), limit=10 * GIB))
    slow = TimedOut(reason="slow", deadline_seconds=60.0, least_step_seconds=128.0, is_proven=False)
    config = complete({"method": "full", "precision": "fp32"})
    state.recall_bounds([make_trial(config, slow)])
    said = impractical_methods(state, recommended="lora", tokens_per_step=512, emulated_formats={})
    assert said == (
        f"full seems too slow to be practical: at most 4 tokens/s, by its first micro-step alone ({config})",
    )
