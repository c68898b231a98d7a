"""Low-rank bounds: V'S V + D above the curvature of a batch, from its rows, with a certificate."""

from qbound.low_rank.bound import low_rank_bound
from qbound.low_rank.compress import METHODS, Method, checked_rank, low_rank

__all__ = ["METHODS", "Method", "checked_rank", "low_rank", "low_rank_bound"]
