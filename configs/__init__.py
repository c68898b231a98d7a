"""Settings of the experiments, one file each: a function that returns a frozen dataclass."""
