"""What a GGUF file says of GLM-4.5 and those after it (`glm4moe`), in the names of config.json. It opens no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.latent import GATING, GROUPED_EXPERTS_KEYS, SIGMOID, grouped_experts
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation
from windlass.engine.rotary.fields import format_value


def _glm4_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Chosen by sigmoids, also where the file does not say so."""
    if keys.raw(GATING) not in (None, 0, SIGMOID):
        raise LoadError(
            f"{keys.key(GATING)} is {format_value(keys.raw(GATING))}: these experts are chosen by sigmoids ({SIGMOID})"
        )
    return grouped_experts(keys)


def _glm4_moe_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


# Fields of `Architecture`.
GLM4_MOE_FIELDS: dict[str, Any] = {
    "more": _glm4_moe,
    "reads": tuple(GROUPED_EXPERTS_KEYS),
    "told_by": _glm4_moe_by_tensors,
    "aliases": {"post_attention_norm": "ffn_norm"},
}
