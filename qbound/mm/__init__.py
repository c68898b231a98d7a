"""Full-batch majorise-minimise: safe steps anywhere, Newton's near the optimum, a certificate for each of them."""

from qbound.mm.results import Certificate, NotConverged, Result
from qbound.mm.run import init, run, step
from qbound.mm.state import MMInfo, MMState

__all__ = ["Certificate", "MMInfo", "MMState", "NotConverged", "Result", "init", "run", "step"]
