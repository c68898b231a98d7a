"""Linear softmax models on large data: blocks of rows, sparse inputs, and fits in two phases."""

from qbound.linear.design import Dense, Design
from qbound.linear.fit import Fit, Phase, Progress, fit
from qbound.linear.objective import Data
from qbound.linear.sparse import Sparse
from qbound.linear.stream import Stream, consume, first_stream, rescaled

__all__ = [
    "Data",
    "Dense",
    "Design",
    "Fit",
    "Phase",
    "Progress",
    "Sparse",
    "Stream",
    "consume",
    "first_stream",
    "fit",
    "rescaled",
]
