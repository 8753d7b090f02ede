"""Mixers: what lets a token see others. A kind is a spec, which needs no torch, and a layer that runs it."""
