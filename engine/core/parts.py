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
from windlass.engine.cache.storage import KVStorage
from windlass.engine.core.device_room import largest_decode_step
from windlass.engine.core.keeping import PageOwner, open_store
from windlass.engine.core.pages import allocate_pages, make_draft_model
from windlass.engine.core.ranks.others import OtherRanks
from windlass.engine.errors import LoadError
from windlass.engine.execution.draft_pages import DraftModel
from windlass.engine.execution.drafter import Drafter
from windlass.engine.execution.runner import RankOrder, Runner
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.context_refusals import context_refusals
from windlass.engine.model.loading.loader import LoadedModel, RankSeat, load_draft, load_model
from windlass.engine.model.loading.weights import Progress
from windlass.engine.model.spec import ModelSpec
from windlass.engine.rotary.ladder import AUTO, make_ladder
from windlass.engine.rotary.policy import RotaryPlanner
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.scheduling.chunk_cuts import ChunkCuts
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.shifting import ContextLimits
from windlass.kernels import blocks_of_cut

# Part of every cache key: raise it when the meaning of a cached block changes.
_LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Models:
    """What was loaded. weight_bytes: of the model, on all its ranks together."""

    model: LoadedModel
    draft: LoadedModel | None
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Pages:
    """Where keys and values lie, and the rotary tables. draft: the draft model with its own."""

    cache: KVStorage
    tables: RotaryTables
    draft: DraftModel | None


def load_models(config: EngineConfig, progress: Progress | None, others: OtherRanks | None) -> Models:
    """The model, this rank's part of it where there are others, which load theirs meanwhile. Raises LoadError."""
    model = load_model(config, progress, None if others is None else RankSeat(0, others.memory, others.store))
    draft = load_draft(config, model, progress)
    weight_bytes = model.decoder.weight_bytes()
    if others is not None:
        others.meet_in(model.decoder.backend.options.ranks)
        weight_bytes += sum(part.weight_bytes for part in others.loaded())
    return Models(model, draft, weight_bytes)


def make_planner(config: EngineConfig, model: LoadedModel, plan: CachePlan) -> RotaryPlanner:
    """How requests rotate. Raises LoadError for a ladder that this model cannot climb."""
    own, wanted = model.rotary_groups, config.rotary
    ladder = make_ladder(own, wanted.ladder, plan.max_model_len, "`rotary.ladder`") if own else None
    if ladder is None and wanted.scaling == AUTO:
        raise LoadError("`rotary.scaling` is auto, and this model has no rotation that could be scaled: leave it out")
    return RotaryPlanner(model.decoder.spec.rotary_groups, wanted.update, ladder, wanted.scaling == AUTO)


def rotary_rows(config: EngineConfig) -> int:
    """Rows of the rotary tables: two for a sequence, whose frequencies may change in a step."""
    return 2 * config.scheduling.max_num_seqs + 2


def make_pages(config: EngineConfig, models: Models, plan: CachePlan) -> Pages:
    """LoadError where there is no memory for them."""
    model, draft, rows = models.model, models.draft, rotary_rows(config)
    cache = allocate_pages(config, model, model, plan)
    tables = RotaryTables(rows, [group.base for group in model.decoder.spec.rotary_groups], model.decoder.backend)
    return Pages(cache, tables, None if draft is None else make_draft_model(config, model, draft, plan, rows))


def make_store(config: EngineConfig, models: Models, pages: Pages) -> BlockStore | None:
    """See `open_store`."""
    owners = [PageOwner(config.model, models.model, pages.cache)]
    if models.draft is not None and pages.draft is not None:
        owners.append(PageOwner(config.scheduling.speculation.model or config.model, models.draft, pages.draft.cache))
    return open_store(config, owners)


def make_runner(
    config: EngineConfig,
    model: LoadedModel,
    plan: CachePlan,
    pages: Pages,
    *,
    sampler: Sampler,
    adapters: LoadedAdapters,
    store: BlockStore | None,
    tell: Callable[[RankOrder], None] | None,
) -> Runner:
    """tell: see `Runner`."""
    runner = Runner(
        model.decoder,
        pages.cache,
        pages.tables,
        sampler,
        config.cache.block_size,
        draft=pages.draft,
        adapters=adapters,
        persisted=None if store is None else store.pages,
        tell=tell,
    )
    if config.compute.cuda_graphs:
        largest = largest_decode_step(config, plan.max_model_len)
        runner.make_graphs(*largest)
        if isinstance(runner.drafter, Drafter):
            runner.drafter.make_graphs(*largest)
    return runner


def make_blocks(config: EngineConfig, spec: ModelSpec, plan: CachePlan, store: BlockStore | None) -> BlockManager:
    layouts = [
        KVGroupLayout(n, group.window, _rotary_groups_of(spec, group))
        for n, group in zip(plan.num_blocks, spec.kv_groups, strict=True)
    ]
    if spec.state_group is not None:
        layouts.append(KVGroupLayout.of_states(plan.num_states))
    # A token that sees those behind it is another in every text: nothing of one text stands in another.
    shares = config.cache.prefix_caching and not spec.sees_whole_texts
    return BlockManager(layouts, config.cache.block_size, shares, keeper=store)


def make_limits(config: EngineConfig, spec: ModelSpec, plan: CachePlan) -> ContextLimits:
    """LoadError for a shifted context that is longer than any sequence may be."""
    return ContextLimits(
        max_model_len=plan.max_model_len,
        block_size=config.cache.block_size,
        shift_context=_shift_context(config, plan.max_model_len),
        max_total_tokens=config.context.max_total_tokens,
        cut_blocks=blocks_of_cut(config.cache.block_size) if config.compute.deterministic else 1,
        **context_refusals(spec),
    )


def make_scheduler(
    config: EngineConfig,
    models: Models,
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
        namespace=namespace_of(model),
        eos_token_ids=spec.eos_token_ids,
        whole_prompts=spec.sees_whole_texts,
        cuts=ChunkCuts(
            decoder.backend.fewest_alike,
            config.cache.block_size,
            at_blocks=spec.state_group is not None and config.cache.prefix_caching,
        ),
        adapter_key=lambda adapter_id: adapters.digest_of(adapter_id).encode(),
        store=store,
        draft_keeps_up=draft is not None and (draft.spec.joined is not None or draft.spec.state_group is not None),
    )


def namespace_of(model: LoadedModel) -> bytes:
    """What must agree for a cached block to mean the same: weights, dtypes, layout."""
    decoder = model.decoder
    plan = sorted((name, tuple((p.rows, p.storage) for p in parts)) for name, parts in decoder.plan.items())
    said = (plan, decoder.backend.options.activations, decoder.dtype, model.cache_dtype, _LAYOUT_VERSION)
    return hashlib.sha256(b"\0".join((model.digest, *(str(part).encode() for part in said)))).digest()


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
