"""Cross-entropy over the vocabulary, with all logits at once or without."""
