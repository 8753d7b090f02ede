"""The operations in plain torch: the oracle, batched attention, forms whose rows are independent."""
