"""Curvatures: symmetric positive semidefinite operators, one representation a file."""

from qbound.curvature.base import Curvature
from qbound.curvature.centered import Centered
from qbound.curvature.combined import Batch, Scaled, Sum
from qbound.curvature.dense import Dense
from qbound.curvature.low_rank import LowRank
from qbound.curvature.model import ModelCurvature, Pieces
from qbound.curvature.pullback import Pullback

__all__ = [
    "Batch",
    "Centered",
    "Curvature",
    "Dense",
    "LowRank",
    "ModelCurvature",
    "Pieces",
    "Pullback",
    "Scaled",
    "Sum",
]
