"""Guarantees of a stream of releases, and privacy targets as a person states them.

A kind of guarantee is one class with the members of `Guarantee`: its figures at δ, its group privacy, its charge
to a lifetime budget, and its descriptions.
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
"""Event of dp-accounting as plain data: its "class", and its fields."""
ADD_OR_REMOVE, REPLACE = "ADD_OR_REMOVE_ONE", "REPLACE_ONE"
"""Neighbouring relations of dp-accounting's accountants."""


class Guarantee(Protocol):
    """Guarantee of a stream of releases: a value whose figures are computed on demand."""

    kind: ClassVar[str]
    """Name of the kind in results."""

    @property
    def mu(self) -> float | None:
        """μ if transcripts are at least as hard to tell apart as N(0, 1) from N(μ, 1), or None if unknown."""
        ...

    @property
    def best_guess(self) -> float:
        """Upper bound of the probability of guessing right which of two equally likely neighbours was used."""
        ...

    @property
    def alike(self) -> Hashable:
        """Key that two guarantees must share so that `leakage` decides which of them protects less."""
        ...

    @property
    def leakage(self) -> float:
        """Number that is larger for the guarantee that protects less, of two with equal `alike`."""
        ...

    @property
    def note(self) -> str:
        """Note for a report beside the figures, or empty if the figures need none."""
        ...

    def __hash__(self) -> int: ...

    def epsilon_of(self, delta: float) -> float:
        """Return the smallest known ε for which (ε, `delta`)-DP holds."""
        ...

    def epsilon_of_group(self, size: int, delta: float) -> float:
        """Return the smallest known ε for which (ε, `delta`)-DP holds for `size` units together.

        Args:
            size: Number of units, 1 or more.
            delta: δ, strictly between 0 and 1.
        """
        ...

    def figures(self, delta: float) -> dict[str, float | None]:
        """Return mu, zcdp, epsilon and epsilon_paper, as in results, or None for a figure that does not exist."""
        ...

    def conversions(self, delta: float) -> dict[str, float]:
        """Return figures at `delta` for the accounting commands, by name."""
        ...

    def charge(self, slack: float) -> ApproximateGDP:
        """Return the charge to a lifetime budget.

        Args:
            slack: Slack of the charge, for guarantees without a μ.

        Raises:
            InputError: No μ is known for this slack.
        """
        ...

    def format_clause(self, texts: Mapping[str, str], attained: bool) -> str:
        """Return a clause of a sentence from formatted figures.

        Args:
            texts: Formatted figures by name: those of `figures`, delta, and optionally counted_mu.
            attained: Whether no smaller figures hold.
        """
        ...

    def event(self) -> tuple[str, Event] | None:
        """Return dp-accounting's neighbouring relation, and the event that dominates the releases, or None."""
        ...


Promise = TypeVar("Promise", bound=Guarantee, covariant=True)


@dataclass(frozen=True)
class GaussianDP:
    """μ-GDP: transcripts of neighbours are at least as hard to tell apart as N(0, 1) from N(μ, 1).

    Raises:
        InputError: μ is negative or not finite.

    Example:
        >>> guarantee = GaussianDP(1.0)
        >>> round(guarantee.epsilon_of(1e-5), 4), guarantee.zcdp, round(guarantee.best_guess, 4)
        (4.3772, 0.5, 0.6915)
    """

    mu: float
    """Parameter μ of all releases together, 0 or more."""

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
        """Return the smallest ε for which μ-GDP implies (ε, `delta`)-DP, rounded up."""
        return gdp.epsilon_of(self.mu, delta)

    def epsilon_of_group(self, size: int, delta: float) -> float:
        return gdp.epsilon_of(group_mu(self.mu, size), delta)

    def figures(self, delta: float) -> dict[str, float | None]:
        return {
            "mu": self.mu,
            "zcdp": self.zcdp,
            "epsilon": self.epsilon_of(delta),
            "epsilon_paper": renyi.paper_epsilon(self.mu, delta),
        }

    def conversions(self, delta: float) -> dict[str, float]:
        """Return (ε, δ)-DP by the exact conversion, by a Rényi accountant's, and by the papers' formula."""
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

    def format_clause(self, texts: Mapping[str, str], attained: bool) -> str:
        """Format μ, zCDP and (ε, δ), and beside them the ε of the papers' formula.

        Args:
            texts: Numbers as texts, by the names "mu", "epsilon", "delta", "zcdp" and "epsilon_paper", and by
                "counted_mu" if μ is charged by a paper's constants and exact counting has another one.
            attained: Whether μ is exact, and not an upper bound.
        """
        mu, epsilon, delta = texts["mu"], texts["epsilon"], texts["delta"]
        clause = f"μ-GDP exactly with μ = {mu}" if attained else f"μ-GDP with μ at most {mu}"
        if "counted_mu" in texts:
            clause += f", as the paper's constants charge it, and by exact counting {texts['counted_mu']}"
        pair = f"(ε, δ) = ({epsilon}, {delta}) exact" if attained else f"(ε, δ) at most ({epsilon}, {delta})"
        by_formula = f"({texts['epsilon_paper']}, {delta}) by the paper's formula, rounded up"
        return f"{clause} (zCDP {texts['zcdp']}); {pair}, {by_formula}"

    def event(self) -> tuple[str, Event]:
        """Return the event of the Gaussian mechanism under add-or-remove-one, for μ above 0.

        Under replace-one it is the same, since μ includes the factor of the relation.
        """
        return ADD_OR_REMOVE, gaussian_event(1.0 / self.mu)


class Curved:
    """Guarantee by a curve of (ε, δ), without a μ.  All figures are upper bounds."""

    if TYPE_CHECKING:  # properties, or fields of dataclasses

        @property
        def curve(self) -> Curve: ...

    note: ClassVar[str] = "No μ describes that: ε and the best guess are upper bounds."

    @property
    def mu(self) -> None:
        return None

    @property
    def best_guess(self) -> float:
        return min(1.0, (1.0 + self.delta_of(0.0)) / 2.0 * (1.0 + 1e-15))

    def epsilon_of(self, delta: float) -> float:
        """Return an upper bound of the smallest ε for which (ε, `delta`)-DP holds, `delta` ≥ 1e-10."""
        return epsilon_at(self.curve, delta)

    def delta_of(self, epsilon: float) -> float:
        """Return an upper bound of the smallest δ for which (`epsilon`, δ)-DP holds."""
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
    """Guarantee of secret participation, as long as it stays secret which units take part in which rounds."""

    noise_multiplier: float
    """σ / clip, or σ / max_t (clip_t ‖C_t‖) for correlated noise of a matrix with the columns C_t."""

    if TYPE_CHECKING:

        @property
        def relation(self) -> Relation: ...

        @property
        def times(self) -> int: ...

    kind: ClassVar[str]
    title: ClassVar[str]
    """Name of the participation in a sentence."""
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
        """μ of the same noise if everybody knows the `times` rounds in which a unit takes part."""
        return RELATION_FACTOR[self.relation] * (math.sqrt(self.times) / self.noise_multiplier * (1.0 + 1e-15))

    def group_curve(self, size: int) -> Curve | None:
        """Return the curve of `size` units together, or None.

        With None, group privacy follows from the chain of neighbours and from `known_mu` alone.
        """
        check_group_size(size)
        return None

    def epsilon_of_group(self, size: int, delta: float) -> float:
        known_epsilon = gdp.epsilon_of(group_mu(self.known_mu, size), delta)
        curve = self.group_curve(size)
        bounds = [known_epsilon, super().epsilon_of_group(size, delta)]
        return min(bounds if curve is None else [*bounds, epsilon_at(curve, delta)])

    def conversions(self, delta: float) -> dict[str, float]:
        return {"noise_multiplier": self.noise_multiplier, **super().conversions(delta)}

    def format_clause(self, texts: Mapping[str, str], attained: bool) -> str:
        return (
            f"{self.title}, which no μ describes; (ε, δ) = ({texts['epsilon']}, {texts['delta']}), an upper bound "
            "by its privacy loss distribution, rounded up, as long as who takes part when stays secret"
        )


def least_noise(
    epsilon: float, delta: float, coarse: Callable[[float], Curve], fine: Callable[[float], Curve]
) -> float:
    """Return about the smallest noise multiplier of 0.1 or more that is (`epsilon`, `delta`)-DP by `fine`.

    Args:
        epsilon: Target ε, above 0.
        delta: Target δ, 1e-10 or more.
        coarse: Function of a multiplier -> its privacy curve, a loose one that is quick to compute.
        fine: Function of a multiplier -> a tighter privacy curve.

    Raises:
        InputError: The search finds no multiplier up to a million, a curve refuses one that is tried, or ε or δ is
            out of its range.
    """
    check_positive("epsilon", epsilon)
    check_resolvable_delta(delta)
    epsilons = np.array([check_epsilon(epsilon)])
    return min_noise_multiplier(
        lambda z: float(coarse(z)(epsilons)[0]), lambda z: float(fine(z)(epsilons)[0]), delta
    )


def weakest(guarantees: Sequence[Guarantee]) -> Guarantee:
    """Return the guarantee that protects least, which each of these guarantees implies.

    Args:
        guarantees: One or more guarantees.

    Raises:
        InputError: Two of the guarantees cannot be compared, because they differ in `alike`.

    Example:
        >>> weakest([GaussianDP(1.0), GaussianDP(2.0)])
        GaussianDP(mu=2.0)
    """
    if len({guarantee.alike for guarantee in guarantees}) > 1:
        raise InputError("a run is sampled throughout, in one way and at one rate for all rounds, or not at all")
    return max(guarantees, key=lambda guarantee: guarantee.leakage)


def mus_of(guarantees: Iterable[Guarantee]) -> list[float] | None:
    """Return the μ of each guarantee in their order, or None if one of them has no μ.

    Example:
        >>> mus_of([GaussianDP(1.0), GaussianDP(2.0)])
        [1.0, 2.0]
    """
    mus = [guarantee.mu for guarantee in guarantees]
    defined_mus = [mu for mu in mus if mu is not None]
    return defined_mus if len(defined_mus) == len(mus) else None


def gaussian_event(multiplier: float) -> Event:
    """Return the dp-accounting event of a Gaussian mechanism with this noise multiplier.

    Example:
        >>> gaussian_event(2.0)
        {'class': 'GaussianDpEvent', 'noise_multiplier': 2.0}
    """
    return {"class": "GaussianDpEvent", "noise_multiplier": multiplier}


def repeated_event(event: Event, count: int) -> Event:
    """Return the dp-accounting event of `count` repetitions of an event.

    Args:
        event: Event as plain data.
        count: Number of repetitions, 1 or more.

    Returns:
        The event itself if `count` is 1.

    Example:
        >>> repeated_event(gaussian_event(2.0), 10)["count"]
        10
    """
    return event if count == 1 else {"class": "SelfComposedDpEvent", "event": event, "count": count}


DEFAULT_DELTA = 1e-5
"""Default δ at which ε is printed."""


def target_mu(
    mu: float | None = None,
    zcdp: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> float:
    """Return the Gaussian-DP parameter of a privacy target.

    Exactly one of μ, ρ and ε is given.

    Args:
        mu: μ of Gaussian DP.
        zcdp: ρ of zero-concentrated DP.
        epsilon: ε of (ε, δ)-DP, together with `delta`.
        delta: δ of (ε, δ)-DP, ignored without ε.

    Raises:
        InputError: Not exactly one target is given, ε is given without a δ, or a number is out of its range.

    Example:
        >>> target_mu(zcdp=0.5), round(target_mu(epsilon=1.0, delta=1e-5), 4)
        (1.0, 0.2681)
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
