"""From a cell to the lattice, the integers and the noise of a run whose releases are exact."""

from dataclasses import replace

from fedpriv.errors import InputError
from fedpriv.estimators.gradients import Estimator
from fedpriv.exact.factored import FactoredDifferences, factored
from fedpriv.exact.plan import ExactPlan, ExactRun, fitted
from fedpriv.mechanisms import Mechanism, Workload
from fedpriv.objectives import Objective
from fedpriv.privacy.ledger import Integers, RunningSums
from fedpriv.privacy.trust import Noise, NoiseSource, Trust
from fedpriv.randomness import SERVER
from fedpriv.scenario import Cell

MOST_SLACK = 2.0**-60
"""Of a claim, in total variation: what reports call it."""
_SAFE = 1.0 - 2.0**-38
"""Less than what rounding to the safe side adds to μ: what is recorded stays within what was asked for."""


def exact_plan_of(
    cell: Cell, objective: Objective, estimator: Estimator, mechanism: Mechanism, workload: Workload
) -> ExactPlan:
    """InputError, naming the algorithm and the reason, for a run whose releases cannot be made of integers.

    Guarantee: the recorded μ is not above the cell's target, and the slack not above 2^-60.
    """
    name, schedule, trust, target = (
        cell.algorithm.row.name,
        cell.schedule,
        cell.algorithm.trust_setting,
        cell.target,
    )
    assert target is not None  # of a run without noise nothing is exact
    blocks = mechanism.blocks(workload)
    if schedule.secret and not (workload.decay == 0.0 and blocks is not None and blocks.bands == 1):
        raise InputError(
            f"{name}: releases of integers with {schedule.name} sampling are accounted for where every round is "
            "released by itself, with independent noise; take such an algorithm, or leave out federation.sampling"
        )
    sums = RunningSums(mechanism, workload, cell.privacy.relation)
    known = RunningSums(mechanism, replace(workload, schedule=schedule.known), sums.relation)
    apart = 1.0 if schedule.known is schedule else known.sensitivity() / schedule.distance(sums)
    mu = schedule.charged(sums.relation, target, cell.privacy.delta) * apart
    unit = cell.privacy.protected
    mu = unit.of_one_silo(mu) if trust.private_messages else mu / unit.shared  # of its records in one silo
    sizes, rounds = cell.batch_sizes, range(1, schedule.rounds + 1)
    together = max(sizes) if trust.private_messages else sum(sizes)
    try:
        form = factored(mechanism, known.workload)
        if (estimator.round(1).split is not None) != isinstance(form, FactoredDifferences):
            raise InputError(f"{mechanism.name} noise on increments that are clipped in parts")
        exact = fitted(
            ExactRun(
                form,
                tuple(together * schedule.most_batches(t) for t in rounds),
                objective.dimension,
                cell.privacy.relation,
                mu * _SAFE,
                owners=len(sizes) if trust.masked else 1,
                word=cell.run.word if trust.masked else 64,
            )
        )
    except InputError as error:
        raise InputError(f"{name}: what it releases cannot be made of integers: {error}") from None
    if exact.claim.slack > MOST_SLACK / (2 if cell.budget.beside else 1):  # the other step has its own
        raise InputError(f"{name}: {schedule.rounds} rounds of {objective.dimension} values are too many")
    return exact


def noise_of(exact: ExactPlan, trust: Trust, batch_sizes: tuple[int, ...]) -> Noise:
    """Every owner's noise in the units of the model; that in the mean follows from it."""
    std, total = exact.lattice.unit * exact.claim.sigma, sum(batch_sizes)
    if trust.noise_at_server:
        return Noise((NoiseSource(SERVER, std / total, 1.0),))
    return Noise(tuple(NoiseSource(silo, std / size, size / total) for silo, size in enumerate(batch_sizes)))


def integers_of(exact: ExactPlan, owners: int) -> Integers:
    """What a ledger keeps of it, for noise of so many owners."""
    return Integers(exact.lattice.exponent, exact.claim.sigma, exact.run.dimension, owners)
