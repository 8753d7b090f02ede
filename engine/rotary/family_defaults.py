"""What the configuration class of each model family fills in where config.json says nothing.

Responsible for these numbers only; they were read in the configuration classes of transformers 5.23. It knows no
configuration and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Which layers look how far back: "full" all of them everywhere; "window" all alike, through `sliding_window` where that
# is set; "qwen" windows above `max_window_layers`; "gemma" every n-th layer global; "smollm" windows without rotation.
Pattern = Literal["full", "window", "qwen", "gemma", "smollm"]


@dataclass(frozen=True, slots=True)
class FamilyDefaults:
    """Sizes, rotation and layer pattern of a family, keyed by `model_type` in FAMILY_DEFAULTS.

    head_dim None: hidden_size / num_attention_heads. local_theta: set where sliding layers have a theta of their own.
    original_len: where the family has a top-level `original_max_position_embeddings`. rope_parameters: the object used
    when config.json has none. no_rope_interval: every n-th layer does not rotate. longrope_names: older names of
    longrope that mean something else elsewhere.
    """

    max_position_embeddings: int
    pattern: Pattern = "full"
    head_dim: int | None = None
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_hidden_layers: int = 32
    sliding_window: int | None = None
    rope_theta: float = 10_000.0
    local_theta: float | None = None
    partial_rotary_factor: float = 1.0
    original_len: int | None = None
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    no_rope_interval: int | None = None
    longrope_names: tuple[str, ...] = ("su",)


FAMILY_DEFAULTS: Mapping[str, FamilyDefaults] = {
    "llama": FamilyDefaults(max_position_embeddings=2048),
    "mistral": FamilyDefaults(max_position_embeddings=131_072, pattern="window", sliding_window=4096),
    "ministral3": FamilyDefaults(
        max_position_embeddings=262_144,
        pattern="window",
        head_dim=128,
        num_hidden_layers=34,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "qwen2": FamilyDefaults(max_position_embeddings=32_768, pattern="qwen", sliding_window=4096),
    "qwen3": FamilyDefaults(max_position_embeddings=32_768, pattern="qwen", sliding_window=4096, head_dim=128),
    "gemma3_text": FamilyDefaults(
        max_position_embeddings=131_072,
        pattern="gemma",
        head_dim=256,
        hidden_size=2304,
        num_attention_heads=8,
        num_hidden_layers=26,
        sliding_window=4096,
        rope_theta=1_000_000.0,
        local_theta=10_000.0,
    ),
    "smollm3": FamilyDefaults(
        max_position_embeddings=32_768,
        pattern="smollm",
        hidden_size=2048,
        num_attention_heads=16,
        num_hidden_layers=36,
        rope_theta=2_000_000.0,
        no_rope_interval=4,
    ),
    "helium": FamilyDefaults(
        max_position_embeddings=4096,
        head_dim=128,
        hidden_size=2560,
        num_attention_heads=20,
        num_hidden_layers=24,
        rope_theta=100_000.0,
    ),
    "ernie4_5": FamilyDefaults(
        max_position_embeddings=131_072,
        head_dim=128,
        hidden_size=1024,
        num_attention_heads=16,
        num_hidden_layers=18,
        rope_theta=500_000.0,
    ),
    "glm": FamilyDefaults(
        max_position_embeddings=131_072, head_dim=128, num_hidden_layers=40, partial_rotary_factor=0.5
    ),
    "glm4": FamilyDefaults(
        max_position_embeddings=131_072, head_dim=128, num_hidden_layers=40, partial_rotary_factor=0.5
    ),
    "phi3": FamilyDefaults(
        max_position_embeddings=4096,
        pattern="window",
        hidden_size=3072,
        original_len=4096,
        longrope_names=("su", "yarn"),
    ),
    "hunyuan_v1_dense": FamilyDefaults(max_position_embeddings=2048),
}
