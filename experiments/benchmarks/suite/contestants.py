"""Who takes part: every method, where it runs, and the settings it may choose from."""

import dataclasses
import itertools
from typing import Any

__all__ = ["CONTESTANTS", "ENVIRONMENTS", "Contestant", "Environment"]


@dataclasses.dataclass(frozen=True)
class Environment:
    """A Python to run methods in: this one, or one of its own that holds what pip is asked for."""

    packages: tuple[str, ...] = ()
    blas_threads: bool = False  # whether NumPy's products may use all cores; those of JAX always do


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A method.

    Attributes:
      label: what tables call it.
      ours: whether it is a method of qbound.
      environment: where it runs, one of ENVIRONMENTS.
      function: `module:function` under `methods`.
      settings: what is tuned; peers that have something to tune have as many as ours at least.
    """

    label: str
    ours: bool
    environment: str
    function: str
    settings: tuple[dict[str, Any], ...] = ({},)


ENVIRONMENTS = {
    "jax": Environment(),
    "scikit_learn": Environment(blas_threads=True),
    "cyanure": Environment(("cyanure==1.2.2",), blas_threads=True),
    "somax": Environment(("python-somax==1.0.1", "jax>=0.9,<0.10", "jaxlib>=0.9,<0.10")),
    "kfac": Environment(("kfac-jax==0.0.8", "jax==0.9.1", "jaxlib==0.9.1")),
}

# Of a learning rate that falls to 0: short schedules for low accuracy, long ones for high.
STEPS = (60, 250, 1000, 5000)


def _schedules(
    *settings: dict[str, Any], lengths: tuple[dict[str, Any], ...] | None = None
) -> tuple[dict[str, Any], ...]:
    """Every setting with every length of a schedule."""
    lengths = tuple({"steps": steps} for steps in STEPS) if lengths is None else lengths
    return tuple({**setting, **length} for setting, length in itertools.product(settings, lengths))


def _optax(label: str, name: str, *rates: float, ours: bool = False, **more: Any) -> Contestant:
    settings = _schedules(*({"name": name, "rate": rate, **more} for rate in rates))
    return Contestant(label, ours, "jax", "stochastic:run", settings)


def _scikit_learn(name: str) -> Contestant:
    return Contestant(f"scikit-learn {name}", False, "scikit_learn", "scikit_learn:solver", ({"solver": name},))


# Those of ours that have a learning rate have the one their documentation gives, and four lengths of its schedule.
# Peers that have one may choose from three, with each of the lengths.
CONTESTANTS = {
    # The fastest first: a run has a limit, a multiple of the time of the best before it.
    "linear_fit": Contestant("qbound.fit", True, "jax", "estimator:linear_fit"),
    "estimator": Contestant("qbound LogisticRegression", True, "jax", "estimator:estimator"),
    "kspfb": _optax("KSPFB", "kspfb", 2.0, ours=True, damping=2.0),
    "mm": Contestant("qbound.mm", True, "jax", "full_batch:mm"),
    "newton_cg": Contestant("qbound.mm, Newton-CG", True, "jax", "full_batch:mm", ({"curvature": "hessian"},)),
    "spfb": _optax("SPFB", "spfb", 1.0, ours=True),
    "lspfb_tight": _optax("LSPFB, tight, k = 10", "lspfb_tight", 1.0, ours=True),
    "lspfb_paper": _optax("LSPFB, paper, k = 10", "lspfb_paper", 1.0, ours=True),
    "sgd": _optax("optax SGD", "sgd", 2.0, 8.0, 32.0, relative=True),
    "momentum": _optax("optax SGD, momentum", "momentum", 0.6, 3.0, 15.0, relative=True),
    "adam": _optax("optax Adam", "adam", 0.01, 0.03, 0.1),
    "lbfgs": Contestant(
        "optax L-BFGS", False, "jax", "full_batch:lbfgs", tuple({"memory": m} for m in (5, 10, 20, 40))
    ),
    "bohning": Contestant("Böhning, Nesterov (QMME)", False, "jax", "full_batch:bohning"),
    **{
        f"scikit_learn_{name.replace('-', '_')}": _scikit_learn(name)
        for name in ("lbfgs", "newton-cg", "newton-cholesky")
    },
    "scikit_learn_saga": Contestant("scikit-learn saga", False, "scikit_learn", "scikit_learn:saga"),
    "cyanure": Contestant(
        "cyanure",
        False,
        "cyanure",
        "cyanure:cyanure",
        tuple({"solver": name} for name in ("qning-miso", "catalyst-miso", "acc-svrg", "qning-svrg")),
    ),
    "somax_newton_cg": Contestant(
        "somax Newton-CG",
        False,
        "somax",
        "somax:newton_cg",
        tuple(
            {"damping": damping, "maxiter": iterations, "tol": tolerance}
            for damping in (1e-2, 1e-4)
            for iterations, tolerance in ((50, 0.3), (20, 0.1))
        ),
    ),
    "somax_sgn": Contestant(
        "somax SGN",
        False,
        "somax",
        "somax:sgn",
        _schedules(*({"rate": rate, "damping": c} for rate, c in ((1.0, 0.1), (0.3, 0.01)))),
    ),
    # Its batches are small, and epochs long.
    "somax_egn": Contestant(
        "somax EGN, corrected",
        False,
        "somax",
        "somax:egn",
        _schedules(
            *({"rate": rate, "damping": c} for rate, c in ((1.0, 1.0), (0.3, 0.1))),
            lengths=tuple({"epochs": epochs} for epochs in (1, 5)),
        ),
    ),
    "kfac": Contestant(
        "kfac-jax",
        False,
        "kfac",
        "kfac:kfac",
        _schedules(*({"rate": rate, "damping": c} for rate, c in ((0.1, 1e-3), (0.1, 1e-2)))),
    ),
}
