"""Feed-forwards: what works on each token alone. A kind is a spec, which needs no torch, and a layer that runs it."""
