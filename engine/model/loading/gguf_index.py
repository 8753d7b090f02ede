"""Index of a GGUF model (`gguf.json`): its tensors and their locations under Hugging Face names.

The index is in the directory derived from the GGUF files, next to config.json and the tokenizer. This module reads it, checks
that the files have not changed, and defines the tensor types of GGUF. Imports neither torch nor `gguf`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from windlass.engine.errors import LoadError
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.loading.safetensors_header import NUMBER_BYTES, TensorLocation
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.gated_delta_net import GatedDeltaNetSpec
from windlass.engine.model.mixers.latent_attention import LatentSpec
from windlass.engine.model.mixers.short_convolution import ShortConvolutionSpec
from windlass.engine.model.mixers.state_space import StateSpaceSpec
from windlass.engine.model.model_spec import ModelSpec, RecurrentMixerSpec

Mixer: TypeAlias = AttentionSpec | LatentSpec | RecurrentMixerSpec | None
INDEX = "gguf.json"
VERSION = 1  # of gguf.json

_UNKNOWN_SCALE = (
    "the output head of this GGUF file is its embedding, multiplied by a factor that the file does not name: the most likely "
    "token is right, but probabilities may be far off; to sample from them, serve the original Hugging Face model"
)


@dataclass(frozen=True, slots=True)
class GGUFType:
    """A tensor type of GGUF.

    storage: how its weights are stored in memory. elements, num_bytes: of one block. scales: the bytes of a block, first to
    last, that hold its scales: float16, or the exponent of MXFP4; None for types that are not stored in blocks as they are.
    """

    storage: str
    elements: int
    num_bytes: int
    scales: tuple[int, int] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a tensor of this type holds floats."""
        return self.elements == 1


_FALLBACK_STORAGE = "q8_0"

# Blocks and bytes of types that have no block format here: they are dequantized at load and stored with 8 bits.
_DEQUANTIZED = {
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

GGUF_TYPES = {
    "F32": GGUFType("float32", 1, NUMBER_BYTES["F32"]),
    "F16": GGUFType("float16", 1, NUMBER_BYTES["F16"]),
    "BF16": GGUFType("bfloat16", 1, NUMBER_BYTES["BF16"]),
    "Q4_0": GGUFType("q4_0", 32, 18, (0, 2)),
    "Q4_1": GGUFType("q4_1", 32, 20, (0, 4)),
    "Q5_0": GGUFType("q5_0", 32, 22, (0, 2)),
    "Q5_1": GGUFType("q5_1", 32, 24, (0, 4)),
    "Q8_0": GGUFType("q8_0", 32, 34, (0, 2)),
    "Q4_K": GGUFType("q4_k", 256, 144, (0, 4)),
    "Q5_K": GGUFType("q5_k", 256, 176, (0, 4)),
    "Q6_K": GGUFType("q6_k", 256, 210, (208, 210)),
    "MXFP4": GGUFType("q5_0", 32, 17, (0, 1)),  # converted: q5_0 holds the same numbers
    **{name: GGUFType(_FALLBACK_STORAGE, *size) for name, size in _DEQUANTIZED.items()},
}


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """How llama.cpp's converter stores a model differently from its checkpoint. The names are keys of gguf.json.

    interleaved: rows of q and k hold rotated pairs as (2j, 2j + 1). norms_with_offset: the family's offset is already added to
    the weights of norms. fused_in_parts: a fused tensor has all queries, then all keys, then all values. latent_in_parts: the
    up-projections of keys and of values in latent attention are two tensors. values_in_turns: value heads of recurrent layers
    are interleaved over the key heads. gates_apart: gate and up projections are two tensors where checkpoints have one.
    factored: weights are multiplied by factors that checkpoints store separately.
    """

    interleaved: bool = False
    norms_with_offset: bool = False
    fused_in_parts: bool = False
    latent_in_parts: bool = False
    values_in_turns: bool = False
    gates_apart: bool = False
    factored: bool = False


_LAYOUT_KEYS = tuple(one.name for one in fields(GGUFLayout))


@dataclass(frozen=True, slots=True)
class GGUFIndex:
    """files: absolute paths. tensors: by name."""

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorLocation]
    layout: GGUFLayout = field(default_factory=GGUFLayout)

    def types(self) -> list[str]:
        """The types of the matrices, ordered by their number of elements, largest first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.dtype] += prod(tensor.shape)
        return [name for name, _ in counts.most_common()]

    def is_quantized(self) -> bool:
        """Whether any matrix is not plain floats."""
        return any(not GGUF_TYPES[name].is_plain for name in self.types())

    def storages(self, *, plain: bool) -> dict[str, str]:
        """The storage of each matrix, by the tensor's name. plain: also of matrices of plain floats, which keep their type."""
        matrices = {name: GGUF_TYPES[one.dtype] for name, one in self.tensors.items() if len(one.shape) > 1}
        return {name: kind.storage for name, kind in matrices.items() if plain or not kind.is_plain}

    def block_columns(self) -> dict[str, int]:
        """Columns of a block, by the names of the tensors in blocks."""
        kinds = {name: GGUF_TYPES[tensor.dtype] for name, tensor in self.tensors.items()}
        return {name: kind.elements for name, kind in kinds.items() if not kind.is_plain}

    def requantization_notice(self) -> str | None:
        """A notice on matrices whose types have no block format; None if there are none."""
        counts = Counter(
            tensor.dtype for tensor in self.tensors.values() if len(tensor.shape) > 1 and tensor.dtype in _DEQUANTIZED
        )
        if not counts:
            return None
        named = ", ".join(f"{name} ({count} tensor{'s' if count > 1 else ''})" for name, count in counts.most_common())
        return (
            f"the GGUF file has types that cannot be multiplied as stored, {named}: they are converted to 8 bits "
            f"({_FALLBACK_STORAGE}); a file of Q4_K_M or Q8_0 takes less memory for the same quality"
        )

    def for_spec(self, spec: ModelSpec) -> GGUFIndex:
        """The index without tensors that this spec ignores: the files may also hold those of the MTP head."""
        return replace(self, tensors={name: one for name, one in self.tensors.items() if not spec.ignores(name)})

    def original_spec(self, spec: ModelSpec) -> ModelSpec:
        """The spec of the model from which the files were made, by which adapters are read: value heads have their order in the
        file, and `factored` is set. A notice reports logits with an unknown factor."""
        if self.layout.values_in_turns:
            spec = _with_mixers(
                spec, lambda one: replace(one, tiled_heads=True) if isinstance(one, GatedDeltaNetSpec) else one
            )
        factored = self.layout.factored
        notices = (*spec.notices, _UNKNOWN_SCALE) if factored and spec.tied_embeddings else spec.notices
        return replace(spec, has_folded_factors=factored, notices=notices)

    def stored_spec(self, spec: ModelSpec) -> ModelSpec:
        """The spec of the model, and of its MTP head, as these files store it."""
        if spec.mtp is not None:
            spec = replace(spec, mtp=self.stored_spec(spec.mtp))
        spec = to_gguf_spec(self.original_spec(spec), self.layout)
        if self.layout.norms_with_offset:
            spec = replace(spec, norm_offset=0.0)
        if self.layout.fused_in_parts:
            spec = _with_mixers(spec, _fused_in_parts)
        return _interleaved(spec) if self.layout.interleaved else spec


def _with_mixers(spec: ModelSpec, change: Callable[[Mixer], Mixer]) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, mixer=change(layer.mixer)) for layer in spec.layers))


def to_gguf_spec(spec: ModelSpec, layout: GGUFLayout) -> ModelSpec:
    """The spec with the tensors that GGUF files have in place of those of a checkpoint."""

    def stored(mixer: Mixer) -> Mixer:
        if isinstance(mixer, LatentSpec):
            return replace(mixer, in_parts=layout.latent_in_parts)
        if isinstance(mixer, GatedDeltaNetSpec):
            return replace(mixer, names=replace(mixer.names, qkvz=None), in_gguf=True)
        return replace(mixer, in_gguf=True) if isinstance(mixer, ShortConvolutionSpec | StateSpaceSpec) else mixer

    layers = []
    for layer in spec.layers:
        if isinstance(layer.feed_forward, MoESpec) or (
            isinstance(layer.feed_forward, GatedMLPSpec) and layout.gates_apart
        ):
            layer = replace(layer, feed_forward=layer.feed_forward.unfused)
        if layer.parallel_experts is not None:
            layer = replace(
                layer, parallel_experts=replace(layer.parallel_experts, experts=layer.parallel_experts.experts.unfused)
            )
        if (parallel := layer.parallel_state_space) is not None:
            state_space = replace(parallel.state_space, in_gguf=True)
            layer = replace(layer, parallel_state_space=replace(parallel, state_space=state_space))
        layers.append(layer)
    return _with_mixers(replace(spec, layers=tuple(layers)), stored)


def _interleaved(spec: ModelSpec) -> ModelSpec:
    """The spec with rotated pairs as (2j, 2j + 1). If the family stores them otherwise, the converter has reordered all heads,
    including those that do not rotate."""
    attention = [mixer for mixer in spec.attention.values() if isinstance(mixer, AttentionSpec)]
    by_family = any(mixer.interleaved_dims for mixer in attention)

    def interleaved(mixer: Mixer) -> Mixer:
        if isinstance(mixer, LatentSpec):
            return replace(mixer, interleaved=mixer.rotary_group is not None)
        if not isinstance(mixer, AttentionSpec):
            return mixer
        unrotated, group = 0 if by_family else mixer.head_dim, mixer.rotary_group
        pairs = unrotated if group is None else spec.rotary_groups[group].base.rotary_dim
        return replace(mixer, interleaved_dims=pairs)

    return _with_mixers(spec, interleaved)


def _fused_in_parts(mixer: Mixer) -> Mixer:
    if not isinstance(mixer, AttentionSpec):
        return mixer
    return replace(mixer, names=replace(mixer.names, qkv_order="parts"))


def read_index(directory: Path) -> GGUFIndex | None:
    """The index in a derived directory; None for other directories. Raises LoadError if it is damaged or its files changed."""
    path = directory / INDEX
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        return _parse_index(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise LoadError(f"{path} is damaged: remove {directory} and start again with the GGUF file") from None


def _parse_index(content: dict[str, Any]) -> GGUFIndex:
    if content["version"] != VERSION:
        raise ValueError
    files = tuple(_checked_file(entry) for entry in content["files"])
    sizes = [entry["size"] for entry in content["files"]]
    tensors = {}
    for name, entry in content["tensors"].items():
        number, shape = int(entry["file"]), tuple(map(int, entry["shape"]))
        tensor = TensorLocation(name, files[number], entry["type"], shape, int(entry["begin"]), int(entry["end"]))
        if not 0 <= tensor.begin <= tensor.end <= sizes[number] or number < 0:
            raise ValueError
        _check_type(tensor)
        tensors[name] = tensor
    required = {key: content[key] for key in ("interleaved", "norms_with_offset")}  # older files lack the other keys
    layout = GGUFLayout(**{key: bool(value) for key, value in (content | required).items() if key in _LAYOUT_KEYS})
    return GGUFIndex(files, tensors, layout)


def _checked_file(entry: Mapping[str, Any]) -> Path:
    path = Path(entry["path"])
    try:
        stat = path.stat()
    except OSError as error:
        raise LoadError(f"{path} cannot be read any more ({error.strerror}): start again with the GGUF file") from None
    if (stat.st_size, stat.st_mtime_ns) != (entry["size"], entry["mtime_ns"]):
        raise LoadError(f"{path} has changed since it was read: start again with the GGUF file")
    return path


def _check_type(tensor: TensorLocation) -> None:
    """Raises LoadError for an unknown type, or if the number of bytes does not match the shape."""
    kind = GGUF_TYPES.get(tensor.dtype)
    if kind is None:
        raise LoadError(
            f"{tensor.file}: tensor {tensor.name!r} has the type {tensor.dtype}, which cannot be read: give a file of another "
            "quantization, Q4_K_M or Q8_0 for example"
        )
    columns, num_bytes = (tensor.shape[-1] if tensor.shape else 1), tensor.end - tensor.begin
    if columns % kind.elements or prod(tensor.shape) // kind.elements * kind.num_bytes != num_bytes:
        raise LoadError(
            f"{tensor.file}: tensor {tensor.name!r} of shape {list(tensor.shape)} and type {tensor.dtype} does not have the "
            "bytes it needs: download the file again"
        )
