"""Engine builder: constructs scheduler, runner, caches and block store from the configuration, and describes the loaded model.

The block store's file names and the cache namespace cover everything except the tokens that changes any bit of a cached key or
value, or its layout.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from windlass._version import __version__
from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.block_store import BlockStore, PersistFolder
from windlass.engine.cache.disk_tier import PersistCounters
from windlass.engine.cache.host_tier import (
    CPUBlockTransfer,
    DeviceBlockTransfer,
    HostTier,
    bytes_of_blocks,
    pinned_rows_within,
    planes_of,
)
from windlass.engine.cache.kv_cache_budget import check_tier_support, gib
from windlass.engine.cache.kv_cache_spec import KVGroupLayout, KVGroupSpec
from windlass.engine.core.memory_budget import (
    allocate_kv_cache,
    dtype_name,
    kv_bytes_per_token,
    largest_decode_step,
    make_draft_model,
    make_rotary_tables,
    plan_kv_cache,
)
from windlass.engine.core.ranks import RankProcesses, group_kv_memory
from windlass.engine.errors import LoadError
from windlass.engine.execution.model_runner import ModelRunner
from windlass.engine.interface.config import PERSIST_SIZE, EngineConfig, SpeculationConfig
from windlass.engine.interface.context import ContextSizes
from windlass.engine.interface.model_info import AdapterInfo, DraftInfo, ModelInfo
from windlass.engine.model.loading.checkpoint import weight_files, weights_digest
from windlass.engine.model.loading.loader import LoadedModel, RankPlacement, load_draft, load_model
from windlass.engine.model.loading.weights import Progress
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.model.model_spec import ModelSpec, context_refusals
from windlass.engine.rotary.auto_scaling import AUTO, make_thresholds
from windlass.engine.rotary.rotary_policy import RotaryPlanner
from windlass.engine.sampling.grammar import GrammarMasks
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.scheduling.chunked_prefill import ChunkBoundaries
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.kernels import blocks_per_split, is_out_of_memory

_STORED_BLOCK_VERSION = 2  # increase it when the meaning of a stored block changes
_LAYOUT_VERSION = 1  # part of every cache key: increase it when the meaning of a cached block changes


class EngineBuilder:
    """A loaded model with its caches, from which the other parts of the engine are made. Raises LoadError, and so do the methods.

    model, draft: with other ranks, which load at the same time, the first rank's shard of the model. plan: sizes of the cache.
    draft_model: the draft model with its own KV cache and rotary tables.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None, ranks: RankProcesses | None) -> None:
        placement = None if ranks is None else RankPlacement(0, ranks.memory, ranks.store)
        model = load_model(config, progress, placement)
        draft = load_draft(config, model, progress)
        weight_bytes = model.decoder.weight_bytes()
        if ranks is not None:
            ranks.attach_collectives(model.decoder.backend.options.ranks)
            weight_bytes += sum(shard.weight_bytes for shard in ranks.loaded())
        plan = plan_kv_cache(config, model, draft, group_kv_memory(config, model, draft, ranks))
        self._config, self._ranks, self._weight_bytes = config, ranks, weight_bytes
        self.model, self.draft, self.plan = model, draft, plan
        self.planner = self._make_planner()
        # Two per sequence, since its frequencies may change in a step.
        self._rotary_rows = rows = 2 * config.scheduling.max_num_seqs + 2
        self.cache, self.tables = allocate_kv_cache(config, model, model, plan), make_rotary_tables(model.decoder, rows)
        self.draft_model = None if draft is None else make_draft_model(config, model, draft, plan, rows)

    def _make_planner(self) -> RotaryPlanner:
        """The planner of rotary scalings, unless this model does not support the thresholds."""
        own, rotary = self.model.rotary_groups, self._config.rotary
        thresholds = make_thresholds(own, rotary.ladder, self.plan.max_model_len, "`rotary.ladder`") if own else None
        if thresholds is None and rotary.scaling == AUTO:
            raise LoadError(
                "`rotary.scaling` is auto, and this model has no rotation that could be scaled: leave it out"
            )
        return RotaryPlanner(self.model.decoder.spec.rotary_groups, rotary.update, thresholds, rotary.scaling == AUTO)

    def open_block_store(self) -> BlockStore | None:
        """The disk and host tiers; None if neither is configured. The folder exists: see `check_tier_options`."""
        config, decoder = self._config, self.model.decoder
        cache = config.cache
        if cache.persist is None and cache.host_memory is None:
            return None
        copies = decoder.backend.make_copies()
        planes = planes_of([self.cache] if self.draft_model is None else [self.cache, self.draft_model.cache])
        sizes = bytes_of_blocks(planes)
        check_tier_support(
            config,
            sum(sizes) // cache.block_size,
            is_bidirectional=decoder.spec.is_bidirectional,
            on_device=copies is not None,
        )
        folder = None
        if cache.persist is not None:
            folder = self._persist_folder(Path(cache.persist))
        if copies is None:
            return BlockStore(folder, CPUBlockTransfer(planes), cache.block_size)
        tier = None
        if cache.host_memory is not None:
            tier = HostTier(pinned_rows_within(cache.host_memory, sizes), sizes, cache.block_size, PersistCounters())
        try:
            transfer = DeviceBlockTransfer(planes, copies, tier)
        except (MemoryError, RuntimeError) as error:
            raise LoadError(_out_of_memory_text(config, error, on_device=is_out_of_memory(error))) from None
        return BlockStore(folder, transfer, cache.block_size)

    def _persist_folder(self, root: Path) -> PersistFolder:
        config = self._config
        identity: list[object] = [_STORED_BLOCK_VERSION, __version__, torch.__version__, config.cache.block_size]
        files: list[Path] = []
        read: list[tuple[Path, bytes]] = []
        sources = [(config.model, self.model)]
        if self.draft is not None:
            sources.append((config.scheduling.speculation.model or config.model, self.draft))
        for path, model in sources:
            directory, decoder = Path(path), model.decoder
            # Each chain's key covers its scaling. Threads and cores change results no more than the division into steps does.
            spec = replace(decoder.spec, rotary_groups=(), notices=())
            compute = replace(config.compute, cores=None, threads=None)
            plan = sorted((name, [(part.rows, part.storage) for part in parts]) for name, parts in decoder.plan.items())
            identity += [spec, compute, plan, decoder.dtype, decoder.weight_dtype, model.cache_dtype]
            identity += [model.quantization, decoder.backend.explain()]
            if config.loading.format == "dummy":
                identity.append(model.digest)
            else:
                files += weight_files(directory)
                read.append((directory, model.digest))

        def is_current() -> bool:
            return all(weights_digest(directory) == digest for directory, digest in read)

        return PersistFolder(root, config.cache.persist_size or PERSIST_SIZE, files, repr(identity), is_current)

    def make_runner(self, adapters: LoadedAdapters, masks: GrammarMasks, store: BlockStore | None) -> ModelRunner:
        """The model runner, with CUDA graphs if enabled. The other ranks allocate their caches."""
        config, decoder, ranks = self._config, self.model.decoder, self._ranks
        runner = ModelRunner(
            decoder,
            self.cache,
            self.tables,
            Sampler(decoder.spec.vocab_size, decoder.backend, masks),
            config.cache.block_size,
            draft=self.draft_model,
            adapters=adapters,
            persisted=None if store is None else store.transfer,
            send_command=None if ranks is None else ranks.send_command,
        )
        if config.compute.cuda_graphs:
            runner.prepare_graphs(*largest_decode_step(config, self.plan.max_model_len))
        if ranks is not None:
            ranks.allocate_cache(self.plan, self._rotary_rows)
        return runner

    def make_blocks(self, store: BlockStore | None) -> BlockManager:
        config, spec, plan = self._config, self.model.decoder.spec, self.plan
        layouts = [
            KVGroupLayout(n, group.window, _rotary_groups_of(spec, group))
            for n, group in zip(plan.num_blocks, spec.kv_groups, strict=True)
        ]
        if spec.state_group is not None:
            layouts.append(KVGroupLayout.of_states(plan.num_states))
        # With bidirectional attention the keys of a prefix depend on the rest of the text, so they cannot be shared.
        prefix_caching = config.cache.prefix_caching and not spec.is_bidirectional
        return BlockManager(layouts, config.cache.block_size, prefix_caching, listener=store)

    def make_scheduler(
        self, limits: ContextSizes, blocks: BlockManager, adapters: LoadedAdapters, store: BlockStore | None
    ) -> Scheduler:
        config, draft, decoder = self._config, self.draft, self.model.decoder
        spec, scheduling = decoder.spec, config.scheduling
        if self._ranks is not None or spec.state_group is not None:
            # No multi-step decoding: only the first rank knows sampled tokens until the next plan contains them, and a
            # recurrent state that a failed pass has changed cannot be restored.
            scheduling = replace(scheduling, burst_seconds=0.0)
        return Scheduler(
            config=scheduling,
            limits=limits,
            blocks=blocks,
            rotary=self.tables,
            namespace=cache_namespace(self.model),
            eos_token_ids=spec.eos_token_ids,
            whole_prompts=spec.is_bidirectional,
            chunk_boundaries=ChunkBoundaries(
                decoder.backend.uniform_prefill_min_tokens,
                config.cache.block_size,
                align_to_blocks=spec.state_group is not None and config.cache.prefix_caching,
            ),
            adapter_key=lambda adapter_id: adapters.digest_of(adapter_id).encode(),
            store=store,
            draft_tracks_all_tokens=draft is not None
            and (draft.spec.mtp_input is not None or draft.spec.state_group is not None),
        )

    def describe(self, adapters: tuple[AdapterInfo, ...], seconds: float) -> ModelInfo:
        """Description of the loaded model. Raises LoadError if `context.shift_context` exceeds the context.

        seconds: duration of loading.
        """
        config, model, draft, plan = self._config, self.model, self.draft, self.plan
        decoder, spec = model.decoder, model.spec
        shift_context = config.context.shift_context
        if shift_context is not None and shift_context > plan.max_model_len:
            raise LoadError(
                f"`context.shift_context` is {shift_context}, the context is {plan.max_model_len} tokens: lower it"
            )
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
            kv_cache_dtype=dtype_name(model.cache_dtype),
            quantization=model.quantization,
            device=str(decoder.device),
            num_parameters=spec.num_parameters(),
            num_layers=len(spec.layers),
            block_size=config.cache.block_size,
            num_kv_blocks=plan.num_blocks,
            num_states=plan.num_states,
            state_bytes=spec.state_bytes + (0 if draft is None else draft.spec.state_bytes),
            kv_cache_bytes=plan.num_bytes,
            kv_bytes_per_token=kv_bytes_per_token(model, draft, all_ranks=True),
            max_num_seqs=config.scheduling.max_num_seqs,
            max_num_batched_tokens=config.scheduling.max_num_batched_tokens,
            eos_token_ids=spec.eos_token_ids,
            rotary_groups=spec.rotary_groups,
            model_rotary_groups=model.rotary_groups,
            weight_bytes=self._weight_bytes,
            load_seconds=seconds,
            rotary_ladder=self.planner.ladder,
            rotary_auto=self.planner.auto,
            shift_context=shift_context or plan.max_model_len,
            max_total_tokens=config.context.max_total_tokens,
            cut_blocks=blocks_per_split(config.cache.block_size) if config.compute.deterministic else 1,
            **context_refusals(decoder.spec),
            adapters=adapters,
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


def fingerprint(config: EngineConfig, model: LoadedModel) -> str:
    """A digest of everything that logits depend on. Prefix caching and proposed tokens do not change logits."""
    decoder = model.decoder
    groups = [(group.name, group.scaling.to_dict()) for group in decoder.spec.rotary_groups]
    compute = replace(config.compute, cores=None)  # the choice of cores does not change results
    parts: tuple[object, ...] = (__version__, model.digest, compute)
    parts += (decoder.dtype, decoder.weight_dtype, model.cache_dtype)
    parts += (model.quantization, decoder.backend.explain(), groups, config.rotary.update)
    parts += (config.rotary.scaling == AUTO, config.rotary.ladder)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _describe_draft(speculation: SpeculationConfig, draft: LoadedModel) -> DraftInfo:
    decoder, architecture = draft.decoder, draft.decoder.spec.architecture
    return DraftInfo(
        path=speculation.model or "",
        architecture=f"prediction layer of {architecture}" if speculation.mtp else architecture,
        quantization=draft.quantization,
        weight_dtype=dtype_name(decoder.weight_dtype),
        num_parameters=decoder.spec.num_parameters(),
        weight_bytes=decoder.weight_bytes(),
        num_tokens=speculation.draft_tokens,
    )


def _out_of_memory_text(config: EngineConfig, error: Exception, *, on_device: bool) -> str:
    if on_device and config.cache.host_memory is None:
        return "no memory is left on the device for the copies of `cache.persist`: lower `cache.memory` or `cache.device_share`"
    size = gib(config.cache.host_memory or 0)
    return (
        f"`cache.host_memory`: the system does not provide {size} of locked memory, or the device has no memory for the "
        f"copies ({str(error).splitlines()[0]}): lower it, or raise the limit of locked memory"
    )


def cache_namespace(model: LoadedModel) -> bytes:
    """A digest of everything that must be equal for a cached block to have the same meaning: weights, dtypes, layout."""
    decoder = model.decoder
    plan = sorted((name, tuple((p.rows, p.storage) for p in parts)) for name, parts in decoder.plan.items())
    identity = (plan, decoder.backend.options.activations, decoder.dtype, model.cache_dtype, _LAYOUT_VERSION)
    return hashlib.sha256(b"\0".join((model.digest, *(str(part).encode() for part in identity)))).digest()


def _rotary_groups_of(spec: ModelSpec, group: KVGroupSpec) -> tuple[int, ...]:
    """The rotary groups of the layers of a KV group; layers without rotation have none."""
    used = {spec.attention[layer].rotary_group for layer in group.layers}
    return tuple(sorted(index for index in used if index is not None))
