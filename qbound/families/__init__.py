"""From logits to a quadratic that stands for their log-partition function: the second of the two seams."""
