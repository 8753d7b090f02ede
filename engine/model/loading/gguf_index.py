"""Index of a GGUF model (`gguf.json`): its tensors and their locations under Hugging Face names.

The index is in the directory derived from the GGUF files, next to config.json and the tokenizer. This module reads it, checks
that the files have not changed, and determines the storage of each tensor type. Imports neither torch nor `gguf`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.loading.safetensors_header import TensorHeader
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.gated_delta_net import GatedDeltaNetSpec
from windlass.engine.model.mixers.latent_attention import LatentSpec
from windlass.engine.model.mixers.short_convolution import ShortConvolutionSpec
from windlass.engine.model.mixers.state_space import StateSpaceSpec
from windlass.engine.model.model_spec import LayerSpec, ModelSpec

INDEX = "gguf.json"

VERSION = 1

_UNKNOWN_SCALE = (
    "the head of this GGUF file is its embedding, with a factor in it that the file does not name: the likeliest token is the "
    "model's, probabilities may be far from it: serve the original Hugging Face model to sample from them"
)

# Types whose blocks are multiplied as they are: the storage, the elements of a block and its bytes.
BLOCKS = {
    "Q4_0": ("q4_0", 32, 18),
    "Q4_1": ("q4_1", 32, 20),
    "Q5_0": ("q5_0", 32, 22),
    "Q5_1": ("q5_1", 32, 24),
    "Q8_0": ("q8_0", 32, 34),
    "Q4_K": ("q4_k", 256, 144),
    "Q5_K": ("q5_k", 256, 176),
    "Q6_K": ("q6_k", 256, 210),
    "MXFP4": ("q5_0", 32, 17),  # as other blocks of the same numbers
}

PLAIN = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}

# Types that are dequantized while they are loaded, and kept with 8 bits: elements and bytes of a block.
_OTHERS = {
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "NVFP4": (64, 36),
}

_FALLBACK_STORAGE = "q8_0"


@dataclass(frozen=True, slots=True)
class GGUFIndex:
    """files: absolute paths. tensors: by name, and `file_numbers`: the file of each, an index into `files`.

    interleaved: rows of q and k hold rotated pairs as (2j, 2j + 1). norms_with_offset: norms are stored with what the family
    adds to them. fused_in_parts: a tensor of queries, keys and values has all queries, all keys, all values.
    latent_in_parts: what makes keys and what makes values of latent attention are two tensors. values_in_turns: heads of values
    of layers with a state meet those of keys by turns. gates_apart: gates and what they gate are two tensors, where checkpoints
    have one. factored: weights have been multiplied by factors that checkpoints have apart.
    """

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorHeader]
    file_numbers: Mapping[str, int]
    interleaved: bool
    norms_with_offset: bool
    fused_in_parts: bool = False
    latent_in_parts: bool = False
    values_in_turns: bool = False
    gates_apart: bool = False
    factored: bool = False

    def types(self) -> list[str]:
        """The types of the matrices, that of most numbers first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.dtype] += prod(tensor.shape)
        return [name for name, _ in counts.most_common()]

    def is_quantized(self) -> bool:
        """Whether matrices are something else than plain numbers."""
        return any(name not in PLAIN for name in self.types())

    def of(self, spec: ModelSpec) -> GGUFIndex:
        """With the tensors alone that are this model's: the files may hold those of its prediction layer too."""
        return replace(self, tensors={name: one for name, one in self.tensors.items() if not spec.ignores(name)})

    def original(self, spec: ModelSpec) -> ModelSpec:
        """The spec of the model that the files were made of, by which adapters are read: with heads of values in their order,
        and whether weights are such as no adapter knows. A notice says where logits have an unknown factor."""

        def turned(layer: LayerSpec) -> LayerSpec:
            mixer = layer.mixer
            return (
                replace(layer, mixer=replace(mixer, tiled_heads=True))
                if isinstance(mixer, GatedDeltaNetSpec)
                else layer
            )

        layers = tuple(map(turned, spec.layers)) if self.values_in_turns else spec.layers
        notices = (*spec.notices, _UNKNOWN_SCALE) if self.factored and spec.tied_embeddings else spec.notices
        return replace(spec, layers=layers, has_folded_factors=self.factored, notices=notices)

    def adapt(self, spec: ModelSpec) -> ModelSpec:
        """The spec of the model as these files hold it, and of its prediction layer."""
        if spec.mtp is not None:
            spec = replace(spec, mtp=self.adapt(spec.mtp))
        spec = as_gguf_holds(self.original(spec), latent_in_parts=self.latent_in_parts, gates_apart=self.gates_apart)
        if self.norms_with_offset:
            spec = replace(spec, norm_offset=0.0)
        if self.fused_in_parts:
            spec = replace(spec, layers=tuple(map(_fused_in_parts, spec.layers)))
        return _interleaved(spec) if self.interleaved else spec


def as_gguf_holds(spec: ModelSpec, *, latent_in_parts: bool, gates_apart: bool) -> ModelSpec:
    """The spec with the tensors that GGUF files have in place of others; see `GGUFIndex`."""
    layers = []
    for layer in spec.layers:
        if isinstance(layer.feed_forward, MoESpec):
            layer = replace(layer, feed_forward=layer.feed_forward.unfused)
        if isinstance(layer.feed_forward, GatedMLPSpec) and gates_apart:
            layer = replace(layer, feed_forward=layer.feed_forward.unfused)
        if layer.parallel_experts is not None:
            layer = replace(
                layer, parallel_experts=replace(layer.parallel_experts, experts=layer.parallel_experts.experts.unfused)
            )
        if isinstance(layer.mixer, LatentSpec):
            layer = replace(layer, mixer=replace(layer.mixer, in_parts=latent_in_parts))
        if isinstance(layer.mixer, GatedDeltaNetSpec):
            names = replace(layer.mixer.names, qkvz=None)
            layer = replace(layer, mixer=replace(layer.mixer, names=names, in_gguf=True))
        if isinstance(layer.mixer, ShortConvolutionSpec | StateSpaceSpec):
            layer = replace(layer, mixer=replace(layer.mixer, in_gguf=True))
        if (parallel := layer.parallel_state_space) is not None:
            state_space = replace(parallel.state_space, in_gguf=True)
            layer = replace(layer, parallel_state_space=replace(parallel, state_space=state_space))
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def _interleaved(spec: ModelSpec) -> ModelSpec:
    """The spec with rotated pairs as (2j, 2j + 1). Where the family has them otherwise the converter reordered all heads, those
    that do not rotate too."""
    attention = [mixer for mixer in spec.attention.values() if isinstance(mixer, AttentionSpec)]
    by_family = any(mixer.interleaved_dims for mixer in attention)
    layers = []
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, LatentSpec):
            mixer = replace(mixer, interleaved=mixer.rotary_group is not None)
        elif isinstance(mixer, AttentionSpec):
            unrotated = 0 if by_family else mixer.head_dim
            group = mixer.rotary_group
            pairs = unrotated if group is None else spec.rotary_groups[group].base.rotary_dim
            mixer = replace(mixer, interleaved_dims=pairs)
        layers.append(replace(layer, mixer=mixer))
    return replace(spec, layers=tuple(layers))


def _fused_in_parts(layer: LayerSpec) -> LayerSpec:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec):
        return layer
    return replace(layer, mixer=replace(mixer, names=replace(mixer.names, qkv_order="parts")))


def read_index(directory: Path) -> GGUFIndex | None:
    """The index in a derived directory; None for a directory of another kind. Raises LoadError for one that holds no longer."""
    path = directory / INDEX
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        index = _parsed(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise LoadError(f"{path} is damaged: remove {directory} and start again with the GGUF file") from None
    return index


def gguf_storages(tensors: Mapping[str, TensorHeader], *, plain: bool) -> dict[str, str]:
    """The storage of each matrix, by the tensor's name. plain: tensors of plain numbers keep their types too."""
    storages = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) < 2:
            continue
        if tensor.dtype in BLOCKS:
            storages[name] = BLOCKS[tensor.dtype][0]
        elif tensor.dtype in _OTHERS:
            storages[name] = _FALLBACK_STORAGE
        elif plain and tensor.dtype in PLAIN:
            storages[name] = PLAIN[tensor.dtype][0]
    return storages


def block_columns(tensors: Mapping[str, TensorHeader]) -> dict[str, int]:
    """How many columns lie in a block, by the names of the tensors in blocks."""
    sizes = {name: elements for name, (_, elements, _) in BLOCKS.items()}
    sizes |= {name: elements for name, (elements, _) in _OTHERS.items()}
    return {name: sizes[tensor.dtype] for name, tensor in tensors.items() if tensor.dtype in sizes}


def requantization_notice(tensors: Mapping[str, TensorHeader]) -> str | None:
    """What to say of tensors whose types are not multiplied as they are; None where there are none."""
    counts = Counter(tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1 and tensor.dtype in _OTHERS)
    if not counts:
        return None
    named = ", ".join(f"{name} ({count} tensor{'s' if count > 1 else ''})" for name, count in counts.most_common())
    return (
        f"the GGUF file holds {named}, which cannot be multiplied as stored: kept with 8 bits each instead ({_FALLBACK_STORAGE}); "
        "a file of Q4_K_M or Q8_0 takes less memory for the same quality"
    )


def _parsed(content: dict[str, Any]) -> GGUFIndex:
    if content["version"] != VERSION:
        raise ValueError
    files = tuple(_checked_file(entry) for entry in content["files"])
    sizes = [entry["size"] for entry in content["files"]]
    tensors, file_numbers = {}, {}
    for name, entry in content["tensors"].items():
        header = TensorHeader(entry["type"], tuple(map(int, entry["shape"])), int(entry["begin"]), int(entry["end"]))
        file_numbers[name] = int(entry["file"])
        if not 0 <= header.begin <= header.end <= sizes[file_numbers[name]] or file_numbers[name] < 0:
            raise ValueError
        _check_type(name, header, files[file_numbers[name]])
        tensors[name] = header
    return GGUFIndex(
        files,
        tensors,
        file_numbers,
        bool(content["interleaved"]),
        bool(content["norms_with_offset"]),
        bool(content.get("fused_in_parts", False)),
        bool(content.get("latent_in_parts", False)),
        bool(content.get("values_in_turns", False)),
        bool(content.get("gates_apart", False)),
        bool(content.get("factored", False)),
    )


def _checked_file(entry: Mapping[str, Any]) -> Path:
    path = Path(entry["path"])
    try:
        stat = path.stat()
    except OSError as error:
        raise LoadError(f"{path} cannot be read any more ({error.strerror}): start again with the GGUF file") from None
    if (stat.st_size, stat.st_mtime_ns) != (entry["size"], entry["mtime_ns"]):
        raise LoadError(f"{path} has changed since it was looked at: start again with the GGUF file")
    return path


def _check_type(name: str, header: TensorHeader, path: Path) -> None:
    """LoadError for a type that nobody here can read, or for bytes that are not those of the shape."""
    if header.dtype in PLAIN:
        elements, size = 1, PLAIN[header.dtype][1]
    elif header.dtype in BLOCKS:
        _, elements, size = BLOCKS[header.dtype]
    elif header.dtype in _OTHERS:
        elements, size = _OTHERS[header.dtype]
    else:
        raise LoadError(
            f"{path}: tensor {name!r} has the type {header.dtype}, which cannot be read: give a file of another "
            "quantization, Q4_K_M or Q8_0 for example"
        )
    columns = header.shape[-1] if header.shape else 1
    if columns % elements or prod(header.shape) // elements * size != header.end - header.begin:
        raise LoadError(
            f"{path}: tensor {name!r} of shape {list(header.shape)} and type {header.dtype} does not have the bytes it needs: "
            "download the file again"
        )
