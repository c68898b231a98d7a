"""Quadratic bounds on partition functions, in JAX."""

from qbound import mm
from qbound.curvature import Curvature
from qbound.families.classical import bohning_bound, local_bound, second_order_expansion
from qbound.families.low_rank.bound import low_rank_bound
from qbound.families.softmax import log_partition_bound, partition_function_bound
from qbound.fitting.fit import fit
from qbound.fitting.phases import Schedule as FitSchedule
from qbound.fitting.results import FitInfo
from qbound.models.linear import linear_logits
from qbound.optimizers.kspfb import KspfbInfo, ScaleByKspfbState, kspfb, scale_by_kspfb
from qbound.optimizers.lspfb import lspfb, scale_by_lspfb
from qbound.optimizers.spfb import ScaleBySpfbState, SpfbInfo, scale_by_spfb, spfb
from qbound.quadratic import QuadraticBound

__version__ = "0.1.0"

__all__ = [
    "Curvature",
    "FitInfo",
    "FitSchedule",
    "KspfbInfo",
    "QuadraticBound",
    "ScaleByKspfbState",
    "ScaleBySpfbState",
    "SpfbInfo",
    "bohning_bound",
    "fit",
    "kspfb",
    "linear_logits",
    "local_bound",
    "log_partition_bound",
    "low_rank_bound",
    "lspfb",
    "mm",
    "partition_function_bound",
    "scale_by_kspfb",
    "scale_by_lspfb",
    "scale_by_spfb",
    "second_order_expansion",
    "spfb",
]
