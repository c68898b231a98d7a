"""Stochastic second-order methods as optax transforms."""

from qbound.transforms.kspfb import kspfb, scale_by_kspfb
from qbound.transforms.kspfb_step import KspfbInfo, ScaleByKspfbState
from qbound.transforms.lspfb import lspfb, scale_by_lspfb
from qbound.transforms.spfb import scale_by_spfb, spfb
from qbound.transforms.step import ScaleBySpfbState, SpfbInfo

__all__ = [
    "KspfbInfo",
    "ScaleByKspfbState",
    "ScaleBySpfbState",
    "SpfbInfo",
    "kspfb",
    "lspfb",
    "scale_by_kspfb",
    "scale_by_lspfb",
    "scale_by_spfb",
    "spfb",
]
