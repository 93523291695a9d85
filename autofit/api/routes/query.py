"""The command line's options as query parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from autofit.api.routes.common import NamedModels
from autofit.catalog.models import names
from autofit.core.errors import NotMeasured, UsageError, unknown
from autofit.core.lengths import GROUPS, LARGEST_COUNT, Lengths
from autofit.core.outcome import OUTCOMES
from autofit.core.units import LARGEST_INTEGER, as_bytes, parse_bytes
from autofit.core.workload import Goal, Workload
from autofit.operations import WorkloadOptions
from autofit.operations.recommendation import WorkloadQuestion, find_hardware
from autofit.store import Store
from autofit.techniques.habits import TRAINERS, trainer_by_name

TOKENS, SEQUENCES = "Tokens per sequence", "Sequences per optimizer step"
TRAINER = f"The trainer whose habits trials have: {', '.join(TRAINERS)}; plain training if not given"
LENGTHS = "Tokens of each of your sequences, or of a sample of them; every sequence is full if not given"
EVAL_BATCH = "Sequences that the trainer evaluates at a time, per device; training alone counts if not given"
SUMMED_UP = "How long sequences are, as `workload.lengths` of an answer, with commas; the longest has seq_len tokens"


def understood(read: Callable[[str], object]) -> AfterValidator:
    """Refuses, with the field's name, a text that `read` raises `UsageError` for."""

    def check(text: str | None) -> str | None:
        try:
            if text is not None:
                read(text)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return text

    return AfterValidator(check)


def _tokens(summed_up: str | None) -> tuple[int, ...] | None:
    return None if summed_up is None else tuple(sorted(map(int, summed_up.split(","))))


MemoryLimit = Annotated[str | None, understood(parse_bytes)]
LengthsInQuery = Annotated[str | None, Field(pattern=r"^\d{1,9}(,\d{1,9})*$", description=SUMMED_UP)]
OneLength = Annotated[int, Field(ge=2, le=LARGEST_COUNT)]


class SummedUp(BaseModel):
    """`Lengths`, as the client makes them of a file."""

    tokens: list[OneLength] = Field(min_length=1, max_length=GROUPS)
    longest: OneLength

    def lengths(self) -> Lengths:
        return Lengths(tuple(sorted(self.tokens)), self.longest)


class AskedWorkload(BaseModel):
    """What is trained: the options by the command line's names and with its defaults."""

    model: str = Field(description="Name of a catalog model")
    seq_len: int = Field(default=2048, ge=2, le=2**24, description=TOKENS)
    global_batch: int = Field(default=64, ge=1, le=2**20, description=SEQUENCES)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    devices: int = Field(default=1, ge=1, le=2**16)
    seed: int = Field(default=0, ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)
    trainer: str | None = Field(default=None, alias="for", description=TRAINER)
    eval_batch: int | None = Field(default=None, ge=1, le=2**20, description=EVAL_BATCH)

    def options(self, model: str, lengths: Lengths | None) -> WorkloadOptions:
        """The options; `model` is its name or its path on the server."""
        plain = self.model_dump(include=AskedWorkload.model_fields.keys() - {"model"})
        return WorkloadOptions(model=model, lengths=lengths, **plain)


class WorkloadBody(AskedWorkload):
    """The workload in a request's body."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lengths: Annotated[list[OneLength], Field(min_length=1, max_length=10_000)] | SummedUp | None = Field(
        default=None, description=LENGTHS
    )

    def workload(self, models: NamedModels) -> WorkloadOptions:
        """The workload that the body describes; raises `UsageError` for a model that nobody knows."""
        lengths = self.lengths.lengths() if isinstance(self.lengths, SummedUp) else Lengths.given(self.lengths)
        return self.options(models.named(self.model), lengths)


class WorkloadQuery(AskedWorkload):
    """The workload in a query."""

    model: str = Field(description="Name of a catalog model, or of another model that was measured")
    lengths: LengthsInQuery = None

    def workload(self, store: Store, models: NamedModels) -> WorkloadOptions | Workload:
        """The workload that the query describes; raises `UsageError` for a model that nobody knows."""
        if self.trainer is not None:
            trainer_by_name(self.trainer)  # raises
        model = models.find(self.model)
        tokens = _tokens(self.lengths)
        options = self.options(model or self.model, None if tokens is None else Lengths(tokens, self.seq_len))
        if model is not None:
            return options
        measured = store.workloads(model=self.model)
        if not measured:
            candidates = (*names(), *models.in_folder(), *sorted({w.model for w in store.workloads()}))
            raise unknown("model", self.model, candidates)
        seq_len, lengths = options.cut()
        fields = {**asdict(options), "seq_len": seq_len, "lengths": lengths}
        return Workload(**fields, model_digest=measured[0].model_digest)


class GoalQuery(BaseModel):
    """How far the answer may depart from the plain recipe."""

    method: str = Field(default="any", description="any, full, lora or qlora")
    min_rank: int = Field(default=8, ge=1)
    allow: str = Field(default="numerics", description="exact, numerics or training")

    def goal(self) -> Goal:
        """Raises `UsageError` for a name that there is not."""
        return Goal.of(self.method, self.min_rank, self.allow)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedQuestion:
    """What `recommend` and `frontier` are asked."""

    workload: WorkloadQuestion
    goal: Goal
    memory_limit_bytes: int | None
    hardware: str

    @property
    def conditions(self) -> dict[str, Any]:
        """The arguments of these operations beside the workload."""
        return {name: getattr(self, name) for name in ("goal", "memory_limit_bytes", "hardware")}


class Question(GoalQuery, WorkloadQuery):
    """The question that `recommend` and `frontier` answer."""

    memory_limit: MemoryLimit = Field(default=None, description="Such as 24GiB")
    hardware: str = Field(default="auto", description="Name of hardware with trials; auto: the only one")

    def resolve(self, store: Store, models: NamedModels) -> ResolvedQuestion:
        return ResolvedQuestion(
            workload=self.workload(store, models),
            goal=self.goal(),
            memory_limit_bytes=as_bytes(self.memory_limit),
            hardware=named_hardware(self.hardware, store),
        )


class TrialsQuery(BaseModel):
    """Conditions on stored trials, and which page of them; conditions that are not given match anything."""

    model: str | None = None
    seq_len: int | None = Field(default=None, ge=2, le=LARGEST_INTEGER, description=TOKENS)
    global_batch: int | None = Field(default=None, ge=1, le=LARGEST_INTEGER, description=SEQUENCES)
    lora_dropout: float | None = Field(default=None, ge=0, lt=1)
    devices: int | None = Field(default=None, ge=1, le=LARGEST_INTEGER)
    seed: int | None = Field(default=None, ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)
    trainer: str | None = Field(default=None, alias="for", description=TRAINER.partition(";")[0])
    eval_batch: int | None = Field(default=None, ge=1, le=LARGEST_INTEGER, description=EVAL_BATCH.partition(";")[0])
    lengths: LengthsInQuery = None
    hardware: str | None = Field(default=None, description="Name of hardware with trials, or auto")
    outcome: str | None = Field(default=None, description="fits, out_of_memory, ...")
    limit: int = Field(default=100, ge=1, le=1000)
    before: int | None = Field(
        default=None, ge=1, le=LARGEST_INTEGER, description="The `next` of the page before: trials older than that"
    )

    def conditions(self, store: Store) -> dict[str, Any]:
        """The conditions as the store's queries take them."""
        if self.outcome is not None and self.outcome not in OUTCOMES:
            raise unknown("outcome", self.outcome, OUTCOMES)
        name = None if self.hardware is None else named_hardware(self.hardware, store)
        workload = self.model_dump(include=AskedWorkload.model_fields.keys() - {"model"}, exclude_none=True)
        if self.trainer is not None:
            workload["trainer"] = trainer_by_name(self.trainer).name  # raises
        if (tokens := _tokens(self.lengths)) is not None:
            longest = self.seq_len or tokens[-1]
            workload["lengths"] = Lengths(tokens, longest).cut(longest).tokens
        return {
            "model": self.model,
            "outcome": self.outcome,
            "hardware_key": None if name is None else find_hardware(name, store).key,
            "workload": workload,
        }


def named_hardware(name: str, store: Store) -> str:
    """The name as it was given, or for `auto` that of the only real hardware that trials ran on: what the server
    itself has is not what its clients mean."""
    if name.lower() != "auto":
        return name
    names = {hardware.name: hardware.is_emulated for hardware in store.hardware()}
    real = [name for name, is_emulated in names.items() if not is_emulated]
    if len(real) == 1:
        return real[0]
    if names:
        raise UsageError(f"name the hardware: {', '.join(sorted(names))}")
    raise NotMeasured("nothing has been measured yet", remedy="name the hardware, or start a search")
