"""Plain torch operations: oracle, fallback, and row-independent forms."""
