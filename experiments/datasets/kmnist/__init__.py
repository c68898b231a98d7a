"""KMNIST: see README.md."""
