"""Quadratic bounds on partition functions, in JAX."""

from qbound import mm
from qbound.bounds import (
    bohning_bound,
    local_bound,
    log_partition_bound,
    partition_function_bound,
    second_order_expansion,
)
from qbound.curvature import Curvature
from qbound.low_rank import low_rank_bound
from qbound.models import linear_logits
from qbound.quadratic import QuadraticBound
from qbound.transforms import (
    KspfbInfo,
    ScaleByKspfbState,
    ScaleBySpfbState,
    SpfbInfo,
    kspfb,
    lspfb,
    scale_by_kspfb,
    scale_by_lspfb,
    scale_by_spfb,
    spfb,
)

__version__ = "0.1.0"

__all__ = [
    "Curvature",
    "KspfbInfo",
    "QuadraticBound",
    "ScaleByKspfbState",
    "ScaleBySpfbState",
    "SpfbInfo",
    "bohning_bound",
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
