"""What drafts beside a model, another one or its own prediction layer: how that is loaded, and what the two must have in common.

Responsible for the configuration under which the draft model is read, and for refusing pairs that cannot work, with one line
that says what to do. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.engine.api.config import EngineConfig, RotaryConfig, SpeculationConfig
from windlass.engine.errors import LoadError
from windlass.engine.model.spec import ModelSpec

_DRAFT_OPTION = "`scheduling.speculation.model`"
_MTP = "`scheduling.speculation.mtp`"
_TOKENIZER = "tokenizer.json"


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """The configuration that the draft is loaded under, a model's or that of the prediction layer; None where nothing drafts.

    Device, dtypes, threads, random weights and the weight cache are those of the model; shared weights lie in memory of their
    own; it is never split over ranks. Its context and its pages follow the
    model's, so no memory is planned for them here, and nothing hangs on the bits of what it computes.
    """
    speculation = config.scheduling.speculation
    if not speculation.drafts:
        return None
    quantization, loading = speculation.quantization, config.loading
    if speculation.mtp:  # a kept file of quantized weights is the model's
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


def reword_for_draft(error: LoadError, speculation: SpeculationConfig) -> LoadError:
    """An error met while what drafts was read, naming the fields that are its own; of a draft model it says so."""
    told = str(error) if speculation.mtp else f"the draft model: {error}"
    if speculation.mtp and speculation.quantization == "none":
        return LoadError(told)
    return LoadError(told.replace("`compute.quantization", "`scheduling.speculation.quantization"))


def check_draft_compatible(config: EngineConfig, spec: ModelSpec, draft: ModelSpec) -> None:
    """Raise LoadError where `draft` cannot draft for `spec`."""
    if config.scheduling.speculation.mtp:
        _check_prediction(config, spec)
        return
    for of, one in (("model", spec), ("draft model", draft)):
        if not one.generates:
            raise LoadError(f"the {of} is a {one.architecture}, which generates nothing: leave {_DRAFT_OPTION} out")
    if draft.state_group is not None and spec.state_group is None:
        raise LoadError(
            f"the draft model is a {draft.architecture}, whose layers carry a state from token to token, and layers of the model "
            f"({spec.architecture}) do not: leave {_DRAFT_OPTION} out, or give one that is alike in this"
        )
    for of, groups in (("model", spec.kv_groups), ("draft model", draft.kv_groups)):
        if len(groups) > 1 or groups[0].window is not None:
            raise LoadError(
                f"the {of} has layers with a sliding window ({(spec if of == 'model' else draft).architecture}), beside which "
                f"none can draft so far: leave {_DRAFT_OPTION} out"
            )
    theirs, ours = Path(config.scheduling.speculation.model or ""), Path(config.model)
    if not _same_file(ours / _TOKENIZER, theirs / _TOKENIZER):
        mine, other = _vocabulary(ours), _vocabulary(theirs)
        if mine is None or other is None:
            if spec.vocab_size != draft.vocab_size:
                raise LoadError(
                    f"{_DRAFT_OPTION} {theirs} has a vocabulary of {draft.vocab_size} tokens, the model one of {spec.vocab_size}, "
                    "and not both have a tokenizer.json that tells what they share: give a model with the same tokenizer"
                )
            return
        differing = [i for i in mine.keys() & other.keys() if mine[i] != other[i]]
        if differing or len(mine.keys() & other.keys()) * 2 < len(mine):
            first = min(differing, default=None)
            example = "" if first is None else f" (token {first} is {mine[first]!r} here, {other[first]!r} there)"
            raise LoadError(
                f"{_DRAFT_OPTION} {theirs} has another tokenizer than the model{example}: give a model with the same tokenizer"
            )


def _check_prediction(config: EngineConfig, spec: ModelSpec) -> None:
    if config.compute.tensor_parallel > 1:
        raise LoadError(
            f"{_MTP} beside `compute.tensor_parallel`: each rank has a part of the head alone, which the layer needs whole: "
            "leave one of them out"
        )
    if len(spec.kv_groups) > 1 or spec.kv_groups[0].window is not None:
        raise LoadError(
            f"{_MTP}: the model has layers with a sliding window ({spec.architecture}), beside which none can draft so far: "
            "leave it out"
        )


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other) or one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _vocabulary(directory: Path) -> dict[int, str] | None:
    """Every token by its id, from tokenizer.json; None where there is none that tells."""
    try:
        content: Any = json.loads((directory / _TOKENIZER).read_text(encoding="utf-8"))
        given = content["model"]["vocab"]
        if isinstance(given, dict):
            found = {int(i): str(token) for token, i in given.items()}
        else:  # Unigram: pairs of token and score
            found = {i: str(pair[0]) for i, pair in enumerate(given)}
        found |= {int(added["id"]): str(added["content"]) for added in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found
