"""The low-rank bound on a mean of log-partition functions with explicit features."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from qbound import checks
from qbound.bounds import log_partition_bound
from qbound.curvature import LowRank
from qbound.low_rank.compress import METHODS, Method, checked_rank, compress_rows, nothing
from qbound.low_rank.sources import FeatureSource
from qbound.quadratic import QuadraticBound
from qbound.solve import times
from qbound.sums import sum_of_many
from qbound.types import Order, working_dtype

__all__ = ["low_rank_bound"]


def low_rank_bound(
    features: ArrayLike,
    theta: ArrayLike,
    *,
    rank: int,
    method: Method = "frequent_directions",
    order: Order = "descending",
    block_size: int | None = None,
) -> QuadraticBound:
    r"""A bound on the mean of log-partition functions with a curvature of low rank and a diagonal.

    .. math:: \frac1m \sum_j \log Z_j(\theta) \le \log z + \mu^\top (\theta - \tilde\theta)
        + \tfrac12 (\theta - \tilde\theta)^\top (V^\top S V + D) (\theta - \tilde\theta)

    Value and gradient are those of the full bound, and V'SV + D lies above its curvature Sigma: a product takes O(k d)
    and a solve O(k^2 d), and no d x d array is formed.

    Args:
      features: f_x(y) of m examples, shape (m, n, d).
      theta: the point of contact, shape (d,).
      rank: k, the number of rows of V. Above d, with a warning, the rows beyond d are zero.
      method: how what does not fit into k directions is accounted for.

        - "frequent_directions": in blocks of rows; D is a multiple of I, by which Sigma is exceeded at most. The
          fastest and, from a rank of about n - 1 on, by far the tightest;
        - "exact": row by row, the least of k + 1 principal directions is moved to the diagonal;
        - "paper": Algorithm 3 of [WC20] with its errors corrected; see docs/theory.md. It does not get tighter with k.

        With k at least the rank of Sigma the first two are equal to Sigma, up to rounding.
      order: of the labels; see `qbound.log_partition_bound`. "given" is the paper's.
      block_size: how many rows to take at a time, about; n - 1 come from each example. Any gives a bound.

    Returns:
      A bound that holds globally. Its curvature has `basis` (k, d), `scales` (k,) and `diagonal` (d,); it is made by
      eigendecompositions of matrices that may be singular, and is not meant to be differentiated.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> features = jax.random.normal(jax.random.key(0), (100, 3, 8))
      >>> bound = qbound.low_rank_bound(features, jnp.zeros(8), rank=4)
      >>> bound.curvature.basis.shape, bound.majorizes
      ((4, 8), 'globally')
      >>> x = jax.random.normal(jax.random.key(1), (8,))
      >>> bool(bound(x) >= jax.nn.logsumexp(features @ x, axis=1).mean())
      True
    """
    checks.choice("method", method, METHODS)
    features = checks.float_array("features", features, ["m", "n", "d"])
    features = features.astype(working_dtype(features))
    theta = checks.matching("theta", checks.float_array("theta", theta, ["d"]), features[0, 0])
    rank = checked_rank(rank, theta.size, stacklevel=2)
    block_size = None if block_size is None else checks.integer("block_size", block_size)
    bounds = jax.vmap(lambda h: log_partition_bound(h, order=order))(times(features, theta))
    m, n, d = features.shape
    weights = jnp.full((m,), 1 / m, features.dtype)
    source = FeatureSource(bounds.curvature, weights, features)
    return QuadraticBound(
        value=sum_of_many(bounds.value) / m,
        grad=sum_of_many((bounds.grad[:, :, None] * features).reshape(m * n, d)) / m,
        curvature=LowRank(
            *compress_rows(source, nothing(rank, d, features.dtype), method=method, block_size=block_size)
        ),
        point=theta,
        majorizes="globally",
    )
