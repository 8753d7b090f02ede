"""Model families, as data: what distinguishes one from the next."""
