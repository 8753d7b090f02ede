"""A random model with a prediction layer that is often right: what `--speculative-mtp` costs and gives, without real weights.

    python benchmarks/predicting_model.py OUTPUT [--noise 0.12] [--adds 0.3]

In the shape of Qwen 3.5 0.8B, bfloat16. What its layers add to the stream is little beside the embeddings, and the head is the
embedding with its rows in another order. So the next token depends on the last one for the most part, and the prediction layer,
which joins that token's embedding with `--noise` of everything, is right in a share of the cases. That share says nothing of real
models. What a step takes hangs on the shapes alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from windlass.engine.interface.config import EngineConfig, LoadingConfig
from windlass.engine.model.loading.model_description import describe_model

_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,  # as in larger ones; a step reads as many bytes
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 2,
}
_ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")  # to the stream
_OFFSET_NORMS = "norm"  # these multiply by 1 + w, but for one
_OTHER_NORM = "linear_attn.norm.weight"


def made(name: str, shape: list[int], noise: float, adds: float, generator: torch.Generator) -> Tensor:
    """The numbers of a tensor."""
    if len(shape) == 1 and _OFFSET_NORMS in name:
        return torch.full(shape, float(name.endswith(_OTHER_NORM)))
    numbers = torch.randn(shape, generator=generator)
    if name.endswith("embed_tokens.weight"):
        return numbers
    if name == "mtp.fc.weight":  # [hidden, embedding and state]
        numbers *= noise
        numbers[:, : shape[0]] += torch.eye(shape[0])
        return numbers
    return numbers * (0.02 * adds if name.endswith(_ADDING) else 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--noise", type=float, default=0.12, help="of the prediction layer's matrix, beside the identity"
    )
    parser.add_argument("--adds", type=float, default=0.3, help="times what layers add to the stream")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    spec = describe_model(EngineConfig(model=str(options.output), loading=LoadingConfig(format="dummy"))).spec
    assert spec.predicting is not None
    generator, weights = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for weight in (*spec.weights(), *spec.predicting.weights()):
        for tensor in weight.stored:
            numbers = made(tensor.name, list(tensor.shape(weight)), options.noise, options.adds, generator)
            weights[tensor.name] = numbers.to(torch.bfloat16)
    order = torch.randperm(spec.vocab_size, generator=generator)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][order]
    save_file(weights, options.output / "model.safetensors")


if __name__ == "__main__":
    main()
