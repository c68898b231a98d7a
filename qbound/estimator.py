"""Logistic regression with scikit-learn's interface: safe, fast, and with nothing to tune."""

import contextlib
import math
import warnings
from typing import Any, cast

try:
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("qbound.estimator needs scikit-learn: pip install 'qbound[sklearn]'") from error

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import validate_data

from qbound.fitting.objective import Data, LinearObjective
from qbound.fitting.phases import Fitted, minimise
from qbound.fitting.results import FitInfo, Result
from qbound.fitting.stream import Stream, consume, first_stream, rescaled
from qbound.models.inputs import DenseInputs, SparseInputs, csr_without
from qbound.scikit_learn import arguments as parameters
from qbound.scikit_learn.arguments import Weights, class_weights, equal_weights, sample_weights, weights_of
from qbound.scikit_learn.classifier import PHASES, LinearClassifier, ProgressBar, all_or_nothing
from qbound.scikit_learn.threads import one_thread

__all__ = ["LogisticRegression"]

# Up to this many numbers, inputs are filled up with rows of weight 0 to one of few sizes: compiling takes longer than
# fitting, and the folds of a cross-validation, or the parts of a learning curve, then share their programs.
_PADDED_SIZE = 1 << 20
# The most examples, numbers and logits in a batch of a stream.
_STREAM_ROWS, _STREAM_NUMBERS, _STREAM_LOGITS = 1000, 1 << 25, 1 << 22
# From this many columns on, factorisations take their time.
_FACTORISED = 100
_PARAMETERS = {
    "C": parameters.number("a number above 0", lambda value: value > 0),
    "l2": parameters.or_none(parameters.number("a number from 0 on, not inf", lambda value: 0 <= value < math.inf)),
    "fit_intercept": parameters.boolean,
    "class_weight": parameters.balance_or_dict,
    "solver": parameters.one_of("auto", "mm"),
    "tol": parameters.number("a number from 0 on", lambda value: value >= 0),
    "max_iter": parameters.whole("a whole number from 0 on", 0),
    "warm_start": parameters.boolean,
    "random_state": parameters.seed,
    "verbose": parameters.verbosity,
}


class LogisticRegression(LinearClassifier, BaseEstimator):
    r"""Logistic regression, binary or multinomial, with an l2 penalty.

    .. math:: \min_W \; \frac{\sum_j w_j\, [\log Z_j(W) - h_{j y_j}(W)]}{\sum_j w_j} + \tfrac{\lambda}{2} |W|^2,
        \qquad \lambda = \frac{1}{C \sum_j w_j}

    scikit-learn's objective; the intercept is not penalised. Large data are fitted in phases: fast first progress on
    batches, with the Kronecker-factored curvature of the bound, or on samples; quasi-Newton steps with that curvature,
    of one pass over all examples each; and where those are not enough, Newton steps, each with a certificate that the
    objective falls. Float64 is fitted in float64, all else in float32.

    Args:
      C: inverse strength of the penalty of the summed loss, above 0; `inf` for none.
      l2: strength lambda of the penalty of the mean loss; if given, it takes the place of `C`.
      fit_intercept: whether there is an intercept.
      class_weight: weights of the classes as a dict, "balanced" for those inverse to their frequencies, or None.
      solver: "auto"; or "mm" for certified steps only, with no random numbers.
      tol: the fit has converged when the largest absolute entry of the gradient of the objective is below it.
      max_iter: the most steps on all examples to take.
      warm_start: whether to start from the coefficients of the last fit.
      random_state: draws the batches, or the sample.
      verbose: whether to show the progress on stderr.

    Attributes:
      classes_: the labels, in order.
      coef_: (1, d) for two classes, (n, d) for more.
      intercept_: (1,) or (n,).
      n_iter_: epochs, or steps on a sample, of the first phase and steps of the others, in an array (1,).
      n_features_in_: the number of columns.
      feature_names_in_: their names, where they have some.
      converged_: whether the gradient is below `tol`.
      history_: a dict of arrays, "phase", "objective", "gradient" (its largest absolute entry), "seconds",
        "certified_decrease" of the objective and "cg_steps", with an entry for the start, the end of the first phase,
        every few quasi-Newton steps and every Newton step.

    Example:
      >>> from sklearn.datasets import load_iris
      >>> from qbound.estimator import LogisticRegression
      >>> inputs, labels = load_iris(return_X_y=True)
      >>> model = LogisticRegression().fit(inputs, labels)
      >>> print(f"{model.score(inputs, labels):.3f}, {bool(model.converged_)}")
      0.973, True
    """

    def __init__(
        self,
        C=1.0,
        *,
        l2=None,
        fit_intercept=True,
        class_weight=None,
        solver="auto",
        tol=1e-4,
        max_iter=100,
        warm_start=False,
        random_state=None,
        verbose=0,
    ):
        self.C = C
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    n_features_in_: int

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "LogisticRegression":
        """Fit the model.

        Args:
          X: inputs (b, d), an array, a data frame or a sparse matrix, which stays sparse.
          y: labels (b,).
          sample_weight: weights (b,) of the examples.

        Returns:
          The estimator itself.
        """
        parameters.check_parameters(self, _PARAMETERS)
        X, y = cast(Any, validate_data)(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], order="C")
        check_classification_targets(y)
        classes = np.unique(y)
        if len(classes) < 2:
            raise ValueError(
                "This solver needs samples of at least 2 classes in the data, but the data contains only one class: "
                f"{classes[0]!r}"
            )
        # Faster than the inverse that np.unique gives, which sorts.
        labels = np.searchsorted(classes, y)
        weights, exponent = self._weights(sample_weight, classes, labels, y)
        total = weights.sum()
        if not total > 0:
            raise ValueError("sample_weight, class_weight: expected weights that are not all zero")
        start = self._start(classes, X)
        self.classes_ = classes
        for name in ("_stream", "_stream_exponent"):
            self.__dict__.pop(name, None)
        l2 = self._l2(total, exponent)
        result = self._minimise(X, labels.astype(np.int32), (weights / total).astype(X.dtype), l2, start)
        self._set_coefficients(np.asarray(result.params))
        self.n_iter_ = np.array([result.steps], np.int32)
        self.converged_ = result.result == Result.CONVERGED
        self.history_ = _columns(result.history)
        if not self.converged_:
            self._warn(result, X.dtype)
        return self

    @all_or_nothing
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> "LogisticRegression":
        """Learn from some of the examples, which are not kept: for data that do not fit in memory, or never end.

        One step for every 1,000 examples, or for fewer if there are fewer, in float32. Each call is a part of one
        stream, with steps that get shorter; several passes over the data come closer to the optimum, and `fit` reaches
        it. After a `fit` the stream starts from its coefficients. With `C`, the penalty is that of the data seen.

        Args:
          X: inputs (b, d); sparse ones become arrays, a batch at a time.
          y: labels (b,).
          classes: all labels there will be; needed at the first call.
          sample_weight: weights (b,) of the examples.

        Returns:
          The estimator itself.
        """
        parameters.check_parameters(self, _PARAMETERS)
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight 'balanced' is not supported for partial_fit, which does not know the frequencies of "
                "classes. Compute the weights on a sample, with sklearn.utils.compute_class_weight, and pass a dict."
            )
        is_first = not hasattr(self, "classes_")
        X, y = cast(Any, validate_data)(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], order="C", reset=is_first
        )
        check_classification_targets(y)
        self._take_classes(classes)
        labels = np.searchsorted(self.classes_, y)
        known = self.classes_[np.minimum(labels, len(self.classes_) - 1)] == y
        if not np.all(known):
            raise ValueError(f"y: expected labels in classes={self.classes_!r}; got {np.unique(y[~known])!r}")
        if len(self.classes_) < 2:
            raise ValueError(f"classes: expected at least 2 classes; got only one class: {self.classes_[0]!r}")
        weights, exponent = self._weights(sample_weight, self.classes_, labels, None)
        if not hasattr(self, "_stream"):
            self._stream, self._stream_exponent = first_stream(self._last_params(len(self.classes_), X)), exponent
        if np.any(weights > 0):
            self._stream = self._consumed(X, labels.astype(np.int32), self._in_unit_of_stream(weights, exponent))
        self._set_coefficients(np.asarray(self._stream.average).astype(X.dtype))
        self.n_iter_ = np.array([self._stream.steps], np.int32)
        return self

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _take_classes(self, classes) -> None:
        """Take all labels there will be, at the first call; later the same, or None."""
        if not hasattr(self, "classes_"):
            if classes is None:
                raise ValueError("classes: expected all labels there will be, at the first call of partial_fit")
            self.classes_ = unique_labels(classes)
        elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
            raise ValueError(
                f"classes: expected those of the first call of partial_fit, {self.classes_!r}; got {classes!r}"
            )

    def _weights(self, given, classes, labels, y) -> Weights:
        """The weights of examples; classes are balanced by `y`, unless that is None."""
        if given is None and self.class_weight is None:
            return equal_weights(len(labels))
        of_examples = sample_weights(given, len(labels))
        if self.class_weight is None:
            return weights_of(of_examples, None, labels)
        known = (classes, None) if y is None else (y, of_examples)
        return weights_of(of_examples, class_weights(self.class_weight, classes, *known), labels)

    def _l2(self, total: float, exponent: int) -> float:
        """The penalty of the mean loss, where the sum of weights is `total` times 2^`exponent`."""
        if self.l2 is not None:
            return float(self.l2)
        part, exponent_of_c = math.frexp(self.C)
        try:
            return math.ldexp(1 / (part * float(total)), -(exponent + exponent_of_c))
        except OverflowError:
            return math.inf

    def _start(self, classes, X) -> np.ndarray:
        """The first parameters (n, e): zero, or with a warm start those of the last fit."""
        if self.warm_start:
            return self._last_params(len(classes), X)
        return np.zeros((len(classes), X.shape[1] + bool(self.fit_intercept)), X.dtype)

    def _last_params(self, n: int, X) -> np.ndarray:
        """The parameters (n, e) of the last fit; zero if there was none of the same shape."""
        d = X.shape[1]
        params = np.zeros((n, d + bool(self.fit_intercept)), X.dtype)
        coef = getattr(self, "coef_", None)
        if coef is None or coef.shape != (1 if n == 2 else n, d):
            return params
        coef = coef.toarray() if scipy.sparse.issparse(coef) else coef
        last = np.concatenate([coef, np.reshape(self.intercept_, (-1, 1))], axis=1)[:, : params.shape[1]]
        params[:] = np.concatenate([-last, last]) / 2 if n == 2 else last
        return params

    def _in_unit_of_stream(self, weights: np.ndarray, exponent: int) -> np.ndarray:
        """Weights of a part, whose sum with those before does not overflow: the unit is that of the largest."""
        if not self._stream.weight > 0:
            self._stream_exponent = exponent
        elif exponent > self._stream_exponent:
            unit = math.ldexp(1.0, self._stream_exponent - exponent)
            self._stream, self._stream_exponent = rescaled(self._stream, unit), exponent
        return np.ldexp(weights, exponent - self._stream_exponent).astype(np.float32)

    def _consumed(self, X, labels, weights) -> Stream:
        """The stream after some examples, whose weights are in its unit."""
        rng = check_random_state(self.random_state)
        n, d = len(self.classes_), X.shape[1]
        size = max(1, min(_STREAM_ROWS, _STREAM_NUMBERS // d, _STREAM_LOGITS // n))
        order, stream = rng.permutation(len(labels)), self._stream
        with _one_thread(d):
            for rows in np.array_split(order, -(-len(labels) // size)):
                seen = float(stream.weight) + float(weights[rows].sum())
                if not seen > 0:
                    continue
                x = X[rows].toarray() if scipy.sparse.issparse(X) else X[rows]
                x = _without_unused(x, weights[rows]).astype(np.float32)
                x, y, w = _with_rows(_padded(len(rows)), x, labels[rows], weights[rows])
                data = Data(DenseInputs(jnp.asarray(x)), jnp.asarray(y), jnp.asarray(w))
                penalty = self._penalty(self._l2(seen, self._stream_exponent), n, d, np.float32)
                stream = consume(stream, data, jnp.asarray(penalty))
            # In NumPy, which can be pickled and read anywhere.
            return jax.device_get(stream)

    def _penalty(self, l2: float, n: int, d: int, dtype) -> np.ndarray:
        """The penalty of each input, for the parameters inside.

        Two classes share one vector of coefficients w, here as w/2 and -w/2, with half its penalty.
        """
        inside = 2 * l2 if n == 2 else l2
        if not inside <= float(np.finfo(dtype).max):
            given = "C, sample_weight" if self.l2 is None else "l2"
            raise ValueError(
                f"{given}: expected a penalty of the mean loss, l2 or 1 / (C * sum of weights), that fits in "
                f"{np.dtype(dtype).name}; got {l2:g}"
            )
        penalty = np.full(d + bool(self.fit_intercept), inside, dtype)
        penalty[d:] = 0
        return penalty

    def _minimise(self, X, labels, weights, l2: float, start) -> Fitted:
        penalty = self._penalty(l2, len(start), X.shape[1], X.dtype)
        is_sparse = scipy.sparse.issparse(X)
        X = _without_unused(X, weights)
        if not is_sparse and X.size <= _PADDED_SIZE:
            X, labels, weights = _with_rows(_padded(len(labels)), X, labels, weights)
        with ProgressBar(float(self.tol), bool(self.verbose)) as bar, _precision(X.dtype), _one_thread(X.shape[1]):
            # All at once: each transfer has its own overhead, as long as a step on small data.
            x, *rest = jax.device_put((None if is_sparse else X, labels, weights, penalty, start))
            labels, weights, penalty, start = rest
            design = SparseInputs.from_csr(X, X.dtype) if is_sparse else DenseInputs(x)
            result = minimise(
                LinearObjective(Data(design, labels, weights), penalty),
                start,
                tolerance=float(self.tol),
                max_steps=int(self.max_iter),
                certified=self.solver == "mm",
                rng=check_random_state(self.random_state),
                callback=bar.show,
            )
            return result._replace(params=np.asarray(result.params))

    def _set_coefficients(self, params: np.ndarray):
        params = params[1:] - params[:1] if len(params) == 2 else params
        d = self.n_features_in_
        self.coef_ = np.ascontiguousarray(params[:, :d])
        self.intercept_ = params[:, d].copy() if self.fit_intercept else np.zeros(len(params), params.dtype)

    def _warn(self, result: Fitted, dtype):
        last = result.history[-1]
        advice = {
            Result.STEP_LIMIT: f"Increase max_iter={self.max_iter} or tol",
            Result.STALLED: f"The rounding errors of {np.dtype(dtype).name} leave no more: increase tol"
            + (" or fit float64" if dtype == np.float32 else ""),
            Result.NOT_FINITE: "The objective is not finite",
        }[result.result]
        warnings.warn(
            f"LogisticRegression did not converge: the largest entry of the gradient is {last.gradient_norm:.3g} after "
            f"{result.steps} iterations, above tol={self.tol:g}, with an objective of {last.objective:.6g}. {advice}, "
            "or scale the columns of X to similar sizes.",
            ConvergenceWarning,
            stacklevel=4,
        )


def _precision(dtype):
    """Float64 for a while, without changing what the rest of the program has."""
    return jax.enable_x64(dtype == np.float64 or bool(jax.config.read("jax_enable_x64")))


def _one_thread(columns: int):
    """One thread for BLAS; to set that takes longer than a small factorisation."""
    return one_thread() if columns >= _FACTORISED else contextlib.nullcontext()


def _padded(rows: int) -> int:
    """The next of four sizes for every power of 2."""
    unit = max(8, 1 << max(rows.bit_length() - 3, 0))
    return -(-rows // unit) * unit


def _without_unused(x, weights):
    """The inputs with zeros in rows of weight 0.

    Their logits and squares could overflow, and 0 times infinity is not a number.
    """
    unused = weights == 0
    if scipy.sparse.issparse(x):
        return csr_without(x, unused)
    if np.any(unused):
        x = x.copy()
        x[unused] = 0
    return x


def _with_rows(rows: int, x, labels, weights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same examples, filled up with rows of weight 0."""
    more = rows - len(labels)
    return np.pad(x, [(0, more), (0, 0)]), np.pad(labels, (0, more)), np.pad(weights, (0, more))


def _columns(history: list[FitInfo]) -> dict[str, np.ndarray]:
    """The history as arrays, by the names of `LogisticRegression.history_`."""
    names = ("objective", "gradient_norm", "seconds", "certified_decrease", "cg_steps")
    columns = {"phase": np.array([PHASES[entry.phase] for entry in history])}
    columns |= {name: np.array([getattr(entry, name) for entry in history]) for name in names}
    return {name.removesuffix("_norm"): column for name, column in columns.items()}
