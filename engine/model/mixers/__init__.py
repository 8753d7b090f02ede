"""Mixers: the part of a layer through which a token sees other tokens. Each module has a specification and its layer."""
