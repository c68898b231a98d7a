"""Linear algebra on arrays and on products: nothing here knows of labels or models."""
