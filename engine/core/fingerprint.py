"""What an engine's logits depend on, as a digest."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from windlass._version import __version__
from windlass.engine.api.config import EngineConfig
from windlass.engine.model.loading.loader import LoadedModel
from windlass.engine.rotary.ladder import AUTO


def fingerprint(config: EngineConfig, model: LoadedModel) -> str:
    """A digest of what logits depend on. Whether a prefix is cached, or a token was proposed, changes nothing."""
    decoder = model.decoder
    groups = [(group.name, group.scaling.to_dict()) for group in decoder.spec.rotary_groups]
    compute = replace(config.compute, cores=None)  # which cores it has changes nothing
    parts: tuple[object, ...] = (
        __version__,
        model.digest,
        compute,
        decoder.dtype,
        decoder.weight_dtype,
        model.cache_dtype,
    )
    parts += (model.quantization, decoder.backend.explain(), groups, config.rotary.update)
    parts += (config.rotary.scaling == AUTO, config.rotary.ladder)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
