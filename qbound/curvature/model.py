"""The curvature of a model on a batch: sum_j w_j J_j'M_j J_j, with J_j the Jacobian of the logits of example j."""

from collections.abc import Callable
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Array, Float

from qbound import checks, trees
from qbound.curvature.base import Curvature
from qbound.curvature.low_rank import LowRank
from qbound.linalg.cg import Solution, checked_solution, conjugate_gradients
from qbound.linalg.dense import HIGHEST, add_to_diagonal, safe_sqrt
from qbound.models.base import BatchMap, axis_flags, example_count, join, normalised, split
from qbound.models.linear import KroneckerMap, is_linear_logits, linearise, logits_shape
from qbound.records import record, static
from qbound.types import Scalar


@final
@record
class ModelCurvature(Curvature):
    """sum_j w_j J_j'M_j J_j, with one map for all examples: a product costs one `jvp` and one `vjp` of the batch.

    Unlike a `Batch` of pullbacks it has one vector of parameters, not one for each example.
    """

    logits: Curvature  # the M_j, one curvature whose arrays have a leading axis, as `vmap` returns it
    weights: Float[Array, " b"]
    map: BatchMap

    def domain(self):
        checks.unbatched("curvature", self.weights, 1)
        return self.map.domain()

    def _mv(self, v):
        u = jax.vmap(lambda m, u: m._mv(u))(self.logits, self._along(v))
        return self.map.transpose(trees.weighted(self.weights, u))

    def _quadratic(self, v):
        return trees.weighted_sum(self.weights, jax.vmap(lambda m, u: m._quadratic(u))(self.logits, self._along(v)))

    def _dense(self):
        return self.map.sandwich(self._factors())

    def _factor(self):
        return self.map.rows(self._factors())

    def _solve(self, g, damping):
        """By whichever space is the smaller: of the parameters, or of examples and labels."""
        b, n = self.map.shape()
        return self.solve_by_rows(g, damping) if b * n < trees.size(self.domain()) else self.solve_dense(g, damping)

    def solve_by_rows(self, g: Any, damping: Any) -> Any:
        """By Woodbury's identity in the space of the rows R of `factor`: O((b n)^2 p + (b n)^3).

        s = (g - R'(RR' + c I)^-1 R g)/c, where R g and R'y are products with J. A rounding error of the difference in
        the space of the rows counts |RR'|/c times as much, which for small damping leaves no digit in float32: so the
        residual is solved for once more. A batch of one of a linear model has the closed form of
        `KroneckerMap.solve_one`.
        """
        g = self._vector("g", g)
        c = jnp.asarray(checks.positive("damping", damping), self.weights.dtype)
        if isinstance(self.map, KroneckerMap) and self.weights.size == 1:
            weight = self.weights[0]
            one = jax.tree.map(lambda leaf: leaf[0], self.logits)
            return self.map.solve_one(one, trees.scale(1 / weight, g), c / weight)
        factors = self._factors()
        cholesky = cho_factor(add_to_diagonal(self.map.row_products(factors), c))

        def woodbury(g):
            rows_of_g = jnp.einsum("jrn,jn->jr", factors, self.map.forward(g), precision=HIGHEST)
            y = cho_solve(cholesky, rows_of_g.reshape(-1)).reshape(rows_of_g.shape)
            back = self.map.transpose(jnp.einsum("jrn,jr->jn", factors, y, precision=HIGHEST))
            return trees.scale(1 / c, jax.tree.map(jnp.subtract, g, back))

        s = woodbury(g)
        residual = jax.tree.map(jnp.subtract, g, trees.add_scaled(self._mv(s), c, s))
        return trees.add(s, woodbury(residual))

    def _along(self, v) -> Array:
        """The displacement of logits, in the dtype of their curvature."""
        return self.map.forward(v).astype(self.weights.dtype)

    def _factors(self) -> Array:
        """sqrt(w_j) F_j with F_j'F_j = M_j."""
        factors = jax.vmap(lambda m: m._factor())(self.logits)
        return trees.weighted(safe_sqrt(self.weights), factors)


@final
@record
class Pieces(Curvature):
    """The sum of curvatures made from the pieces of a batch, one after the other, so that memory is that of one piece.

    `make(shared, piece)` is called anew in every product: nothing of a piece is kept.
    """

    shared: Any
    pieces: Any  # a tree of arrays with a leading axis of pieces
    make: Callable[[Any, Any], Curvature] = static()
    parameters: tuple = static()  # their structure, and the shape and dtype of each leaf
    rows: tuple[int, int] = static()  # of logits in all pieces, and how many labels each has
    axes: tuple[int, ...] = static()  # how many axes each of the arrays of `pieces` has

    def domain(self):
        for array, axes in zip(jax.tree.leaves(self.pieces), self.axes, strict=True):
            checks.unbatched("curvature", array, axes)
        structure, leaves = self.parameters
        return structure.unflatten(leaves)

    def _mv(self, v):
        return self._sum(lambda curvature: curvature._mv(v))

    def _quadratic(self, v):
        return self._sum(lambda curvature: curvature._quadratic(v))

    def _dense(self):
        return self._sum(lambda curvature: curvature._dense())

    def _factor(self):
        rows = jax.lax.map(lambda piece: self.make(self.shared, piece)._factor(), self.pieces)
        return rows.reshape(-1, rows.shape[-1])

    def _solve(self, g, damping):
        return self.solve_dense(g, damping)

    def _sum(self, function):
        def of_piece(piece):
            return function(self.make(self.shared, piece))

        one = jax.eval_shape(of_piece, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.pieces))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)
        total, _ = jax.lax.scan(lambda total, piece: (trees.add(total, of_piece(piece)), None), zero, self.pieces)
        return total


# The curvature of a model on a batch, whole or in pieces; the one place that says mean.
#
# Inputs are any tree of arrays. Its leaves have a leading axis of examples, except those that all examples share, such
# as parameters that are not trained: `axes` says which, as `in_axes` of `jax.vmap` does.


def mean_curvature(
    logits_fn: Callable,
    params: Any,
    inputs: Any,
    weights: Float[Array, "..."],
    *,
    bound: Callable[[Float[Array, " n"]], Any],
    axes: Any = 0,
    microbatch_size: int | None = None,
) -> Curvature:
    """sum_j w_j J_j'M_j J_j / sum_j w_j over examples, and over the positions of sequences, at `params`.

    Args:
      logits_fn: the model.
      params: in float32 at least.
      inputs: a batch.
      weights: one for each row of logits, as `full_weights` returns them; nonnegative and not all 0, or all is NaN.
      bound: from one vector of logits to the quadratic whose curvature is M_j.
      axes: which leaves of `inputs` have an axis of examples.
      microbatch_size: the most examples to linearise at a time.
    """
    weights = normalised(weights)
    if microbatch_size is None or microbatch_size >= example_count("inputs", inputs, axes):
        return _weighted_curvature(logits_fn, bound, params, inputs, weights)

    return _in_pieces_curvature(logits_fn, bound, params, inputs, weights, axes, microbatch_size)


def curvature_by_example(
    logits_fn: Callable,
    params: Any,
    inputs: Any,
    weights: Float[Array, "..."],
    *,
    bound: Callable[[Float[Array, " n"]], Any],
    axes: Any = 0,
) -> Curvature:
    """As `mean_curvature`, in the form whose rows can be had a few at a time.

    For `linear_logits` that is the whole batch, whose rows need not be formed. For any other model, pieces of one
    example: a row of its Jacobian is then one `vjp` of one example.
    """
    if is_linear_logits(logits_fn, params, inputs):
        return _weighted_curvature(logits_fn, bound, params, inputs, normalised(weights))
    return _in_pieces_curvature(logits_fn, bound, params, inputs, normalised(weights), axes, 1)


def _in_pieces_curvature(logits_fn, bound, params, inputs, weights, axes, microbatch_size) -> Pieces:
    structure = jax.tree.structure(inputs)
    flags = axis_flags("inputs", inputs, axes)
    examples, shared = split("inputs", inputs, axes)
    pieces = [_in_pieces(leaf, microbatch_size, "edge") for leaf in examples]
    pieces.append(_in_pieces(weights, microbatch_size, "constant"))

    def make(shared, piece):
        params, shared_inputs = shared
        *examples, weights = piece
        inputs = join(structure, flags, examples, shared_inputs)
        return _weighted_curvature(logits_fn, bound, params, inputs, weights)

    return Pieces(
        shared=(params, shared),
        pieces=pieces,
        make=make,
        parameters=trees.shapes(params),
        rows=(weights.size, logits_shape(logits_fn, params, inputs)[-1]),
        axes=tuple(piece.ndim for piece in pieces),
    )


def _weighted_curvature(logits_fn, bound, params, inputs, weights):
    """sum_j w_j J_j'M_j J_j."""
    logits, linear_map = linearise(logits_fn, params, inputs)
    terms = jax.vmap(lambda h: bound(h).curvature)(logits)
    return ModelCurvature(terms, weights.reshape(-1).astype(logits.dtype), linear_map)


def _in_pieces(array, size, mode):
    """(m, ...) as (pieces, size, ...). The last piece is filled up with copies of the last example, of weight 0."""
    pieces = -(-array.shape[0] // size)
    padding = [(0, pieces * size - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, padding, mode=mode).reshape(pieces, size, *array.shape[1:])


# Solvers of (C + c I) s = g for the curvature of a model, by name or by a cost model.
#
# In multiplications, for b rows of n labels and p parameters, each used once for every row as in a linear model:
#
#   cg          2 b p (steps + 1)              a jvp and a vjp for every step, and for the residual
#   dense       b n^2 p + b n p^2 + p^3/3      rows of the factor, their Gram matrix, Cholesky
#   woodbury    b n^2 p + (b n)^2 p + (b n)^3/3
#
# For `qbound.linear_logits` with d inputs the Gram matrices are Kronecker products: b n^2 d^2 for dense, b^2 d + b^2
# n^3 for woodbury, with no rows formed; and a batch of one costs woodbury O(n + p). "auto" takes the cheaper of the
# direct solvers if it is at most `DIRECT_ADVANTAGE` times as expensive as `max_steps` of CG, and CG otherwise. A low-
# rank curvature has a direct solver of its own.

Solver = Literal["auto", "dense", "woodbury", "cg"]

SOLVERS = ("auto", "dense", "woodbury", "cg")

# Direct solvers are exact, and their matrix products run at several times the speed of the narrow ones of CG.
DIRECT_ADVANTAGE = 8

# Direct solvers for a general model hold its Jacobian: no more than this many numbers.
JACOBIAN_LIMIT = 2**26


def solve_damped(
    solver: Solver,
    curvature: Curvature,
    g: Any,
    damping: Float[Array, ""],
    *,
    max_steps: int,
    tolerance: Scalar,
    precondition: Callable[[Any], Any] | None = None,
    start: Any | None = None,
) -> Solution:
    """(curvature + damping I)^-1 g."""

    def product(v):
        return trees.add_scaled(curvature._mv(v), damping, v)

    if isinstance(curvature, LowRank):
        return checked_solution(product, g, curvature.solve(g, damping), jnp.zeros((), jnp.int32))
    if solver == "auto":
        solver = "cg" if precondition is not None else choose_solver(curvature, max_steps)
    if solver == "cg":
        return conjugate_gradients(
            product,
            g,
            max_steps=max_steps,
            tolerance=tolerance,
            precondition=precondition,
            start=start,
        )
    if solver == "woodbury" and not isinstance(curvature, ModelCurvature):
        raise ValueError('solver: expected "dense" or "cg" for a batch in pieces (microbatch_size=); got "woodbury"')
    by_name = {"dense": lambda c: c.solve_dense(g, damping), "woodbury": lambda c: c.solve_by_rows(g, damping)}
    return checked_solution(product, g, by_name[solver](curvature), jnp.zeros((), jnp.int32))


def choose_solver(curvature: Curvature, max_steps: int) -> Solver:
    """The solver the cost model picks."""
    p = trees.size(curvature.domain())
    if isinstance(curvature, Pieces):
        return "dense" if cheapest(*curvature.rows, p, False, max_steps) == "dense" else "cg"
    assert isinstance(curvature, ModelCurvature)
    return cheapest(*curvature.map.shape(), p, isinstance(curvature.map, KroneckerMap), max_steps)


def cheapest(b: int, n: int, p: int, kronecker: bool, max_steps: int) -> Solver:
    """The solver the cost model picks for b rows of n labels and p parameters."""
    if kronecker:
        if b == 1:
            return "woodbury"
        d = p / n
        dense, woodbury = b * n**2 * d**2, b**2 * d + b**2 * n**3
    else:
        if b * n * p > JACOBIAN_LIMIT:
            return "cg"
        rows = b * n**2 * p
        dense, woodbury = rows + b * n * p**2, rows + (b * n) ** 2 * p
    dense, woodbury = dense + p**3 / 3, woodbury + (b * n) ** 3 / 3
    cg = 2 * b * p * (max_steps + 1)
    if min(dense, woodbury) > DIRECT_ADVANTAGE * cg:
        return "cg"
    return "dense" if dense <= woodbury else "woodbury"
