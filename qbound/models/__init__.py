"""From parameters to logits: the first of the two seams."""

from qbound.models.base import BatchMap, JacobianMap, LinearMap
from qbound.models.linear import KroneckerMap, linear_logits, linearise

__all__ = ["BatchMap", "JacobianMap", "KroneckerMap", "LinearMap", "linear_logits", "linearise"]
