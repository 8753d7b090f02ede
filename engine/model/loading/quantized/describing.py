"""From a quantized checkpoint's config.json and files to what each of its weights is made of.

Responsible for asking the right module for every weight of a model and for what else such a checkpoint holds. Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.quantization import read_quantization_config
from windlass.engine.model.config_json.values import Config
from windlass.engine.model.loading.quantized.awq import describe_awq
from windlass.engine.model.loading.quantized.compressed import describe_compressed
from windlass.engine.model.loading.quantized.files import Located, LocatedTensor, locate
from windlass.engine.model.loading.quantized.floats import describe_floats
from windlass.engine.model.loading.quantized.gptq import describe_gptq
from windlass.engine.model.loading.quantized.mxfp4 import describe_mxfp4
from windlass.engine.model.loading.quantized.plan import QuantizedCheckpoint, QuantizedTensor
from windlass.engine.model.loading.quantized.shapes import ExpectedTensor
from windlass.engine.model.loading.quantized.ternary import describe_ternary
from windlass.engine.model.spec import ModelSpec

_DESCRIBE = {
    "GPTQ": describe_gptq,
    "AWQ": describe_awq,
    "compressed-tensors": describe_compressed,
    "FP8": describe_floats,
    "MXFP4": describe_mxfp4,
    "BitNet": describe_ternary,
}
# Beside the weights of a module: what some writers add to them.
_ADDITIONAL = (
    "g_idx",
    "weight_shape",
    "weight_g_idx",
    "weight_zero_point",
    "weight_scale",
    "weight_scale_inv",
    "qzeros",
)
# How activations, keys and values were rounded where the checkpoint was tried out; here that is decided by options.
_ACTIVATIONS = re.compile(r"\.(input|output|activation|prob|kv|[qkv])_(scale|scale_ub|global_scale|zero_point)$")


def describe_quantized_weights(config: Config, spec: ModelSpec, directory: Path) -> QuantizedCheckpoint | None:
    """What the quantized weights of a checkpoint are made of; None where config.json tells of no method that is read.

    Reads headers, and scales, zero points and orders of columns where those decide. Raises LoadError for a checkpoint that is
    incomplete or does not fit its config.json.
    """
    quant_config = read_quantization_config(config)
    if quant_config is None:
        return None
    located = locate(directory)
    tensors: dict[str, QuantizedTensor] = {}
    sources: dict[str, LocatedTensor] = {}
    biases: set[str] = set()
    expected = {tensor.name for weight in spec.weights() for tensor in weight.stored}
    stacked = Counter(name.rpartition("[")[0] for name in expected if name.endswith("]"))
    for weight in spec.weights():
        if len(weight.shape) != 2:
            continue
        for stored in weight.stored:
            count = stacked[stored.name.rpartition("[")[0]] or 1
            wanted = ExpectedTensor(stored.name.removesuffix(".weight"), stored.rows, weight.shape[1], count)
            try:
                found = _DESCRIBE[quant_config.method](located, wanted, quant_config)
            except LoadError as error:
                raise LoadError(f"{directory}: {error}") from None
            if found is None:
                continue
            tensors[stored.name] = found
            for name in found.sources.values():
                sources |= {one.name: one for one in _found(located, name)}
            sources |= {name: located[name] for end in _ADDITIONAL if (name := f"{wanted.module}.{end}") in located}
            biases |= {f"{wanted.module}.bias"} & located.keys() - expected
    sources |= {name: one for name, one in located.items() if _ACTIVATIONS.search(name)}
    return QuantizedCheckpoint(quant_config.method, tensors, sources, frozenset(biases))


def _found(located: Located, name: str) -> Iterator[LocatedTensor]:
    """A tensor by its name; of "name[3]" also the one that holds it beside others."""
    if name in located:
        yield located[name]
        return
    stack, _, place = name.rpartition("[")
    yield located[stack]
    yield located[stack].one(int(place.removesuffix("]")))
