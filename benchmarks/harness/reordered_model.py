"""A model with its features permuted, for measurements of quantization.

    python benchmarks/peers.py reorder MODEL OUTPUT [--gguf FILE.gguf --metadata ORIGINAL.gguf]

Weights that were dequantized from a 4-bit file are on the grid of that file, so rounding them again in the same groups is
exact by construction. Permuting the residual stream, the features of each feed-forward and those of each value head gives the
same function with other neighbours in each group. For models with the tensors of Llama. --gguf also writes a float32 file for
llama.cpp's quantizer, with the metadata of the original file.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from harness.gguf_file import fields_of, write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor


def reordered(weights: dict[str, Tensor], config: dict[str, int], seed: int = 0) -> dict[str, Tensor]:
    """The weights in another order; the model computes the same function. config: of the model's config.json."""
    generator = torch.Generator().manual_seed(seed)
    made = dict(weights)
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim, inner = config.get("head_dim", hidden // heads), config["intermediate_size"]

    def change(name: str, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
        made[name] = made[name] if rows is None else made[name][rows]
        made[name] = made[name] if columns is None else made[name][:, columns]

    stream = torch.randperm(hidden, generator=generator)
    change("model.embed_tokens.weight", columns=stream)
    change("model.norm.weight", rows=stream)
    if "lm_head.weight" in made:
        change("lm_head.weight", columns=stream)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        features = torch.randperm(inner, generator=generator)
        values = torch.cat([h * dim + torch.randperm(dim, generator=generator) for h in range(kv_heads)])
        # Query heads of a group read the same value head: their parts of the output's columns move alike.
        read = values.view(kv_heads, 1, dim) - torch.arange(kv_heads)[:, None, None] * dim
        read = read.expand(kv_heads, heads // kv_heads, dim).reshape(heads, dim) + torch.arange(heads)[:, None] * dim
        for norm in ("input_layernorm", "post_attention_layernorm"):
            change(f"{prefix}{norm}.weight", rows=stream)
        for name in ("q_proj", "k_proj"):
            change(f"{prefix}self_attn.{name}.weight", columns=stream)
        change(f"{prefix}self_attn.v_proj.weight", values, stream)
        change(f"{prefix}self_attn.o_proj.weight", stream, read.flatten())
        for name in ("gate_proj", "up_proj"):
            change(f"{prefix}mlp.{name}.weight", features, stream)
        change(f"{prefix}mlp.down_proj.weight", stream, features)
    return {name: tensor.contiguous() for name, tensor in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json, model.safetensors and a tokenizer")
    parser.add_argument("output", type=Path, help="directory to make")
    parser.add_argument("--gguf", type=Path, help="write it as a float32 GGUF too")
    parser.add_argument("--metadata", type=Path, help="the GGUF file whose metadata that one gets")
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    made = reordered(load_file(options.model / "model.safetensors"), config)
    options.output.mkdir(parents=True, exist_ok=True)
    for file in options.model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, options.output)
    save_file(made, options.output / "model.safetensors", metadata={"format": "pt"})
    if options.gguf is not None:
        if options.metadata is None:
            parser.error("--gguf needs --metadata, a GGUF file with vocabulary and shapes")
        write_gguf(made, config, fields_of(options.metadata), options.gguf)


if __name__ == "__main__":
    main()
