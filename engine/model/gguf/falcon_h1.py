"""What a GGUF file says of Falcon H1, in the names of config.json. It opens no file.

llama.cpp's converter multiplies the weights by the family's factors, each where it belongs, and names none of them. A head that
is the embedding has been multiplied as that was. A norm of the memory is taken behind its gate. Files of TII's own converter,
before llama.cpp had one, name the factors and do not tell whether weights have been multiplied by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.carried_states import SIZE_KEYS, read_recurrent_sizes
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation, first_layer_has_bias


def _falcon_h1(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises LoadError for a file whose weights may not have been multiplied."""
    if factors := sorted(name for name in keys.names() if name.endswith(("multiplier", "multipliers"))):
        raise LoadError(
            f"names {keys.key(factors[0])} and does not tell whether its weights have been multiplied by that: get a conversion "
            "by llama.cpp of July 2025 or later"
        )
    sizes = read_recurrent_sizes(keys)
    return {
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_d_ssm": sizes.values,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": sizes.width,
        "mamba_norm_before_gate": False,
    }


def _falcon_h1_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    return {
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_conv_bias": first_layer_has_bias(tensors, "ssm_conv1d"),
    }


# Fields of `Architecture`.
FALCON_H1_FIELDS: dict[str, Any] = {"more": _falcon_h1, "reads": SIZE_KEYS, "told_by": _falcon_h1_by_tensors}
