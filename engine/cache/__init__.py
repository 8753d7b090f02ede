"""The paged cache: who holds which block, the hash chains of prefixes, the tensors, the budget."""
