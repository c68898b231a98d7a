"""Fashion-MNIST: see README.md."""
