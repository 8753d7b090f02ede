"""Makes the parts of an engine, each out of those before it. It keeps none of them, and computes nothing with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.budget import CachePlan
from windlass.engine.cache.layout import KVGroupLayout, KVGroupSpec
from windlass.engine.cache.persist.store import BlockStore
from windlass.engine.cache.storage import KVCache
from windlass.engine.core.device_room import largest_decode_step
from windlass.engine.core.keeping import CacheOwner, open_block_store
from windlass.engine.core.pages import allocate_kv_storage, make_draft_model
from windlass.engine.core.ranks.others import RankProcesses
from windlass.engine.errors import LoadError
from windlass.engine.execution.draft_pages import DraftModel
from windlass.engine.execution.drafter import DraftModelProposer
from windlass.engine.execution.runner import ModelRunner, RankCommand
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.context_refusals import context_refusals
from windlass.engine.model.loading.loader import LoadedModel, RankPlacement, load_draft, load_model
from windlass.engine.model.loading.weights import Progress
from windlass.engine.model.spec import ModelSpec
from windlass.engine.rotary.ladder import AUTO, make_thresholds
from windlass.engine.rotary.policy import RotaryPlanner
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.scheduling.chunk_cuts import ChunkBoundaries
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.shifting import ContextLimits
from windlass.kernels import blocks_per_split

# Part of every cache key: raise it when the meaning of a cached block changes.
_LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """What was loaded. weight_bytes: of the model, on all its ranks together."""

    model: LoadedModel
    draft: LoadedModel | None
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class CacheTensors:
    """Where keys and values lie, and the rotary tables. draft: the draft model with its own."""

    cache: KVCache
    tables: RotaryTables
    draft: DraftModel | None


def load_models(config: EngineConfig, progress: Progress | None, others: RankProcesses | None) -> LoadedModels:
    """The model, this rank's part of it where there are others, which load theirs meanwhile. Raises LoadError."""
    model = load_model(config, progress, None if others is None else RankPlacement(0, others.memory, others.store))
    draft = load_draft(config, model, progress)
    weight_bytes = model.decoder.weight_bytes()
    if others is not None:
        others.attach_collectives(model.decoder.backend.options.ranks)
        weight_bytes += sum(part.weight_bytes for part in others.loaded())
    return LoadedModels(model, draft, weight_bytes)


def make_planner(config: EngineConfig, model: LoadedModel, plan: CachePlan) -> RotaryPlanner:
    """How requests rotate. Raises LoadError for a ladder that this model cannot climb."""
    own, wanted = model.rotary_groups, config.rotary
    ladder = make_thresholds(own, wanted.ladder, plan.max_model_len, "`rotary.ladder`") if own else None
    if ladder is None and wanted.scaling == AUTO:
        raise LoadError("`rotary.scaling` is auto, and this model has no rotation that could be scaled: leave it out")
    return RotaryPlanner(model.decoder.spec.rotary_groups, wanted.update, ladder, wanted.scaling == AUTO)


def rotary_rows(config: EngineConfig) -> int:
    """Rows of the rotary tables: two for a sequence, whose frequencies may change in a step."""
    return 2 * config.scheduling.max_num_seqs + 2


def allocate_cache(config: EngineConfig, models: LoadedModels, plan: CachePlan) -> CacheTensors:
    """LoadError where there is no memory for them."""
    model, draft, rows = models.model, models.draft, rotary_rows(config)
    cache = allocate_kv_storage(config, model, model, plan)
    tables = RotaryTables(rows, [group.base for group in model.decoder.spec.rotary_groups], model.decoder.backend)
    return CacheTensors(cache, tables, None if draft is None else make_draft_model(config, model, draft, plan, rows))


def make_store(config: EngineConfig, models: LoadedModels, pages: CacheTensors) -> BlockStore | None:
    """See `open_block_store`."""
    owners = [CacheOwner(config.model, models.model, pages.cache)]
    if models.draft is not None and pages.draft is not None:
        owners.append(CacheOwner(config.scheduling.speculation.model or config.model, models.draft, pages.draft.cache))
    return open_block_store(config, owners)


def make_runner(
    config: EngineConfig,
    model: LoadedModel,
    plan: CachePlan,
    pages: CacheTensors,
    *,
    sampler: Sampler,
    adapters: LoadedAdapters,
    store: BlockStore | None,
    send_command: Callable[[RankCommand], None] | None,
) -> ModelRunner:
    """tell: see `ModelRunner`."""
    runner = ModelRunner(
        model.decoder,
        pages.cache,
        pages.tables,
        sampler,
        config.cache.block_size,
        draft=pages.draft,
        adapters=adapters,
        persisted=None if store is None else store.pages,
        send_command=send_command,
    )
    if config.compute.cuda_graphs:
        largest = largest_decode_step(config, plan.max_model_len)
        runner.make_graph_runner(*largest)
        if isinstance(runner.proposer, DraftModelProposer):
            runner.proposer.make_graph_runner(*largest)
    return runner


def make_blocks(config: EngineConfig, spec: ModelSpec, plan: CachePlan, store: BlockStore | None) -> BlockManager:
    layouts = [
        KVGroupLayout(n, group.window, _rotary_groups_of(spec, group))
        for n, group in zip(plan.num_blocks, spec.kv_groups, strict=True)
    ]
    if spec.state_group is not None:
        layouts.append(KVGroupLayout.of_states(plan.num_states))
    # A token that sees those behind it is another in every text: nothing of one text stands in another.
    shares = config.cache.prefix_caching and not spec.is_bidirectional
    return BlockManager(layouts, config.cache.block_size, shares, listener=store)


def make_context_limits(config: EngineConfig, spec: ModelSpec, plan: CachePlan) -> ContextLimits:
    """LoadError for a shifted context that is longer than any sequence may be."""
    return ContextLimits(
        max_model_len=plan.max_model_len,
        block_size=config.cache.block_size,
        shift_context=_shift_context(config, plan.max_model_len),
        max_total_tokens=config.context.max_total_tokens,
        cut_blocks=blocks_per_split(config.cache.block_size) if config.compute.deterministic else 1,
        **context_refusals(spec),
    )


def make_scheduler(
    config: EngineConfig,
    models: LoadedModels,
    limits: ContextLimits,
    blocks: BlockManager,
    *,
    tables: RotaryTables,
    adapters: LoadedAdapters,
    store: BlockStore | None,
    alone: bool,
) -> Scheduler:
    """alone: whether the model has no other ranks."""
    model, draft = models.model, models.draft
    decoder, spec = model.decoder, model.decoder.spec
    return Scheduler(
        # What a pass draws is known to the first rank alone, until a plan tells the others. And a state that a failed pass has
        # changed does not go back.
        config=config.scheduling
        if alone and spec.state_group is None
        else replace(config.scheduling, burst_seconds=0.0),
        limits=limits,
        blocks=blocks,
        rotary=tables,
        namespace=cache_namespace(model),
        eos_token_ids=spec.eos_token_ids,
        whole_prompts=spec.is_bidirectional,
        cuts=ChunkBoundaries(
            decoder.backend.uniform_prefill_min_tokens,
            config.cache.block_size,
            align_to_blocks=spec.state_group is not None and config.cache.prefix_caching,
        ),
        adapter_key=lambda adapter_id: adapters.digest_of(adapter_id).encode(),
        store=store,
        draft_tracks_all_tokens=draft is not None
        and (draft.spec.mtp_input is not None or draft.spec.state_group is not None),
    )


def cache_namespace(model: LoadedModel) -> bytes:
    """What must agree for a cached block to mean the same: weights, dtypes, layout."""
    decoder = model.decoder
    plan = sorted((name, tuple((p.rows, p.storage) for p in parts)) for name, parts in decoder.plan.items())
    identity = (plan, decoder.backend.options.activations, decoder.dtype, model.cache_dtype, _LAYOUT_VERSION)
    return hashlib.sha256(b"\0".join((model.digest, *(str(part).encode() for part in identity)))).digest()


def _shift_context(config: EngineConfig, max_model_len: int) -> int:
    """Tokens that a sequence holds which drops its oldest; LoadError where that is more than any may hold."""
    wanted = config.context.shift_context
    if wanted is not None and wanted > max_model_len:
        raise LoadError(f"`context.shift_context` is {wanted}, the context is {max_model_len} tokens: lower it")
    return wanted or max_model_len


def _rotary_groups_of(spec: ModelSpec, group: KVGroupSpec) -> tuple[int, ...]:
    """The rotary groups that layers of a KV group belong to; layers without rotation belong to none."""
    used = {spec.attention[layer].rotary_group for layer in group.layers}
    return tuple(sorted(index for index in used if index is not None))
