"""Registry of all supported families. To add one: a file that describes it, and a line here if the file is new.

Defaults follow the configuration classes of transformers 5.23, since checkpoints leave them out. Imports no torch.
"""

from __future__ import annotations

from windlass.engine.model.families import (
    deepseek,
    encoders,
    ernie,
    falcon,
    gemma,
    glm,
    gpt,
    gpt_oss,
    granite,
    hunyuan,
    layer_norm_families,
    lfm2,
    llama,
    llama_variants,
    mistral,
    nemotron_h,
    olmo,
    phi,
    qwen,
    sigmoid_moe,
)
from windlass.engine.model.families.family import Family

_MODULES = (
    llama,
    mistral,
    qwen,
    gemma,
    llama_variants,
    glm,
    phi,
    hunyuan,
    olmo,
    granite,
    layer_norm_families,
    gpt,
    falcon,
    ernie,
    gpt_oss,
    deepseek,
    sigmoid_moe,
    lfm2,
    nemotron_h,
    encoders,
)

# Each once, although modules import families that theirs are derived from.
FAMILIES = tuple(
    {
        family.architecture: family
        for module in _MODULES
        for family in vars(module).values()
        if isinstance(family, Family)
    }.values()
)
