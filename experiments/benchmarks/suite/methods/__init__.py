"""The methods that are compared, a family a module; each is a generator of checkpoints."""
