"""GGUF model: the bytes and operations that its shapes imply, and the directory that an engine loads."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from windlass.server.startup.derived_files import derive_gguf_directory
from windlass.server.startup.model_catalog import QWEN_CODER_1_5B, model_file

_CACHE_BYTES = {"f16": 2.0, "q8_0": 34 / 32}  # of a value


class GGUFModel:
    """A file with its sizes. Of experts only those that a token chooses count.

    layer_shapes: (rows, columns) of the first layer's matrices, without experts. layer_parameters: weights of all layers that a
    prompt token is multiplied by. weight_bytes: read for a decoded token, as stored in the file. attention_width: of all heads.
    """

    def __init__(self, file: Path) -> None:
        self.file = file.resolve()
        self.directory = derive_gguf_directory(self.file)
        config = json.loads((self.directory / "config.json").read_text("utf-8"))
        tensors = json.loads((self.directory / "gguf.json").read_text("utf-8"))["tensors"]
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 1
        chosen = (config.get("num_experts_per_tok") or 1) / experts
        self.layer_shapes = [
            (tensor["shape"][0], tensor["shape"][1])
            for name, tensor in tensors.items()
            if ".layers.0." in name and len(tensor["shape"]) == 2
        ]
        self.layer_parameters = 0.0
        self.weight_bytes = 0.0
        for name, tensor in tensors.items():
            share = chosen if len(tensor["shape"]) == 3 else 1.0
            if ".layers." in name and len(tensor["shape"]) > 1:
                self.layer_parameters += share * prod(tensor["shape"])
            if "embed_tokens" not in name or "lm_head.weight" not in tensors:
                self.weight_bytes += share * (tensor["end"] - tensor["begin"])
        self.layers: int = config["num_hidden_layers"]
        self.vocab: int = config["vocab_size"]
        self.context: int = config["max_position_embeddings"]
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        self.attention_width: int = heads * dim
        self._cached_values: int = 2 * self.layers * config.get("num_key_value_heads", heads) * dim

    def cache_bytes(self, kind: str) -> float:
        """Bytes of a token's keys and values, stored as f16 or q8_0."""
        return self._cached_values * _CACHE_BYTES[kind]

    def step_bytes(self, streams: int, context: int, kind: str) -> float:
        """Bytes read by a step that decodes a token of each stream after `context` tokens."""
        return self.weight_bytes + streams * context * self.cache_bytes(kind)

    def prompt_flop(self, tokens: int) -> float:
        """Operations of a prompt: products with the layers' matrices and causal attention."""
        pairs = tokens * (tokens + 1) / 2
        return 2.0 * self.layer_parameters * tokens + 4.0 * self.layers * self.attention_width * pairs


def open_model(file: Path | None) -> GGUFModel:
    """The model of a file, by default the file of `windlass pull`. Ends the program if it does not exist."""
    if file is None:
        file = model_file(QWEN_CODER_1_5B)
        if not file.exists():
            raise SystemExit(
                f"error: no {file}: run `windlass pull {QWEN_CODER_1_5B.name}`, or name a file with --model"
            )
    if not file.exists():
        raise SystemExit(f"error: no file {file}")
    return GGUFModel(file)
