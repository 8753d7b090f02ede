"""The model's shape and what it implies: bytes per step, operations per token, bytes of cache. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

# Bits per weight as each file format stores it, scales included; per-channel int8 scales are too few to count.
WEIGHT_BITS = {
    "none": 16.0,  # bfloat16
    "bf16": 16.0,
    "fp32": 32.0,
    "f16": 16.0,
    "int8": 8.0,
    "q8_0": 8.5,  # a float16 scale per 32 weights
    "int4": 4.5,  # the same
    "q4_0": 4.5,
}  # a program with other values reports them itself
# Bytes of one head's key or value of `n` numbers: float32, and int8 with one float32 scale per token and head.
KV_ELEMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama with tied embeddings; `context` is the trained length. pace: how many times as many tokens as of a 1B model
    a sample of decoding takes, so that it lasts as long.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int = 40960
    pace: int = 1

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of one layer's matrices, by checkpoint name."""
        kv = self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.ffn, self.hidden),
            "mlp.up_proj": (self.ffn, self.hidden),
            "mlp.down_proj": (self.hidden, self.ffn),
        }

    @property
    def matrix_parameters(self) -> int:
        """Weights that one decode step multiplies by: all layers and the output matrix, which is also the embedding."""
        return self.layer_parameters + self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Weights that every prompt token passes; the output matrix is needed for the last one only."""
        return self.layers * sum(rows * columns for rows, columns in self.layer_matrices().values())

    def weight_bytes(self, weights: str) -> float:
        """Bytes one decode step must read of weights stored as `weights`, a key of WEIGHT_BITS."""
        return self.matrix_parameters * WEIGHT_BITS[weights] / 8

    def kv_bytes_per_token(self, dtype: str) -> float:
        """Bytes of keys and values of one token over all layers; int8 carries a float32 scale per token and head."""
        head = self.head_dim + 4 if dtype == "int8" else self.head_dim * KV_ELEMENT_BYTES[dtype]
        return 2 * self.layers * self.kv_heads * head

    def attention_operations(self, tokens: int) -> float:
        """Multiplications and additions of causal attention over a prompt of `tokens`, in all layers."""
        pairs = tokens * (tokens + 1) / 2
        return 4.0 * self.layers * self.heads * self.head_dim * pairs


ONE_B = ModelShape(hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=32000)
SMALL = ModelShape(hidden=256, layers=4, heads=8, kv_heads=2, ffn=704, vocab=1024)
SMOLLM2 = ModelShape(hidden=576, layers=30, heads=9, kv_heads=3, ffn=1536, vocab=49152, context=8192, pace=6)
# Trained models: only their quality shows the cost of rounding.
REAL = {"135m": SMOLLM2}
SHAPES = {"1b": ONE_B, "small": SMALL, **REAL}
