"""Low-rank bounds: V'S V + D above the curvature of a batch, from its rows, with a certificate."""
