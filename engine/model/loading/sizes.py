"""What a model's weights take in memory, from its spec alone. Knows neither files nor torch."""

from __future__ import annotations

from windlass.engine.model.spec import ModelSpec

_INT4_BYTES = 0.5 + 2 / 32  # half a byte, and for every 32 of them a scale of two bytes


def weight_bytes(spec: ModelSpec, item_bytes: int, quantization: str = "none") -> int:
    """Bytes of all matrices, a little less than what loading takes: padding, norms and biases are not counted.

    item_bytes: of an element that is not quantized. quantization: none, int8 or int4, as `compute.quantization` has it.
    """
    layers = 0
    for layer in spec.layers:
        attention = layer.attention
        heads = 2 * (attention.num_heads + attention.num_kv_heads)  # of q and the output, of k and v
        layers += spec.hidden_size * (heads * attention.head_dim + 3 * layer.intermediate_size)
    table = spec.vocab_size * spec.hidden_size
    if quantization == "none":
        return (layers + table * (1 if spec.tied_embeddings else 2)) * item_bytes
    embedding = 0 if spec.tied_embeddings else table * item_bytes
    return int(layers * (1 if quantization == "int8" else _INT4_BYTES)) + table + embedding  # the head has 8 bits
