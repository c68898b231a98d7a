"""Low-rank bounds: V'S V + D above the curvature of a batch, from its rows, with a certificate."""

from qbound.families.low_rank.bound import METHODS, Method, checked_rank, low_rank, low_rank_bound

__all__ = ["METHODS", "Method", "checked_rank", "low_rank", "low_rank_bound"]
