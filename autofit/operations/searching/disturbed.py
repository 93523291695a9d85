"""What a search's trials met of others on their device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofit.core.document import Document
from autofit.core.outcome import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed(Document):
    """The trials of a search whose device was busy with something else, or throttled."""

    repeated: int = 0
    """Trials after which their config was run again."""
    believed: int = 0
    """Configs that count as measured by such a trial, because the device was no better when they were run again."""
    reason: str = ""
    """What disturbed the last of them; empty if there was none."""
    set_aside: int = 0
    """Trials that do not count, because they ran on a node of a cluster that is slower than its type."""
    slow_nodes: tuple[str, ...] = ()
    """A sentence for each of those nodes."""

    @classmethod
    def of(cls, trials: Sequence[Trial], settled: Iterable[Trial], slow_nodes: Iterable[str] = ()) -> Disturbed:
        """From all `trials` of the search, oldest first; `settled` are those that count. `slow_nodes` were noticed by
        this driver; those that an earlier one noticed are known by the trials that it set aside."""
        aside = [trial.why_set_aside for trial in trials if trial.why_set_aside]
        doubted = [trial for trial in trials if trial.doubts and not trial.why_set_aside]
        last = {trial.config: trial.trial_id for trial in trials}
        return cls(
            repeated=sum(trial.trial_id != last[trial.config] for trial in doubted),
            believed=sum(bool(trial.doubts) for trial in settled),
            reason=doubted[-1].doubts[0] if doubted else "",
            set_aside=len(aside),
            slow_nodes=tuple(dict.fromkeys((*aside, *slow_nodes))),
        )
