"""Guarantees of a stream of releases, and privacy targets as a person states them.

A kind of guarantee is one class with the members of `Guarantee`: its figures at δ, what it says of several units,
what a lifetime budget is charged, its words.  Nothing else asks which kind it is.  One of your own is a file with
such a class, which is least work as a `Curved` one, and with the participation that promises it, of which
`participation/registry.py` has a line.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi
from fedpriv.accounting.budget import ApproximateGDP, min_mu
from fedpriv.accounting.curves import (
    Curve,
    check_group_size,
    check_resolvable_delta,
    delta_at,
    epsilon_at,
    group_mu,
    group_privacy_epsilon,
)
from fedpriv.accounting.gaussian import RELATION_FACTOR, Relation, check_epsilon, check_mu, check_positive
from fedpriv.accounting.losses import min_noise_multiplier
from fedpriv.core.errors import InputError
from fedpriv.core.figures import best_guess

Event = Mapping[str, Any]
"""An event of dp-accounting as plain data: its "class", and its fields."""
ADD_OR_REMOVE, REPLACE = "ADD_OR_REMOVE_ONE", "REPLACE_ONE"
"""Neighbouring relations of dp-accounting's accountants."""


class Guarantee(Protocol):
    """Guarantee of a stream of releases: a value, whose figures are computed when they are asked for."""

    kind: ClassVar[str]
    """In results."""

    @property
    def mu(self) -> float | None:
        """μ, where telling transcripts apart is as hard as N(0, 1) from N(μ, 1); None where no μ describes it."""
        ...

    @property
    def best_guess(self) -> float:
        """Largest probability of guessing right which of two equally likely neighbours was used."""
        ...

    @property
    def alike(self) -> Hashable:
        """Key that two guarantees must share so that `leakage` tells which of them protects less."""
        ...

    @property
    def leakage(self) -> float:
        """The larger, the less is protected."""
        ...

    @property
    def note(self) -> str:
        """Note of a page beside the figures; empty where the figures say all."""
        ...

    def __hash__(self) -> int: ...

    def epsilon_of(self, delta: float) -> float:
        """The smallest ε known for which (ε, `delta`)-DP holds."""
        ...

    def epsilon_of_group(self, size: int, delta: float) -> float:
        """The same for `size` units at once."""
        ...

    def figures(self, delta: float) -> dict[str, float | None]:
        """mu, zcdp, epsilon and epsilon_paper, as results have them; None for what there is none of."""
        ...

    def conversions(self, delta: float) -> dict[str, float]:
        """All that the accounting commands print of it, by name."""
        ...

    def charge(self, slack: float) -> ApproximateGDP:
        """Charge to a lifetime budget; `slack` is for those without a μ.  InputError for too small a one."""
        ...

    def format_clause(self, shown: Mapping[str, str], attained: bool) -> str:
        """A clause of a sentence, from figures as they are printed: those of `figures`, delta, perhaps counted_mu.

        `attained`: whether no smaller figures hold.
        """
        ...

    def event(self) -> tuple[str, Event] | None:
        """An accountant's neighbouring relation, and the event that dominates the releases; None without one."""
        ...


Promise = TypeVar("Promise", bound=Guarantee, covariant=True)


@dataclass(frozen=True)
class GaussianDP:
    """Exact μ-GDP: the whole transcript is as hard to tell apart as N(0, 1) from N(μ, 1)."""

    mu: float

    kind: ClassVar[str] = "gaussian-dp"
    alike: ClassVar[str] = kind
    note: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_mu(self.mu)

    @property
    def zcdp(self) -> float:
        """ρ = μ²/2 of zero-concentrated DP."""
        return renyi.zcdp_of(self.mu)

    @property
    def best_guess(self) -> float:
        return best_guess(self.mu)

    @property
    def leakage(self) -> float:
        return self.mu

    def epsilon_of(self, delta: float) -> float:
        """The smallest ε for which (ε, `delta`)-DP holds."""
        return gdp.epsilon_of(self.mu, delta)

    def epsilon_of_group(self, size: int, delta: float) -> float:
        return gdp.epsilon_of(group_mu(self.mu, size), delta)

    def figures(self, delta: float) -> dict[str, float | None]:
        paper = renyi.paper_epsilon(self.mu, delta)
        return {"mu": self.mu, "zcdp": self.zcdp, "epsilon": self.epsilon_of(delta), "epsilon_paper": paper}

    def conversions(self, delta: float) -> dict[str, float]:
        """(ε, δ)-DP by the exact route, by a Rényi accountant's, and by the formula that the papers print."""
        return {
            "mu": self.mu,
            "zcdp": self.zcdp,
            "delta": delta,
            "epsilon": self.epsilon_of(delta),
            "epsilon_rdp": renyi.epsilon_of(self.mu, delta),
            "epsilon_paper": renyi.paper_epsilon(self.mu, delta),
        }

    def charge(self, slack: float) -> ApproximateGDP:
        return ApproximateGDP(self.mu)

    def format_clause(self, shown: Mapping[str, str], attained: bool) -> str:
        mu, epsilon, delta = shown["mu"], shown["epsilon"], shown["delta"]
        said = f"μ-GDP exactly with μ = {mu}" if attained else f"μ-GDP with μ at most {mu}"
        if "counted_mu" in shown:
            said += f", as the paper's constants charge it, and by exact counting {shown['counted_mu']}"
        pair = f"(ε, δ) = ({epsilon}, {delta}) exact" if attained else f"(ε, δ) at most ({epsilon}, {delta})"
        by_formula = f"({shown['epsilon_paper']}, {delta}) by the paper's formula, rounded up"
        return f"{said} (zCDP {shown['zcdp']}); {pair}, {by_formula}"

    def event(self) -> tuple[str, Event]:
        """Under either relation: its factor is in μ.  With replace-one dp-accounting's accountants disagree."""
        return ADD_OR_REMOVE, gaussian_event(1.0 / self.mu)


class Curved:
    """A curve of (ε, δ) that no μ describes; all figures are upper bounds."""

    if TYPE_CHECKING:  # properties, or fields of dataclasses

        @property
        def curve(self) -> Curve: ...

    note: ClassVar[str] = "No μ describes that: ε and the best guess are upper bounds."

    @property
    def mu(self) -> None:
        return None

    @property
    def best_guess(self) -> float:
        return (1.0 + self.delta_of(0.0)) / 2.0 * (1.0 + 1e-15)

    def epsilon_of(self, delta: float) -> float:
        """An upper bound of the smallest ε for which (ε, `delta`)-DP holds; `delta` is 1e-10 or more."""
        return epsilon_at(self.curve, delta)

    def delta_of(self, epsilon: float) -> float:
        """An upper bound of the smallest δ for which (`epsilon`, δ)-DP holds."""
        return delta_at(self.curve, epsilon)

    def epsilon_of_group(self, size: int, delta: float) -> float:
        return group_privacy_epsilon(self.curve, size, delta)

    def figures(self, delta: float) -> dict[str, float | None]:
        return {"mu": None, "zcdp": None, "epsilon": self.epsilon_of(delta), "epsilon_paper": None}

    def conversions(self, delta: float) -> dict[str, float]:
        charges = {f"mu_with_slack_{slack:g}": self.charge(slack).mu for slack in _PRINTED_SLACKS}
        return {"delta": delta, "epsilon_at_most": self.epsilon_of(delta), **charges}

    def charge(self, slack: float) -> ApproximateGDP:
        return ApproximateGDP(min_mu(self.curve, slack), slack)

    def event(self) -> tuple[str, Event] | None:
        return None


_PRINTED_SLACKS = (1e-6, 1e-7, 1e-8)


@dataclass(frozen=True)
class Sampled(Curved):
    """Guarantee of secret participation, as long as who takes part when stays secret."""

    noise_multiplier: float
    """σ/C; for correlated noise in classes σ / max_t (clip_t ‖C_t‖)."""

    if TYPE_CHECKING:

        @property
        def relation(self) -> Relation: ...

        @property
        def times(self) -> int: ...

    kind: ClassVar[str]
    title: ClassVar[str]
    """In a sentence."""
    note: ClassVar[str] = (
        "In which rounds a record takes part was drawn by secret coins. No μ describes that: ε and the best guess "
        "are upper bounds from the privacy loss distribution, and hold as long as nobody learns who took part "
        "when."
    )

    @property
    def alike(self) -> Hashable:
        return dataclasses.replace(self, noise_multiplier=1.0)

    @property
    def leakage(self) -> float:
        return -self.noise_multiplier

    @property
    def known_mu(self) -> float:
        """μ of the same noise where everybody knows in which of its `times` rounds a unit takes part."""
        return RELATION_FACTOR[self.relation] * (math.sqrt(self.times) / self.noise_multiplier * (1.0 + 1e-15))

    def group_curve(self, size: int) -> Curve | None:
        """None: of several units that draw there is no law here, only the chain and `known_mu`."""
        check_group_size(size)
        return None

    def epsilon_of_group(self, size: int, delta: float) -> float:
        known = gdp.epsilon_of(group_mu(self.known_mu, size), delta)
        joining = self.group_curve(size)
        found = [known, super().epsilon_of_group(size, delta)]
        return min(found if joining is None else [*found, epsilon_at(joining, delta)])

    def conversions(self, delta: float) -> dict[str, float]:
        return {"noise_multiplier": self.noise_multiplier, **super().conversions(delta)}

    def format_clause(self, shown: Mapping[str, str], attained: bool) -> str:
        return (
            f"{self.title}, which no μ describes; (ε, δ) = ({shown['epsilon']}, {shown['delta']}), an upper bound "
            "by its privacy loss distribution, rounded up, as long as who takes part when stays secret"
        )


def least_noise(
    epsilon: float, delta: float, coarse: Callable[[float], Curve], fine: Callable[[float], Curve]
) -> float:
    """About the smallest noise multiplier that is (`epsilon`, `delta`)-DP by the curve `fine` of it.

    `coarse` and `fine` give upper bounds for a multiplier.  InputError where no multiplier up to a million is, and
    for a δ below 1e-10.
    """
    check_positive("epsilon", epsilon)
    check_resolvable_delta(delta)
    at = np.array([check_epsilon(epsilon)])
    return min_noise_multiplier(lambda z: float(coarse(z)(at)[0]), lambda z: float(fine(z)(at)[0]), delta)


def weakest(guarantees: Sequence[Guarantee]) -> Guarantee:
    """The guarantee that all of them give, of one or more; InputError where they cannot be compared."""
    if len({each.alike for each in guarantees}) > 1:
        raise InputError("a run is sampled throughout, in one way and at one rate for all rounds, or not at all")
    return max(guarantees, key=lambda each: each.leakage)


def mus_of(guarantees: Iterable[Guarantee]) -> list[float] | None:
    """The μ of each, which compose; None where one of them has none."""
    mus = [each.mu for each in guarantees]
    known = [mu for mu in mus if mu is not None]
    return known if len(known) == len(mus) else None


def gaussian_event(multiplier: float) -> Event:
    return {"class": "GaussianDpEvent", "noise_multiplier": multiplier}


def repeated_event(event: Event, count: int) -> Event:
    return event if count == 1 else {"class": "SelfComposedDpEvent", "event": event, "count": count}


DEFAULT_DELTA = 1e-5
"""δ at which ε is printed by default."""


def target_mu(
    mu: float | None = None,
    zcdp: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> float:
    """The Gaussian-DP parameter of the one target given: μ, zCDP's ρ, or ε together with δ (exact conversion).

    Raises InputError unless exactly one of the three is given and lies in its range.
    """
    if sum(value is not None for value in (mu, zcdp, epsilon)) != 1:
        raise InputError("privacy target: give exactly one of mu, zcdp, or epsilon with delta")
    if mu is not None:
        return check_mu(mu)
    if zcdp is not None:
        return renyi.mu_of_zcdp(zcdp)
    assert epsilon is not None
    gdp.check_epsilon(epsilon)
    if delta is None:
        raise InputError(f"epsilon = {epsilon}: an epsilon is a target only together with a delta, e.g. 1e-6")
    return gdp.mu_of(epsilon, delta)
