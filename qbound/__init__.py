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
from qbound.optimizers.layer_factors import LeafAxes
from qbound.optimizers.layerwise import (
    LayerwiseInfo,
    ScaleByLayerwiseSpfbState,
    layerwise_spfb,
    scale_by_layerwise_spfb,
)
from qbound.optimizers.lspfb import lspfb, scale_by_lspfb
from qbound.optimizers.probes import curvature_trace
from qbound.optimizers.spfb import ScaleBySpfbState, SpfbInfo, scale_by_spfb, spfb
from qbound.quadratic import QuadraticBound

__version__ = "0.1.0"

__all__ = [
    "Curvature",
    "FitInfo",
    "FitSchedule",
    "KspfbInfo",
    "LayerwiseInfo",
    "LeafAxes",
    "QuadraticBound",
    "ScaleByKspfbState",
    "ScaleByLayerwiseSpfbState",
    "ScaleBySpfbState",
    "SpfbInfo",
    "bohning_bound",
    "curvature_trace",
    "fit",
    "kspfb",
    "layerwise_spfb",
    "linear_logits",
    "local_bound",
    "log_partition_bound",
    "low_rank_bound",
    "lspfb",
    "mm",
    "partition_function_bound",
    "scale_by_kspfb",
    "scale_by_layerwise_spfb",
    "scale_by_lspfb",
    "scale_by_spfb",
    "second_order_expansion",
    "spfb",
]
