"""Fields of vLLM, llama.cpp and Ollama that are not ours: what they are called here, and values that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCALING = "it is rope_scaling here, an object such as {'rope_type': 'linear', 'factor': 4}"

# Field -> what to do instead, of every endpoint that generates.
HINTS: dict[str, str] = {
    "n_keep": "it is called keep_tokens here",
    "num_keep": "it is called keep_tokens here",
    "cache_prompt": "prompts are always cached, which changes no answer: leave it out",
    "rope_freq_scale": _SCALING,
    "rope_freq_base": "it is rope_scaling here, an object such as {'rope_type': 'default', 'rope_theta': 1000000}",
    "repeat_penalty": "it is called repetition_penalty here",
    "num_ctx": "the context is the server's, of --max-model-len: leave it out",
}

# Field -> the value at which it asks for nothing, so that it is accepted; any other is refused.
NEUTRAL: Mapping[str, Any] = {
    # vLLM
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "include_reasoning": True,
    "documents": [],
    "kv_transfer_params": {},
    "mm_processor_kwargs": {},
    "logits_processors": [],
    # llama.cpp
    "cache_prompt": True,
    "id_slot": -1,
    "mirostat": 0,
    "tfs_z": 1.0,
    "dynatemp_range": 0.0,
    "top_n_sigma": -1.0,
    "n_probs": 0,
    "timings_per_token": False,
    "return_progress": False,
}


def asks_for_nothing(value: Any, neutral: Any) -> bool:
    """Whether a value is the one that changes nothing: 1 and 1.0 are one, 1 and true are not."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
