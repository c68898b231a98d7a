"""From parameters to logits: the first of the two seams."""
