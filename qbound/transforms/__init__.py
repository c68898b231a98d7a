"""Stochastic second-order methods as optax transforms."""

from qbound.transforms.lspfb import lspfb, scale_by_lspfb
from qbound.transforms.spfb import scale_by_spfb, spfb
from qbound.transforms.step import ScaleBySpfbState, SpfbInfo

__all__ = ["ScaleBySpfbState", "SpfbInfo", "lspfb", "scale_by_lspfb", "scale_by_spfb", "spfb"]
