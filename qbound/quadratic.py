"""`QuadraticBound`: a quadratic tangent to a log-partition function, and what can be done with it."""

from typing import Any, final

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature import Batch, Curvature, Pullback, Scaled, Sum
from qbound.linalg.dense import weighted_sum_of_many
from qbound.models.base import LinearMap
from qbound.models.features import as_linear_map
from qbound.records import record, static
from qbound.types import Majorizes, Parameters, Scalar


@final
@record
class QuadraticBound:
    r"""A quadratic q(x) = value + grad.(x - point) + 1/2 (x - point)' C (x - point).

    Made by `qbound.log_partition_bound` and its siblings; evaluated by calling it. A pytree, so it passes through
    `jit`, `vmap` and `scan`.

    Attributes:
      value: of the function and of the quadratic at `point`; log z in [WC20].
      grad: of both at `point`, with the structure of the argument; mu in [WC20].
      curvature: C, an operator with `mv`, `quadratic`, `dense`, `factor` and `solve`; Sigma in [WC20].
      point: where the quadratic touches, or None after a pullback without a point.
      origin: after a pullback without a point, the bound it came from and the map; None otherwise.
      radius: None unless `majorizes` is "within radius"; then how far any of the logits may rise above the mean of
        all displacements under the softmax at the point, as max(delta) - p.delta, for the bound to hold. It does
        whenever max(delta) - min(delta) <= radius. In a sum, every term has to keep within it.
      majorizes: where the quadratic is an upper bound: "globally", "within radius" or "no".
    """

    value: Float[Array, ""]
    grad: Parameters
    curvature: Curvature
    point: Parameters | None = None
    origin: tuple["QuadraticBound", LinearMap] | None = None
    radius: Float[Array, ""] | None = None
    majorizes: Majorizes = static(default="no")

    def __call__(self, x: Parameters) -> Float[Array, ""]:
        """The quadratic at `x`, which has to be finite, except at labels whose logit at the point is -inf.

        Those stay removed, whatever `x` says of them. For a batch of bounds, use `jax.vmap`.
        """
        checks.unbatched("bound", self.value, 0)
        if self.origin is not None:
            bound, linear_map = self.origin
            return bound(linear_map.forward(checks.matching_tree("x", x, linear_map.domain())))
        x = checks.matching_tree("x", x, self.point)
        unit = _unit(x, self.point, self.value.dtype)
        delta = jax.tree.map(lambda x, point: _displacement(x, point, unit), x, self.point)
        return unit * (self.value / unit + _dot(self.grad, delta) + unit * self.curvature.quadratic(delta) / 2)

    def pullback(
        self, features: Any, point: Parameters | None = None, *, affine: bool | None = None
    ) -> "QuadraticBound":
        r"""The same quadratic as a function of parameters whose logits are `features @ parameters`.

        .. math:: \mu = F^\top p, \qquad \Sigma = F^\top M F

        This is Theorem 1 of [WC20] when the features are f_x(y), one row for each label.

        Args:
          features: how parameters become logits, one of

            - an array (n, d);
            - a function from parameters to logits, which is linearised at `point`;
            - a pair of functions (forward, transpose) that are linear. If the bound is to leave a `jit` or `vmap`, hand
              over arrays the functions need in a `jax.tree_util.Partial`, not in a closure.

            Functions are part of the structure of the bound: a jitted function that takes one made of new functions
            is compiled anew, so build and use such a bound inside the same `jit`.
          point: the parameters that have this bound's point for logits, up to an offset that does not depend on them.
            Without it, `point` is None, the quadratic is evaluated at the logits `features @ x`, without any offset,
            and it cannot be added to others.
          affine: whether the logits are an affine function of the parameters. By default they are taken to be for an
            array and a pair, and not for a function. If they are not, the quadratic is a model of the linearised
            function: `majorizes` becomes "no".

        Returns:
          A bound with the same value, its gradient and curvature in parameter space.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import qbound
          >>> weights = jnp.zeros((3, 2))  # logistic regression: logits W x
          >>> def one_example(x):
          ...     bound = qbound.log_partition_bound(weights @ x)
          ...     return bound.pullback(lambda w: w @ x, weights, affine=True)
          >>> bound = jax.vmap(one_example)(jnp.array([[1.0, 2.0], [-1.0, 0.5]])).mean()
          >>> bound.grad.shape, bound.curvature.dense().shape, bound.majorizes
          ((3, 2), (6, 6), 'globally')
        """
        affine = not callable(features) if affine is None else affine
        if point is None and not affine:
            raise ValueError("point: expected the parameters where the logits were linearised; got None")
        linear_map = as_linear_map(features, self._one_vector(), point)
        grad = linear_map.transpose(self.grad)
        if point is not None:
            point = checks.matching_tree("point", point, grad)
        return QuadraticBound(
            value=self.value,
            grad=grad,
            curvature=Pullback(self.curvature, linear_map),
            point=point,
            origin=(self, linear_map) if point is None else None,
            radius=self.radius if affine else None,
            majorizes=self.majorizes if affine else "no",
        )

    def __add__(self, other: "QuadraticBound") -> "QuadraticBound":
        """The sum of two bounds with equal points; NaN throughout if the points differ."""
        if not isinstance(other, QuadraticBound):
            return NotImplemented
        checks.unbatched("bound", self.value, 0)
        checks.unbatched("bound", other.value, 0)
        point = self._point_to_add()
        other_point = checks.matching_tree("point of the second bound", other._point_to_add(), point)
        one = _one_if_equal(point, other_point).astype(self.value.dtype)
        return QuadraticBound(
            value=self.value + one * other.value,
            grad=jax.tree.map(lambda a, b: a + one * b, self.grad, other.grad),
            curvature=Sum((self.curvature, Scaled(other.curvature, one))),
            point=point,
            **_weakest(self, other),
        )

    def __radd__(self, other: object) -> "QuadraticBound":
        """0 + bound, so that Python's `sum` works."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __mul__(self, scale: Scalar) -> "QuadraticBound":
        """The bound on `scale` times the function, for scale >= 0 (NaN for an array that is not)."""
        checks.unbatched("bound", self.value, 0)
        scale = jnp.asarray(checks.nonnegative("scale", scale), self.value.dtype)
        return QuadraticBound(
            value=jnp.where(scale == 0, 0, scale * self.value),  # 0 even where the value is -inf
            grad=jax.tree.map(lambda leaf: scale.astype(leaf.dtype) * leaf, self.grad),
            curvature=Scaled(self.curvature, scale),
            point=self.point,
            origin=None if self.origin is None else (self.origin[0] * scale, self.origin[1]),
            radius=self.radius,
            majorizes=self.majorizes,
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: Scalar) -> "QuadraticBound":
        """`bound * (1 / divisor)`."""
        return self * (1 / checks.positive("divisor", divisor))

    def sum(self) -> "QuadraticBound":
        """The sum of a batch of bounds, as `vmap` returns it; NaN throughout if their points differ."""
        return self._combine(jnp.ones_like(self._batch_of_values()))

    def mean(self, weights: ArrayLike | None = None) -> "QuadraticBound":
        """The mean of a batch of bounds, as `sum`; with `weights` (b,) >= 0, not all zero, the weighted mean."""
        weights = jnp.ones_like(self._batch_of_values()) if weights is None else weights
        weights = checks.matching("weights", weights, self.value)
        weights = jnp.where(weights >= 0, weights, jnp.nan)
        return self._combine(weights / jnp.sum(weights))

    def _combine(self, weights: Array) -> "QuadraticBound":
        self._point_to_add()
        # The points are equal if their largest and smallest entries are; unlike indexing, this allows sharded batches.
        point, lowest = (jax.tree.map(lambda leaf, f=f: f(leaf, axis=0), self.point) for f in (jnp.max, jnp.min))
        weights = weights * _one_if_equal(point, lowest).astype(weights.dtype)
        return QuadraticBound(
            value=weighted_sum_of_many(weights, self.value),
            grad=weighted_sum_of_many(weights, self.grad),
            curvature=Batch(self.curvature, weights),
            point=point,
            radius=None if self.radius is None else jnp.min(self.radius),
            majorizes=self.majorizes,
        )

    def _batch_of_values(self):
        if self.value.ndim != 1 or self.value.size == 0:
            raise ValueError(
                f"bound: expected a batch made by vmap, with values of shape (b,), b >= 1; got shape {self.value.shape}"
            )
        return self.value

    def _point_to_add(self):
        if self.point is None:
            raise ValueError("point: expected bounds with a point to add; got None (pass point= to pullback)")
        return self.point

    def _one_vector(self):
        if not isinstance(self.grad, jax.Array) or self.grad.ndim != 1:
            raise ValueError(
                "bound: expected a bound of one vector of logits to pull back; got a gradient of shape "
                f"{jax.tree.map(jnp.shape, self.grad)} (use jax.vmap for batches)"
            )
        return self.grad


def _unit(x, point, dtype) -> Array:
    """In what to measure displacements: 1, or a power of 2 where their squares could overflow.

    A square that is infinite is NaN for a label without weight, though the quadratic is as good as any.
    """
    sizes = jax.tree.map(lambda x, point: jnp.max(jnp.where(point == -jnp.inf, 0, _larger(x, point))), x, point)
    size = jax.lax.stop_gradient(jax.tree.reduce(jnp.maximum, jax.tree.map(lambda s: s.astype(dtype), sizes)))
    largest = jnp.finfo(dtype).maxexp
    _, exponent = jnp.frexp(size)
    # 4 times too large, so that a difference of two such numbers is not above 1, or for the largest of all not above 8:
    # a compiler may multiply by 1/unit in place of dividing, and that is taken for 0 where it is subnormal.
    unit = jnp.ldexp(jnp.ones((), dtype), jnp.minimum(exponent + 2, largest - 2))
    return jnp.where((size > 2.0 ** (largest // 4)) & jnp.isfinite(size), unit, 1)


def _larger(x, point):
    return jnp.maximum(jnp.abs(x), jnp.abs(point))


def _displacement(x, point, unit):
    # For a removed label x - point would be infinite or, with both at -inf, NaN.
    unit = unit.astype(point.dtype)
    return jnp.where(point == -jnp.inf, 0, x / unit - point / unit)


def _dot(a, b):
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), a, b)
    return jax.tree.reduce(jnp.add, products)


def _one_if_equal(a: Parameters, b: Parameters) -> Array:
    """1, or NaN if the points differ: what belongs to different points must not add up to something plausible."""
    equal = jax.tree.map(lambda a, b: jnp.all(a == b), a, b)
    return jnp.where(jax.tree.reduce(jnp.logical_and, equal), 1.0, jnp.nan)


def _weakest(a: QuadraticBound, b: QuadraticBound) -> dict[str, Any]:
    """Where a sum majorizes: where both terms do."""
    radii = [bound.radius for bound in (a, b) if bound.radius is not None]
    if "no" in (a.majorizes, b.majorizes):
        return {"majorizes": "no", "radius": None}
    if not radii:
        return {"majorizes": "globally", "radius": None}
    return {"majorizes": "within radius", "radius": jnp.min(jnp.stack(radii))}
