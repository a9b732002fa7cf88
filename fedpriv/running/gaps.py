"""Which rows can go on where a silo missed rounds."""

from fedpriv.errors import InputError
from fedpriv.estimators.gradients import Estimator
from fedpriv.mechanisms import Mechanism
from fedpriv.scenario import Cell


def check_gaps(cell: Cell, estimator: Estimator, mechanism: Mechanism) -> None:
    """InputError for a run that is to go on without a silo, and cannot: see `survives_gaps`."""
    if (key := cell.without_silos) is not None and not survives_gaps(estimator, mechanism):
        raise InputError(
            f"{key}: {cell.algorithm.row.name} cannot go on without a silo: its sums restart, or are taken apart, "
            "or its silos step by themselves, or its privacy rests on how far queries move between rounds"
        )


def survives_gaps(estimator: Estimator, mechanism: Mechanism) -> bool:
    """Whether a silo may skip rounds: its next increment then starts at the query that it answered last."""
    first = estimator.round(1)
    plain = estimator.period is None and first.split is None and first.local is None
    return plain and mechanism.movement is None and mechanism.draws(1) is None
