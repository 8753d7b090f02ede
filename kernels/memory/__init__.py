"""Memory as a backend sees it: for weights, and what a device has."""
