"""Holds the tensors of a checkpoint, by its headers, against those that its config.json asks for.

Responsible for names, shapes and types: every tensor used once and none left over, told before a weight is read. Imports no
torch, so that the API process can tell before it listens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.gguf_index import GGUFIndex
from windlass.engine.model.loading.quantized.plan import QuantizedCheckpoint
from windlass.engine.model.loading.safetensors_header import TensorHeader
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec

# Buffers some exporters save. They follow from the config; learned frequencies are read by `learned_frequencies`.
_DERIVED = re.compile(
    r"(^|\.)rotary(_pos)?_emb(_local)?\.(\w+_)?inv_freq$|\.(attention|attn)\.(masked_bias|bias|causal_mask)$"
)
_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_NAMED = 3  # tensors named in a message


def is_derived(name: str) -> bool:
    """Whether a tensor follows from config.json, so that nobody reads it."""
    return _DERIVED.search(name) is not None


def check_tensors(
    directory: Path,
    spec: ModelSpec,
    headers: Mapping[str, TensorHeader],
    gguf: GGUFIndex | None,
    quantized: QuantizedCheckpoint | None,
) -> None:
    """Raise LoadError, which names tensors, for some that are missing, that nobody asks for, or of another shape or type."""
    expected = {tensor.name: stored_shape(weight, tensor) for weight in spec.weights() for tensor in weight.stored}
    found = gguf.tensors if gguf is not None else _unstack_headers(headers, expected)
    read = quantized.tensors if quantized is not None else {}
    sources: Collection[str] = quantized.sources if quantized is not None else ()
    surplus = []
    for name, header in found.items():
        if name in sources or (gguf is None and spec.ignores(name)):
            continue
        if name not in expected:
            if not _is_allowed(name, spec, quantized):
                surplus.append(name)
        elif (list(header.shape) or [1]) != expected[name]:
            raise LoadError(
                f"{directory}: tensor {name!r} has shape {list(header.shape)} where config.json asks for {expected[name]}: take "
                "the config.json that belongs to the checkpoint"
            )
        elif gguf is None and header.dtype not in _NUMBERS:
            raise LoadError(
                f"{directory}: tensor {name!r} is {header.dtype}, which are no weights: a checkpoint quantized in a way that "
                "config.json does not tell; download config.json again, or take the unquantized model"
            )
    if surplus:
        raise LoadError(
            f"{directory}: unexpected {_quote_names('tensor', surplus)}: this architecture has no place for {_them(surplus)}: take the "
            "config.json that belongs to the checkpoint"
        )
    if missing := [name for name in expected if name not in found and name not in read]:
        are = "is" if len(missing) == 1 else "are"
        raise LoadError(
            f"{directory}: {_quote_names('tensor', missing)} {are} missing: the checkpoint is incomplete: download it again"
        )


def stored_shape(weight: WeightSpec, tensor: StoredTensor) -> list[int]:
    """Of a tensor in a checkpoint."""
    if tensor.by_head is not None:
        return [tensor.by_head, tensor.rows // tensor.by_head]
    if tensor.channels:
        return [tensor.rows, 1, *weight.shape[1:]]
    shape = [tensor.rows, *weight.shape[1:]]
    return shape[::-1] if tensor.transposed else shape


def _unstack_headers(headers: Mapping[str, TensorHeader], expected: Collection[str]) -> dict[str, TensorHeader]:
    """The headers with those taken apart that hold several tensors along their first dimension, "name[0]" and so on."""
    stacks = {name.rpartition("[")[0] for name in expected if name.endswith("]")}
    found = {}
    for name, header in headers.items():
        if name in stacks and header.shape:
            parts = range(header.shape[0])
            one = TensorHeader(header.dtype, header.shape[1:], header.begin, header.end)
            found.update({f"{name}[{index}]": one for index in parts})
        else:
            found[name] = header
    return found


def _is_allowed(name: str, spec: ModelSpec, quantized: QuantizedCheckpoint | None) -> bool:
    """Whether a tensor may be there although no weight is made of it."""
    is_tied_head = spec.tied_embeddings and name in spec.head_tensors  # compared with the embedding when it is read
    return is_tied_head or is_derived(name) or (quantized is not None and name in quantized.zero_biases)


def _quote_names(what: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]!r}"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what}s {', '.join(map(repr, names[:_NAMED]))}{more}"


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
