"""What a backend offers, by families of operations: their contracts, and the values that they take and return."""
