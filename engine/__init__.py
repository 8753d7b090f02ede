"""The engine: scheduling, paged cache, rotation and the model, behind one small client interface.

Nothing here knows of HTTP, text or tokenizers; requests and outputs are token ids. Importing this package
(and `api`, `errors`, `rotary.scaling`, `client`) does not import torch, so an API process stays light.
"""
