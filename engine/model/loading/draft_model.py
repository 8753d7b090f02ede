"""Draft model and MTP head: configuration, spec and compatibility checks.

Builds the configuration under which the draft model or the model's own MTP head is loaded, and refuses incompatible pairs with a
one-line error. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from windlass.engine.bounded_files import MAX_TOKENIZER_BYTES, MAX_TOKENIZER_ENTRIES, read_json_text
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import EngineConfig, RotaryConfig, SpeculationConfig
from windlass.engine.model.model_spec import ModelSpec

# What is loaded to propose tokens: the model's MTP layer, or that and a copy of the head.
MTPPart: TypeAlias = Literal["layer", "layer and head"]
_DRAFT_OPTION = "`scheduling.speculation.model`"
_MTP_OPTION = "`scheduling.speculation.mtp`"
_TOKENIZER = "tokenizer.json"
T = TypeVar("T")


def for_draft(config: EngineConfig, action: Callable[[EngineConfig, MTPPart | None], T]) -> T | None:
    """The result of `action` for the configuration of the draft model or MTP head, and the part of the latter; None if there is
    neither. LoadErrors name its own fields, and the draft model."""
    own, speculation = _draft_config(config), config.scheduling.speculation
    if own is None:
        return None
    try:
        return action(own, _mtp_part(speculation))
    except LoadError as error:
        text = str(error) if speculation.mtp else f"the draft model: {error}"
        if not speculation.mtp or speculation.quantization != "none":
            text = text.replace("`compute.quantization", "`scheduling.speculation.quantization")
        raise LoadError(text) from None


def _draft_config(config: EngineConfig) -> EngineConfig | None:
    """The configuration under which the draft model or MTP head is loaded; None if there is none.

    Device, dtypes, threads, random weights and the weight cache are those of the model; shared weights have their own memory;
    a draft is never split over ranks. Its context and pages follow the model's, so no memory is planned for them here. Its
    results need not be deterministic.
    """
    speculation = config.scheduling.speculation
    if not speculation.drafts:
        return None
    quantization, loading = speculation.quantization, config.loading
    if speculation.mtp:  # a weight cache holds the weights of the model
        loading = replace(loading, weight_cache=None)
        quantization = config.compute.quantization if quantization == "none" else quantization
    return replace(
        config,
        model=speculation.model or config.model,
        max_model_len=config.cache.block_size,
        compute=replace(config.compute, quantization=quantization, deterministic=False, tensor_parallel=1),
        cache=replace(config.cache, memory=None),
        loading=replace(loading, shared_memory=loading.shared_memory[1:]),
        scheduling=replace(config.scheduling, max_num_seqs=1, speculation=SpeculationConfig()),
        rotary=RotaryConfig(),
    )


def _mtp_part(speculation: SpeculationConfig) -> MTPPart | None:
    """What is loaded of the MTP head; None if it does not propose tokens.

    With a quantization of its own it has a copy of the head, since reading the head is most of the cost of a proposal.
    """
    if not speculation.mtp:
        return None
    return "layer" if speculation.quantization == "none" else "layer and head"


def has_usable_mtp_head(spec: ModelSpec, tensors: Collection[str]) -> bool:
    """Whether the files hold an MTP head, and the model supports proposals. tensors: names of all tensors in the files."""
    layer = spec.mtp
    if layer is None or not spec.generates or _has_windows(spec):
        return False
    return any(name.startswith(layer.own_tensors[0]) for name in tensors)


def _has_windows(spec: ModelSpec) -> bool:
    return len(spec.kv_groups) > 1 or spec.kv_groups[0].window is not None


def mtp_spec(spec: ModelSpec, tensors: Collection[str], part: MTPPart, *, in_gguf: bool) -> ModelSpec:
    """The spec of a model's MTP head. Raises LoadError if there is none.

    tensors: names of all tensors in the files, empty if no file is read. in_gguf: they are of GGUF files.
    """
    layer = spec.mtp
    if not spec.generates:
        raise LoadError(
            f"{_MTP_OPTION}: the model is a {spec.architecture}, which does not generate text: leave it out"
        )
    if layer is None:
        raise LoadError(
            f"{_MTP_OPTION}: this model ({spec.architecture}) has no layer that predicts further tokens, or none that can be "
            "used: leave it out"
        )
    if tensors and not any(name.startswith(layer.own_tensors[0]) for name in tensors):
        why, other = f"no tensor's name begins with {layer.own_tensors[0]!r}", "the files of the model's own publisher"
        if in_gguf:
            why = "no block has tensors whose names contain nextn, which some conversions leave out"
            other = "a conversion of the model that has them"
        raise LoadError(
            f"{_MTP_OPTION}: the files contain no layer that predicts further tokens ({why}): leave it out, or use {other}"
        )
    if part == "layer":
        return layer
    head = f"{spec.names.embedding if spec.tied_embeddings else spec.names.head}.weight"
    return replace(layer, mtp_head=head, own_tensors=(*layer.own_tensors, head))


def check_draft_compatible(config: EngineConfig, spec: ModelSpec, draft: ModelSpec) -> None:
    """Raise LoadError if a model with the spec `draft` cannot propose tokens for one with `spec`."""
    if config.scheduling.speculation.mtp:
        _check_mtp_compatible(config, spec)
        return
    for of, one in (("model", spec), ("draft model", draft)):
        if not one.generates:
            raise LoadError(
                f"the {of} is a {one.architecture}, which does not generate text: leave {_DRAFT_OPTION} out"
            )
    if draft.state_group is not None and spec.state_group is None:
        raise LoadError(
            f"the draft model is a {draft.architecture}, which has recurrent layers, and the model "
            f"({spec.architecture}) has none: leave {_DRAFT_OPTION} out, or give a draft model without them"
        )
    for of, one in (("model", spec), ("draft model", draft)):
        if _has_windows(one):
            raise LoadError(
                f"the {of} has layers with a sliding window ({one.architecture}), for which drafts are not supported: leave "
                f"{_DRAFT_OPTION} out"
            )
    theirs, ours = Path(config.scheduling.speculation.model or ""), Path(config.model)
    if not _same_file(ours / _TOKENIZER, theirs / _TOKENIZER):
        mine, other = _vocabulary(ours), _vocabulary(theirs)
        if mine is None or other is None:
            if spec.vocab_size != draft.vocab_size:
                raise LoadError(
                    f"{_DRAFT_OPTION} {theirs} has a vocabulary of {draft.vocab_size} tokens, the model one of "
                    f"{spec.vocab_size}, and not both have a tokenizer.json that can be compared: "
                    "give a model with the same tokenizer"
                )
            return
        differing = [i for i in mine.keys() & other.keys() if mine[i] != other[i]]
        if differing or len(mine.keys() & other.keys()) * 2 < len(mine):
            first = min(differing, default=None)
            example = "" if first is None else f" (token {first} is {mine[first]!r} here, {other[first]!r} there)"
            raise LoadError(
                f"{_DRAFT_OPTION} {theirs} has another tokenizer than the model{example}: give a model with the same tokenizer"
            )


def _check_mtp_compatible(config: EngineConfig, spec: ModelSpec) -> None:
    if config.compute.tensor_parallel > 1:
        raise LoadError(
            f"{_MTP_OPTION} with `compute.tensor_parallel`: each rank has only a part of the head, which the layer needs whole: "
            "leave one of them out"
        )
    if _has_windows(spec):
        raise LoadError(
            f"{_MTP_OPTION}: the model has layers with a sliding window ({spec.architecture}), for which drafts are not "
            "supported: leave it out"
        )


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other) or one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _vocabulary(directory: Path) -> dict[int, str] | None:
    """Every token by its id, from tokenizer.json; None if it is missing or has no vocabulary."""
    try:
        content: Any = json.loads(
            read_json_text(directory / _TOKENIZER, max_bytes=MAX_TOKENIZER_BYTES, max_entries=MAX_TOKENIZER_ENTRIES)
        )
        given = content["model"]["vocab"]
        if isinstance(given, dict):
            found = {int(i): str(token) for token, i in given.items()}
        else:  # Unigram: pairs of token and score
            found = {i: str(pair[0]) for i, pair in enumerate(given)}
        found |= {int(added["id"]): str(added["content"]) for added in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found
