"""Tiny random transformers models in ordinary model directories, and their reference logits with float64 angles."""

from __future__ import annotations

import functools
import json
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers import tiny_experts, tiny_families, tiny_plain
from helpers.loaded import loaded

from windlass.engine.rotary.rope_scaling import RotarySpec

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8}),
    "helium": ("Helium", {"attention_bias": True, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True}),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "phi3": (
        "Phi3",
        {
            "original_max_position_embeddings": 4,  # so that every prompt uses the long list
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [1.5 + 0.5 * i for i in range(6)],
            },
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "ministral3": (
        "Ministral3",
        {
            "sliding_window": None,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "proportional": (
        "Llama",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
}


def make_model(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of the family to `directory`; 1-D parameters are random too, to expose errors with norms."""
    files, generator = _made(family, seed, pickle.dumps(overrides))
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    torch.set_rng_state(generator)  # later random numbers do not depend on whether the model was cached
    return directory


@functools.lru_cache(maxsize=32)
def _made(family: str, seed: int, pickled: bytes) -> tuple[dict[str, bytes], torch.Tensor]:
    """Return the files of a model (half a MB), and the state of torch's generator after its creation."""
    with tempfile.TemporaryDirectory() as folder:
        directory = _make(family, Path(folder), seed, pickle.loads(pickled))
        return {file.name: file.read_bytes() for file in directory.iterdir()}, torch.get_rng_state()


def _make(family: str, directory: Path, seed: int, overrides: dict[str, Any]) -> Path:
    if family in tiny_plain.FAMILIES:
        return tiny_plain.save(family, directory, seed, **overrides)
    name, settings = (FAMILIES | tiny_families.FAMILIES | tiny_experts.FAMILIES)[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name in tiny_families.TEXT_PARTS else f"{name}Config")
    common = tiny_families.COMMON.get(family, SIZES)
    config = config_class(**{**common, **settings, **overrides})
    torch.manual_seed(seed)
    own_class = getattr(transformers, f"{name}ForCausalLM", None)
    model = own_class(config) if own_class else transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Large enough for peaked attention, in which errors are visible in the logits.
            vector = parameter.dim() == 1 or key.endswith(
                ("q_norm.weight", "k_norm.weight")
            )  # some with one row per head
            parameter.normal_(0.0, 0.3) if vector else parameter.mul_(4.0)
            if vector and (name not in tiny_families.OFFSET_NORMS or key.endswith("linear_attn.norm.weight")):
                parameter.add_(1.0)
            if key.endswith("mamba.A_log"):  # so that a token's contribution lasts for many more
                parameter.sub_(3.0)
            if name == "Gemma4" and key.endswith("q_norm.weight"):  # its weights include the scale of scores
                parameter.mul_(parameter.shape[0] ** -0.5)
            if name == "Gemma4" and key.endswith("router.proj.weight"):  # also here
                parameter.mul_(config.hidden_size**0.5)
        for key, tensor in (*model.named_buffers(), *model.named_parameters()):
            if key.endswith(tiny_experts.BIASES):  # zeros otherwise
                tensor.normal_(0.0, 0.3)
            if key.endswith("layer_scalar"):  # ones otherwise
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    if own_class is None:  # computed by that of another family
        written = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**written, "architectures": [f"{name}ForCausalLM"]}))
    return directory


class Reference:
    """transformers model in float32 with eager attention, and cos and sin of float64 angles.

    A model of `tiny_plain` if transformers does not support the family.
    """

    def __init__(self, directory: Path, specs: Sequence[RotarySpec], names: Sequence[str]) -> None:
        self.plain = None
        config = json.loads((directory / "config.json").read_text())
        if config["architectures"][0] in tiny_plain.ARCHITECTURES:
            self.plain, self.frequencies = tiny_plain.PlainModel(directory), torch.tensor(specs[0].inv_freq).double()
            return
        self.model = loaded(directory)
        by_name = dict(zip(names, specs, strict=True))
        fallback = specs[0]
        takes_half = type(self.model).__name__ == "GptOssForCausalLM"
        repeats = type(self.model).__name__.startswith("Cohere")
        is_complex = type(self.model).__name__.startswith(("DeepseekV2", "Llama4"))

        def rotary(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
            spec = by_name.get(layer_type or "", fallback)
            position_ids = (
                position_ids[0] if position_ids.dim() > 2 else position_ids
            )  # those of images, equal for text
            inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float64)
            angle = position_ids[..., None].double() * inv_freq
            if is_complex:
                return torch.polar(torch.full_like(angle, spec.rotary_scale), angle).to(torch.complex64)
            if not takes_half:
                angle = torch.cat((angle, angle), dim=-1) if not repeats else angle.repeat_interleave(2, dim=-1)
            return (angle.cos() * spec.rotary_scale).float(), (angle.sin() * spec.rotary_scale).float()

        for name, module in self.model.named_modules():
            if name.endswith(("rotary_emb", "pos_emb")) and not hasattr(module, "embed_positions"):
                module.forward = rotary
            if hasattr(module, "embed_positions"):  # GPT-J, CodeGen: table of sines, then cosines, by position
                count = module.embed_positions.shape[0]
                angle = torch.arange(count).double()[:, None] * torch.tensor(fallback.inv_freq, dtype=torch.float64)
                module.embed_positions = torch.cat((angle.sin(), angle.cos()), dim=-1).float() * fallback.rotary_scale

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return [T, V] float32 logits of the sequence in one pass."""
        if self.plain is not None:
            return self.plain.logits(token_ids, self.frequencies)
        ids = torch.tensor([list(token_ids)])
        return self.model(ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits[0]
