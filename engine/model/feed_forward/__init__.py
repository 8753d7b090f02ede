"""Feed-forwards: the part of a layer that works on each token alone. Each module has specifications and the layers that run them."""

from __future__ import annotations
