"""What an engine has loaded, in plain data for those who never see a tensor."""

from __future__ import annotations

from math import prod

import torch

from windlass.engine.api.config import EngineConfig, SpeculationConfig
from windlass.engine.api.request import DraftInfo, ModelInfo
from windlass.engine.cache.budget import CachePlan, bytes_per_token
from windlass.engine.core.fingerprint import fingerprint
from windlass.engine.model.loading.loader import LoadedModel


def dtype_name(dtype: torch.dtype) -> str:
    """As options have it."""
    return str(dtype).removeprefix("torch.")


def describe(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, plan: CachePlan, seconds: float
) -> ModelInfo:
    """seconds: that loading took."""
    decoder, spec = model.decoder, model.spec
    cached = dtype_name(model.cache_dtype)
    backend = decoder.backend
    kernel_notice = (backend.explain(),) if backend.is_fallback else ()
    return ModelInfo(
        path=config.model,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_model_len=plan.max_model_len,
        trained_len=spec.trained_len,
        dtype=dtype_name(decoder.dtype),
        weight_dtype=dtype_name(decoder.weight_dtype),
        kv_cache_dtype=cached,
        quantization=model.quantization,
        device=str(decoder.device),
        num_parameters=sum(prod(weight.shape) for weight in spec.weights()),
        num_layers=len(spec.layers),
        block_size=config.cache.block_size,
        num_kv_blocks=plan.num_blocks,
        num_states=plan.num_states,
        state_bytes=spec.state_bytes + (0 if draft is None else draft.spec.state_bytes),
        kv_cache_bytes=plan.num_bytes,
        kv_bytes_per_token=sum(bytes_per_token(group, cached) for group in spec.kv_groups)
        + draft_bytes_per_token(draft),
        max_num_seqs=config.scheduling.max_num_seqs,
        max_num_batched_tokens=config.scheduling.max_num_batched_tokens,
        eos_token_ids=spec.eos_token_ids,
        rotary_groups=spec.rotary_groups,
        model_rotary_groups=model.rotary_groups,
        weight_bytes=decoder.weight_bytes(),
        load_seconds=seconds,
        fingerprint=fingerprint(config, model),
        hidden_size=spec.hidden_size,
        pooling=model.pooling,
        classifier=spec.classifier,
        generates=spec.generates,
        is_bidirectional=spec.is_bidirectional,
        ranks=config.compute.tensor_parallel,
        notices=model.notices + plan.notices + kernel_notice + (() if draft is None else draft.notices),
        draft_model=None if draft is None else _describe_draft(config.scheduling.speculation, draft),
    )


def _describe_draft(speculation: SpeculationConfig, draft: LoadedModel) -> DraftInfo:
    decoder, named = draft.decoder, draft.decoder.spec.architecture
    return DraftInfo(
        path=speculation.model or "",
        architecture=f"prediction layer of {named}" if speculation.mtp else named,
        quantization=draft.quantization,
        weight_dtype=dtype_name(decoder.weight_dtype),
        num_parameters=decoder.num_parameters(),
        weight_bytes=decoder.weight_bytes(),
        num_tokens=speculation.draft_tokens,
    )


def draft_bytes_per_token(draft: LoadedModel | None) -> int:
    """Of its pages; 0 where there is none."""
    return 0 if draft is None else cache_bytes_per_token(draft)


def cache_bytes_per_token(model: LoadedModel) -> int:
    """Of its pages, of all KV groups."""
    return sum(bytes_per_token(group, dtype_name(model.cache_dtype)) for group in model.decoder.spec.kv_groups)
