"""What distinguishes one family of models from the next, as data."""
