"""Server optimizers, one file each."""

from fedpriv.optimizers.adaptive_server import FedAdagrad, FedAdam, FedYogi
from fedpriv.optimizers.anytime_sgd import AnytimeSGD
from fedpriv.optimizers.base import Optimizer
from fedpriv.optimizers.local_averaging import LocalAveraging
from fedpriv.optimizers.nesterov_coupling import NesterovCoupling
from fedpriv.optimizers.normalized_sgd import NormalizedSGD
from fedpriv.optimizers.o2nc import O2NC
from fedpriv.optimizers.phased import PhasedSGD
from fedpriv.optimizers.projected_sgd import ProjectedSGD
from fedpriv.optimizers.quantile_clip import QuantileClipping
from fedpriv.optimizers.regularized_leader import FollowTheRegularizedLeader

__all__ = [
    "O2NC",
    "AnytimeSGD",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
    "FollowTheRegularizedLeader",
    "LocalAveraging",
    "NesterovCoupling",
    "NormalizedSGD",
    "Optimizer",
    "PhasedSGD",
    "ProjectedSGD",
    "QuantileClipping",
]
