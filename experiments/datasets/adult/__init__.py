"""Adult: see README.md."""
