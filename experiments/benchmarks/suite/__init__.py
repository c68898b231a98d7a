"""Every method against every peer, on the same problems, in one run: `python -m experiments.benchmarks.suite`."""
