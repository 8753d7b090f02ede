"""One module per family of endpoints. Routes read a body, ask the parts for the work and say what is documented."""
