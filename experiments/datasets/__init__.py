"""Data sets as builders of TensorFlow Datasets that need no TensorFlow, one package each."""
