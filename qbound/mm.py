"""Full-batch majorise-minimise: safe steps anywhere, Newton's near the optimum, a certificate for each of them."""

from qbound.fitting.results import Certificate, MMInfo, MMState, NotConverged, Result
from qbound.fitting.run import init, run, step

__all__ = ["Certificate", "MMInfo", "MMState", "NotConverged", "Result", "init", "run", "step"]
