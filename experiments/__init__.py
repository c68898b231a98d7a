"""Experiments with the library: run as modules from the root of the project."""
