"""Description of a model from its files: config.json, tensor headers, and the spec that matches them.

Resolves the name prefix and the expert layout of the checkpoint, checks that every tensor exists once with the expected shape
and type, and reads learned rotary frequencies. Preflight and loader both use this description. Reads no weights and imports no
torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from windlass.engine.bounded_files import read_json_text
from windlass.engine.errors import LoadError, RequestError, with_place
from windlass.engine.interface.config import EngineConfig
from windlass.engine.model.config_json.config_rules import Config
from windlass.engine.model.config_json.unsupported import describe_quantized, describe_tensors
from windlass.engine.model.families.multimodal import text_config_of
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.loading.checkpoint import read_headers
from windlass.engine.model.loading.draft_model import MTPPart, mtp_spec
from windlass.engine.model.loading.gguf_index import GGUFIndex, read_index
from windlass.engine.model.loading.quantized_checkpoint import QuantizedCheckpoint, describe_quantized_weights
from windlass.engine.model.loading.safetensors_header import TensorLocation, read_header, unstack_tensors
from windlass.engine.model.model_spec import FeedForwardSpec, LayerSpec, ModelSpec, OuterNames
from windlass.engine.model.mtp_input import MTPInputSpec
from windlass.engine.rotary.auto_scaling import AUTO, checked_thresholds
from windlass.engine.rotary.rope_scaling import RotaryGroup, apply_scaling


def check_not_quantized_twice(
    config: EngineConfig, directory: Path, gguf: GGUFIndex | None, quantized: QuantizedCheckpoint | None
) -> None:
    """Raise LoadError if weights that are already quantized in their files would be quantized again."""
    if config.compute.quantization == "none":
        return
    already = None
    if gguf is not None and gguf.is_quantized():
        already = f"{gguf.files[0]} is quantized already ({', '.join(gguf.types())})"
    elif quantized is not None and quantized.is_integers:
        already = f"{directory} is quantized already ({quantized.title})"
    if already is not None:
        raise LoadError(
            f"{already}: leave `compute.quantization={config.compute.quantization}` out, or give the unquantized model"
        )


def with_learned_frequencies(groups: tuple[RotaryGroup, ...], directory: Path) -> tuple[RotaryGroup, ...]:
    """The rotary groups, with learned frequencies read from the files.

    The tensor is `model.rotary_emb.inv_freq`, or `model.rotary_emb.full_attention_inv_freq` and so on if groups differ. Raises
    LoadError if it is missing or does not hold frequencies of this model.
    """
    return tuple(
        group if group.base.inv_freq is None else _filled(group, directory, len(groups) > 1) for group in groups
    )


def _filled(group: RotaryGroup, directory: Path, several: bool) -> RotaryGroup:
    names = [f"model.rotary_emb.{group.name}_inv_freq", "model.rotary_emb.inv_freq"]
    found: dict[str, TensorLocation] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= read_header(path).tensors
    tensor = next((found[name] for name in (names[:1] if several else names) if name in found), None)
    if tensor is None:
        wanted = names[0] if several else names[1]
        raise LoadError(f"{directory}: rope_type 'learned' needs the tensor {wanted}: no file of this model has it")
    values = tensor.read_floats()
    pairs = group.base.rotary_dim // 2
    if len(values) != pairs:
        raise LoadError(
            f"{directory}: tensor {tensor.name} holds {len(values)} frequencies, the model rotates {pairs} pairs"
        )
    if not all(math.isfinite(w) and w >= 0 for w in values):
        raise LoadError(
            f"{directory}: tensor {tensor.name} contains numbers that are not frequencies: below 0 or not finite"
        )
    return replace(group, base=replace(group.base, inv_freq=values))


AnyFeedForward = TypeVar("AnyFeedForward", bound=FeedForwardSpec)


def with_stored_names(spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
    """The spec with the tensor names of the files, whose prefix may differ from the family's; unchanged if none is similar.

    tensors: names of all tensors in the files, empty if no file is read. Raises LoadError if the head is not among them and is
    not the embedding.
    """
    if not tensors:
        return spec
    names = _stored_names(spec.names, tensors)

    def renamed(name: str) -> str:
        return names.layers + name.removeprefix(spec.names.layers) if name.startswith(spec.names.layers) else name

    unused = tuple(dict.fromkeys((*spec.unused_tensors, *map(renamed, spec.unused_tensors))))
    mtp = None if spec.mtp is None else _rename_mtp(spec.mtp, renamed)
    found = replace(spec, names=names, unused_tensors=unused, mtp=mtp)
    embedding, head = f"{found.names.embedding}.weight", f"{found.names.head}.weight"
    needs_head = not spec.tied_embeddings and spec.generates
    if needs_head and embedding in tensors and not any(name.startswith(f"{found.names.head}.") for name in tensors):
        raise LoadError(
            f"the files contain no {head}: these are the weights of a model without its language-model head (an embedding model, "
            "for example), which does not generate text: give the model for text generation that it was made from, name its "
            'class without a head (it ends in "Model") under "architectures" in config.json to make vectors with it, or set '
            '"tie_word_embeddings": true in config.json if its head is the embedding'
        )
    return found


def _rename_mtp(layer: ModelSpec, renamed: Callable[[str], str]) -> ModelSpec:
    names, mtp_input = layer.names, layer.mtp_input
    assert mtp_input is not None and names.final_norm is not None
    return replace(
        layer,
        names=replace(names, layers=renamed(names.layers), final_norm=renamed(names.final_norm)),
        mtp_input=MTPInputSpec(*map(renamed, (mtp_input.embedding_norm, mtp_input.state_norm, mtp_input.matrix))),
        own_tensors=tuple(map(renamed, layer.own_tensors)),
        unused_tensors=tuple(map(renamed, layer.unused_tensors)),
    )


def _stored_names(names: OuterNames, tensors: Collection[str]) -> OuterNames:
    if f"{names.embedding}.weight" in tensors:
        return names
    prefix = names.embedding[: names.embedding.index(".") + 1]
    end, layers = f"{names.embedding.removeprefix(prefix)}.weight", f".{names.layers.removeprefix(prefix)}."
    # An MTP head may have its own embedding.
    found = [name for name in tensors if name == end or (name.endswith(f".{end}") and layers not in f".{name}")]
    if len(found) != 1:
        return names
    other = found[0].removesuffix(end)

    def renamed(name: str) -> str:
        return other + name.removeprefix(prefix)

    heads = (names.head, renamed(names.head), other.removesuffix(prefix) + names.head)
    head = next((name for name in heads if f"{name}.weight" in tensors), names.head)
    return OuterNames(
        renamed(names.embedding),
        renamed(names.layers),
        None if names.final_norm is None else renamed(names.final_norm),
        head,
        renamed(names.embedding_norm),
        renamed(names.token_types),
        renamed(names.positions),
    )


def with_expert_layout(spec: ModelSpec, headers: Mapping[str, TensorLocation]) -> ModelSpec:
    """The spec with experts as the files have them: stacked as [E, rows, columns] or [E, columns, rows], or in separate tensors.

    Checkpoints of the same class differ in this. spec: with the tensor names of the files.
    """
    separate = {name.rpartition(".")[0].rpartition(".")[0] for name in headers}

    def with_layout(index: int, part: AnyFeedForward) -> AnyFeedForward:
        stacks = part.names.stacks if isinstance(part, MoESpec) else None
        if not isinstance(part, MoESpec) or stacks is None:
            return part
        if f"{spec.names.layer(index)}{part.names.experts}.0" in separate:
            return cast(AnyFeedForward, replace(part, names=replace(part.names, stacks=None)))
        wide, hidden = part.intermediate_size, spec.hidden_size
        found = {
            tuple(header.shape[1:]) == shape[::-1]
            for name, shape in ((stacks.gate_up, (2 * wide, hidden)), (stacks.down, (hidden, wide)))
            if (header := headers.get(f"{spec.names.layer(index)}{name}")) is not None and shape[0] != shape[1]
        }
        if len(found) != 1 or found == {stacks.transposed}:
            return part
        names = replace(part.names, stacks=replace(stacks, transposed=found.pop()))
        return cast(AnyFeedForward, replace(part, names=names))

    def layer(index: int, one: LayerSpec) -> LayerSpec:
        if one.parallel_experts is not None:
            experts = with_layout(index, one.parallel_experts.experts)
            one = replace(one, parallel_experts=replace(one.parallel_experts, experts=experts))
        return one if one.feed_forward is None else replace(one, feed_forward=with_layout(index, one.feed_forward))

    return replace(spec, layers=tuple(layer(index, one) for index, one in enumerate(spec.layers)))


# Buffers that some exporters save and that follow from the config; see `with_learned_frequencies` for learned ones.
_DERIVED = re.compile(
    r"(^|\.)rotary(_pos)?_emb(_local)?\.(\w+_)?inv_freq$|\.(attention|attn)\.(masked_bias|bias|causal_mask)$"
)

_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_MAX_NAMED = 3  # tensors named in a message


def is_derived(name: str) -> bool:
    """Whether a tensor follows from config.json, so that it is not read."""
    return _DERIVED.search(name) is not None


def check_tensors(
    directory: Path,
    spec: ModelSpec,
    headers: Mapping[str, TensorLocation],
    gguf: GGUFIndex | None,
    quantized: QuantizedCheckpoint | None,
) -> None:
    """Raise LoadError for tensors that are missing, surplus, or of another shape or type."""
    expected = {tensor.name: tensor.shape(weight) for weight in spec.weights() for tensor in weight.stored}
    found = gguf.tensors if gguf is not None else unstack_tensors(headers, expected)
    read = quantized.tensors if quantized is not None else {}
    sources: Collection[str] = quantized.sources if quantized is not None else ()
    surplus = []
    for name, header in found.items():
        if name in sources or (gguf is None and spec.ignores(name)):
            continue
        if name not in expected:
            if not _is_allowed(name, spec, quantized):
                surplus.append(name)
        elif (header.shape or (1,)) != expected[name]:
            raise LoadError(
                f"{directory}: tensor {name!r} has shape {list(header.shape)} where config.json asks for "
                f"{list(expected[name])}: take the config.json that belongs to the checkpoint"
            )
        elif gguf is None and header.dtype not in _NUMBERS:
            raise LoadError(
                f"{directory}: tensor {name!r} is {header.dtype}, which is not a type of weights: the checkpoint may be "
                "quantized in a way that config.json does not name; download config.json again, or take the unquantized model"
            )
    if surplus:
        them = "it" if len(surplus) == 1 else "them"
        raise LoadError(
            f"{directory}: unexpected {_quote_names('tensor', surplus)}: this architecture has no place for "
            f"{them}: take the config.json that belongs to the checkpoint"
        )
    if missing := [name for name in expected if name not in found and name not in read]:
        are = "is" if len(missing) == 1 else "are"
        raise LoadError(
            f"{directory}: {_quote_names('tensor', missing)} {are} missing: the checkpoint is incomplete: download it again"
        )


def _is_allowed(name: str, spec: ModelSpec, quantized: QuantizedCheckpoint | None) -> bool:
    """Whether a tensor is allowed in the files although no weight consists of it."""
    is_tied_head = spec.tied_embeddings and name in spec.head_tensors  # compared with the embedding at load
    return is_tied_head or is_derived(name) or (quantized is not None and name in quantized.zero_biases)


def _quote_names(what: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]!r}"
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{what}s {', '.join(map(repr, names[:_MAX_NAMED]))}{more}"


_SCALING, _LADDER = "`rotary.scaling`", "`rotary.ladder`"  # config fields, for errors


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model as its files describe it.

    spec: with the server's rotary scaling; unscaled_groups: the rotary groups before it. headers: of every tensor in the files,
    empty for `loading.format=dummy`. gguf: the index of GGUF files. quantized: the weights of a quantized checkpoint.
    original_spec: with rows in the order of the original weights.
    """

    config: Config
    spec: ModelSpec
    unscaled_groups: tuple[RotaryGroup, ...]
    headers: dict[str, TensorLocation]
    gguf: GGUFIndex | None = None
    quantized: QuantizedCheckpoint | None = None
    original_spec: ModelSpec | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are quantized already."""
        return (self.gguf is not None and self.gguf.is_quantized()) or (
            self.quantized is not None and self.quantized.is_integers
        )


def describe_model(config: EngineConfig, *, part: MTPPart | None = None) -> ModelDescription:
    """Read config.json and the headers of the weights. Raises LoadError for a model that is not supported.

    part: describe this part of the MTP head instead of the model.
    """
    directory = Path(config.model)
    text_model = text_config_of(read_json(directory / "config.json"))
    hf_config = text_model.config
    generation_path = directory / "generation_config.json"
    spec = read_spec(hf_config, read_json(generation_path) if generation_path.is_file() else None)
    dummy = config.loading.format == "dummy"
    headers = {} if dummy else read_headers(directory)
    spec = text_model.adapt_spec(spec, headers)
    gguf = None if dummy else read_index(directory)
    original_spec = spec
    if spec.positions and (config.max_model_len or 0) > spec.positions:
        raise LoadError(
            f"`max_model_len` is {config.max_model_len}, but this model has a table of {spec.positions} positions: lower it"
        )
    if gguf is not None:
        original_spec, spec = gguf.original_spec(spec), gguf.stored_spec(spec)
    fault = describe_quantized(hf_config, headers)
    if fault is None and not text_model.is_multimodal:
        fault = describe_tensors(headers)
    if fault is not None:
        raise LoadError(f"{directory}: {fault}")
    try:
        spec = with_stored_names(spec, headers)
        if part is not None:
            spec = mtp_spec(spec, headers, part, in_gguf=gguf is not None)
        spec = with_expert_layout(spec, headers)
        quantized = None if dummy or gguf is not None else describe_quantized_weights(hf_config, spec, headers)
    except LoadError as error:
        raise LoadError(with_place(directory, error)) from None
    gguf = None if gguf is None else gguf.for_spec(spec)
    check_not_quantized_twice(config, directory, gguf, quantized)
    unscaled_groups = with_learned_frequencies(spec.rotary_groups, directory)
    scaling = config.rotary.scaling
    if config.rotary.ladder:
        checked_thresholds(unscaled_groups, config.rotary.ladder, _LADDER)
    try:
        groups = apply_scaling(unscaled_groups, None if scaling == AUTO else scaling, param=_SCALING)
    except RequestError as error:
        raise LoadError(error.message) from None
    scaled_spec = replace(spec, rotary_groups=groups)
    if not dummy:
        check_tensors(directory, scaled_spec, headers, gguf, quantized)
    return ModelDescription(hf_config, scaled_spec, unscaled_groups, headers, gguf, quantized, original_spec)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises LoadError."""
    try:
        value = json.loads(read_json_text(path))
    except FileNotFoundError:
        raise LoadError(
            f"{path} does not exist: give a Hugging Face model directory (config.json, *.safetensors, …)"
        ) from None
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} does not contain a JSON object: download it again")
    return value
