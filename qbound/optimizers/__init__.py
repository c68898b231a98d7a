"""Stochastic second-order methods as optax transforms: one algorithm a file."""
