"""Model loader: from a model directory to a decoder with weights.

Also fills weights with random numbers for benchmarks (`loading.format=dummy`), without reading weight files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from windlass import kernels
from windlass.engine.cache.kv_cache_budget import gib
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.model_info import PoolingDefaults
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading import weight_cache
from windlass.engine.model.loading.checkpoint import weights_digest
from windlass.engine.model.loading.device_selection import choose_device, free_memory, is_out_of_memory
from windlass.engine.model.loading.draft_model import MTPPart, for_draft
from windlass.engine.model.loading.preflight import DeviceCapabilities, ModelToLoad, check_replicas, prepare_model
from windlass.engine.model.loading.sentence_transformers_files import read_pooling
from windlass.engine.model.loading.weights import Progress, load_weights
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.tensor_parallel import ModelShard
from windlass.engine.rotary.rope_scaling import RotaryGroup
from windlass.kernels import Backend, BlockWeight, PanelWeight, StackedWeight, Weight
from windlass.kernels.layouts import weight_layouts
from windlass.kernels.layouts.weight_layouts import PANEL

_RANDOM_BYTES = 4 << 20  # generated at once for a weight in panels: they are still in cache when they are packed


def randomize_weights(decoder: Decoder, seed: int, progress: Progress | None = None) -> None:
    """Fill all weights with random numbers, scaled so that activations stay of order one."""
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    tensors = decoder.tensors()
    for i, tensor in enumerate(tensors):
        _randomize(decoder.backend, tensor, generator)
        if progress:
            progress("making random weights", i + 1, len(tensors))


def _randomize(backend: Backend, weight: Weight, generator: torch.Generator) -> None:
    if isinstance(weight, StackedWeight):
        for part in weight.parts:
            _randomize(backend, part, generator)
    elif isinstance(weight, BlockWeight):
        weight_layouts.randomize(weight, generator)
    elif isinstance(weight, PanelWeight):
        _randomize_panels(backend, weight, generator)
    elif weight.dim() == 1:
        weight.copy_(1 + 0.1 * torch.randn(weight.shape, generator=generator, device=weight.device))
    else:
        _randomize_rows(weight, generator)


def _randomize_rows(rows: Tensor, generator: torch.Generator) -> None:
    """Uniform numbers with a variance of 1 / fan-in; normal ones would take several times as long."""
    bound = (3.0 / rows.shape[1]) ** 0.5
    rows.uniform_(-bound, bound, generator=generator)


def _randomize_panels(backend: Backend, weight: PanelWeight, generator: torch.Generator) -> None:
    """Fill panels with the numbers that the weight would have as rows."""
    step = max(1, _RANDOM_BYTES // (PANEL * max(weight.columns, 1) * weight.dtype.itemsize)) * PANEL
    for first in range(0, weight.rows, step):
        rows = torch.empty((min(step, weight.rows - first), weight.columns), dtype=weight.dtype)
        _randomize_rows(rows, generator)
        backend.pack(weight.narrow(first, len(rows)), rows)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights.

    prepared: how it was loaded. digest: identifies the weights, see `weights_digest`. pooling: of embeddings, from its files.
    """

    decoder: Decoder
    prepared: ModelToLoad
    digest: bytes
    notices: tuple[str, ...] = ()
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)

    @property
    def spec(self) -> ModelSpec:
        """The spec of the whole model, also if the decoder is a rank shard."""
        return self.prepared.model.spec

    @property
    def original_spec(self) -> ModelSpec | None:
        """The spec with rows in the order of the original weights, whatever the format of the files."""
        return self.prepared.model.original_spec

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of cached keys and values."""
        return _torch_dtype(self.prepared.cache_dtype)

    @property
    def rotary_groups(self) -> tuple[RotaryGroup, ...]:
        """The model's own rotary groups, before the server's scaling."""
        return self.prepared.model.unscaled_groups

    @property
    def quantization(self) -> str | None:
        """Name of the weights' quantization; None if there is none."""
        return self.prepared.quantization


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The rank of `compute.tensor_parallel` that loads, and the file descriptors of its group: see `kernels.RankGroup`."""

    rank: int
    memory: int
    store: int


def load_model(
    config: EngineConfig,
    progress: Progress | None = None,
    placement: RankPlacement | None = None,
    base_model: Decoder | None = None,
    part: MTPPart | None = None,
) -> LoadedModel:
    """Read config.json, allocate the decoder, fill it. Raises LoadError with one line that names the remedy.

    placement: of the rank that loads, if there are several. base_model, part: load this part of the MTP head of `base_model`.
    """
    if placement is not None:  # replicas share whole models; each rank loads its own shard
        config = replace(config, loading=replace(config.loading, shared_memory=()))
    directory = Path(config.model)
    rank = 0 if placement is None else placement.rank
    device, device_notices = choose_device(config.compute.device, rank, config.compute.tensor_parallel)
    shared, free = _shared_weights(config, device), free_memory(device)
    if free is not None:  # the memory of shared weights is allocated already
        free += sum(kernels.SharedWeights(number).num_bytes for number in config.loading.shared_memory)
    capabilities = DeviceCapabilities(
        str(device), kernels.reads_16bit_weights(device), kernels.has_native_bf16(device), free
    )
    prepared = prepare_model(config, capabilities, rank=rank, part=part)
    shard, notices = prepared.shard, tuple[str, ...]()
    ranks = _rank_group(shard, placement, device)
    try:
        backend = kernels.select_backend(
            device,
            _torch_dtype(prepared.compute_dtype),
            _torch_dtype(prepared.weight_dtype),
            activations=config.compute.activations,
            deterministic=config.compute.deterministic,
            bf16_prefill=prepared.bf16_prefill,
            shared=shared,
            ranks=ranks,
        )
        decoder = Decoder(prepared.spec, backend, prepared.plan, base_model)
        if shared is not None and shared.note is not None:
            digest = _shared_digest(shared)
        elif config.loading.format == "dummy":
            notices = weight_cache.no_effect_notice(config, "`loading.format=dummy`")
            randomize_weights(decoder, config.loading.seed, progress)
            digest = f"dummy {config.loading.seed}".encode()
        else:
            digest = weights_digest(directory)
            notices = fill_decoder(decoder, config, prepared, progress)
            if weights_digest(directory) != digest:  # some weights may be of the old files, others of the new
                raise LoadError(f"the checkpoint in {directory} changed while it was read: start again")
        if shared is not None and shared.note is None:
            shared.finish(digest)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        less = "" if prepared.model.is_quantized else ", `compute.quantization=int8` or int4"
        raise LoadError(
            f"the weights need {gib(prepared.weight_bytes)} of memory, more than {device} has: use "
            f"`compute.dtype=bfloat16`{less} or a smaller model"
        ) from None
    notices = device_notices + prepared.spec.notices + prepared.notices + notices
    return LoadedModel(decoder, prepared, digest, notices, _pooling(directory, prepared.spec))


def _rank_group(
    shard: ModelShard | None, placement: RankPlacement | None, device: torch.device
) -> kernels.RankGroup | None:
    """The group of ranks that hold the model; None if this process holds all of it. Raises LoadError."""
    if shard is None:
        return None
    if placement is None:
        raise LoadError("`compute.tensor_parallel`: there is only one process: leave it out")
    if (reason := kernels.ranks_refusal(device)) is not None:
        raise LoadError(f"`compute.tensor_parallel`: {reason}: leave it out")
    return kernels.RankGroup(placement.memory, shard.rank, shard.ranks, shard.columns, placement.store)


def _shared_weights(config: EngineConfig, device: torch.device) -> kernels.SharedWeights | None:
    """The memory of weights that several engines share; None if this one has its own. Raises LoadError."""
    if not config.loading.shared_memory:
        return None
    check_replicas(config, str(device))
    return kernels.SharedWeights(config.loading.shared_memory[0])


def _shared_digest(shared: kernels.SharedWeights) -> bytes:
    """The digest of shared weights that another engine has filled. Raises LoadError if they are of another model."""
    assert shared.note is not None
    if shared.note["layout"] != shared.layout:
        raise LoadError("the files of the model have changed since the first engine loaded it: start the server again")
    return bytes.fromhex(shared.note["digest"])


def _pooling(directory: Path, spec: ModelSpec) -> PoolingDefaults:
    """Pooling from the files; the default of an encoder is the mean, as in sentence-transformers."""
    found = read_pooling(directory)
    return replace(found, kind="mean") if spec.is_bidirectional and not found.declared else found


def load_draft(config: EngineConfig, model: LoadedModel, progress: Progress | None = None) -> LoadedModel | None:
    """The draft model or the model's MTP head; None if the configuration has neither."""
    draft = for_draft(
        config,
        lambda own, part: load_model(own, progress, base_model=None if part is None else model.decoder, part=part),
    )
    if draft is None:
        return None
    if config.scheduling.speculation.mtp:  # the model has the notices on its files
        return replace(draft, notices=())
    return replace(draft, notices=tuple(f"the draft model: {notice}" for notice in draft.notices))


def fill_decoder(
    decoder: Decoder, config: EngineConfig, prepared: ModelToLoad, progress: Progress | None
) -> tuple[str, ...]:
    """Fill the decoder from the checkpoint, or from the weight cache if there is one. Returns notices."""
    directory, quantized, shard = Path(config.model), prepared.model.quantized, prepared.shard
    quantizes, on_cpu = config.compute.quantization != "none", decoder.device.type == "cpu"
    if config.loading.weight_cache is None or not quantizes or not on_cpu:
        load_weights(decoder, directory, progress, quantized, shard)
        why = "`compute.quantization=none`" if not quantizes else f"weights on {decoder.device}"
        return weight_cache.no_effect_notice(config, why)
    cache = weight_cache.WeightCache(
        config.loading.weight_cache, directory, config.compute.quantization, decoder, shard
    )
    if not cache.load(decoder, progress):
        load_weights(decoder, directory, progress, quantized, shard)
        cache.store(decoder, progress)
    return tuple(cache.notices)
