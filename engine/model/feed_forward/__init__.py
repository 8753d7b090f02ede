"""Feed-forwards: the part of a layer that works on each token alone. Each module has specifications and their layers."""
