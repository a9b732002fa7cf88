"""[federation] of a scenario: silos or clients, rounds, and who takes part in which."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from fedpriv.algorithms import Positive
from fedpriv.data.partition import silo_sizes
from fedpriv.participation.asked import Asked
from fedpriv.participation.registry import CHOSEN, SamplingName
from fedpriv.scenario.section import Count, Section


class FederationSection(Section):
    """[federation]: how many silos, rounds and records.

    `rounds` alone reads `batch` records of each silo a round; `samples` alone gives as many rounds as they last;
    both together share the samples out over the rounds: the way to large batches.  All three give passes of as
    many rounds as the samples last, and as many passes as the rounds do: the last one may be cut.  Every round of
    a pass reads equally many records of a silo, which is a public number: what does not fill a round is left out.

    With `clients` and `cohort` there is one pool of clients, kept by a trusted server, in place of silos: a round
    reads a cohort of them, and `rounds` says how many there are.
    """

    silos: Count = Field(
        description="number of silos M; all answer, unless they drop out; 1 pool where there are clients"
    )
    clients: Count | None = Field(
        None, description="in place of silos: how many clients there are, of which a trusted server asks cohorts"
    )
    cohort: Count | None = Field(
        None,
        description="clients of one round, expected where they are drawn; means have this denominator",
    )
    rounds: Count | None = Field(None, description="number of rounds T")
    samples: Count | None = Field(
        None,
        description="records of all silos that are read, each once an epoch; a rest that does not fill a round of "
        "every silo is left out, and said",
    )
    batch: Count | None = Field(
        None, description="records of one silo in one round; 1 if not both others are given"
    )
    batches: Annotated[tuple[Count, ...], Field(strict=False)] | None = Field(
        None, description="in place of `batch`, one number a silo, where silos are not of one size; needs rounds"
    )
    epochs: Count = Field(1, description="passes over the records; expected ones with Poisson sampling")
    sampling: SamplingName = Field(
        "fixed",
        description='"fixed": every record once an epoch, in the same order; "poisson": in every round each '
        'record takes part by a coin of its own; "allocation": in every epoch each in one round of its own, drawn '
        'in secret; "available": clients when they are there, `min_separation` rounds apart; with these three '
        "`batch` or `cohort` is what is expected",
    )
    groups: Count = Field(
        1,
        description="public groups of records that share out the rounds of an epoch, for secret sampling with "
        "correlated noise: at least as many as the noise has bands",
    )
    min_separation: Count | None = Field(
        None, description='the rounds between two answers of one client, for sampling = "available"'
    )
    max_participations: Count | None = Field(
        None, description='how often one client answers at most, for sampling = "available"; else what fits'
    )
    drop_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="in simulations: how often a silo does not answer in a round, by public coins"
    )
    away: dict[str, Annotated[tuple[Count, ...], Field(strict=False)]] = Field(
        {}, description='in simulations: rounds in which a silo does not answer, {"2" = [3, 4]}'
    )
    size_skew: Positive | None = Field(
        None, description="silos of unequal size: concentration of their shares of the samples, small is uneven"
    )

    @model_validator(mode="before")
    @classmethod
    def _a_pool_is_one_silo(cls, given: Any) -> Any:
        return {"silos": 1, **given} if isinstance(given, dict) and "clients" in given else given

    @model_validator(mode="after")
    def _clients_are_one_pool(self) -> Self:
        if (self.clients is None) != (self.cohort is None):
            raise ValueError(
                "clients and cohort come together: how many there are, and how many answer in a round"
            )
        if self.clients is None or self.cohort is None:
            if CHOSEN[self.sampling].of_clients:
                raise ValueError(f'sampling = "{self.sampling}" is of clients: give clients and cohort, not silos')
            return self
        other = {key: getattr(self, key) for key in ("samples", "batch", "batches", "size_skew")}
        other |= {
            "silos": self.silos if self.silos > 1 else None,
            "epochs": self.epochs if self.epochs > 1 else None,
            "drop_out": self.drop_out or None,
            "away": self.away or None,
        }
        if key := next((key for key, value in other.items() if value is not None), None):
            raise ValueError(f"{key} says nothing of clients in cohorts: leave it out, or leave clients out")
        if self.rounds is None:
            raise ValueError("clients come in cohorts as often as rounds says: give rounds")
        if self.clients % self.cohort:
            raise ValueError(
                f"cohort = {self.cohort} does not divide clients = {self.clients}: a client takes part in 1 of "
                "clients / cohort rounds, a whole number"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.clients is not None:
            return self
        if self.rounds is None and self.samples is None:
            raise ValueError("needs rounds, or samples, or both")
        if self.rounds is not None and self.samples is not None and self.batch is not None and self.epochs != 1:
            raise ValueError("rounds, samples and batch together say how many passes there are: leave epochs out")
        if self.rounds is not None and self.rounds % self.epochs:
            raise ValueError(
                f"rounds = {self.rounds} must be a multiple of epochs = {self.epochs}; for a last pass that is "
                "cut give samples and batch in place of epochs"
            )
        if self.size_skew is not None and (self.rounds is None or self.samples is None or self.batch is not None):
            raise ValueError("size_skew shares samples out over rounds: give both, and no batch")
        if self.batches is not None:
            if self.rounds is None or self.samples is not None or self.batch is not None:
                raise ValueError(
                    "batches says how many records each silo reads: give rounds, no samples, no batch"
                )
            if len(self.batches) != self.silos:
                raise ValueError(f"batches has {len(self.batches)} numbers, and there are {self.silos} silos")
        least = self.silos * (self.batch or (1 if self.rounds is None else self.rounds_per_epoch))
        if self.samples is not None and self.samples < least:
            raise ValueError(f"samples = {self.samples} are too few for one pass: at least {least} are needed")
        if self.rounds is not None and self.rounds < self.rounds_per_epoch:
            raise ValueError(
                f"rounds = {self.rounds} do not read the samples once: at batch = {self.batch} it takes "
                f"{self.rounds_per_epoch}; leave batch out, or give fewer samples"
            )
        return self

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds of one pass."""
        if self.clients is not None and self.cohort is not None:
            return self.clients // self.cohort
        if self.samples is None or (self.rounds is not None and self.batch is None):
            return (self.rounds or 0) // self.epochs
        return self.samples // (self.silos * (self.batch or 1))

    @property
    def total_rounds(self) -> int:
        """T."""
        return self.rounds_per_epoch * self.epochs if self.rounds is None else self.rounds

    @property
    def asked(self) -> Asked:
        """What the participation is told beside the order."""
        return Asked(self.groups, self.min_separation, self.max_participations)

    def batch_sizes(self, seed: int) -> tuple[int, ...]:
        """Records of each silo in one round, or the cohort; every place of the silo's order has as many."""
        if self.cohort is not None:
            return (self.cohort,)
        if self.batches is not None:
            return self.batches
        if self.samples is None or self.rounds is None or self.batch is not None:
            return (self.batch or 1,) * self.silos
        return silo_sizes(self.samples // self.rounds_per_epoch, self.silos, self.size_skew, seed)
