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
from windlass.engine.model.loading.draft_model import MTPPart, draft_config, mtp, reword_for_draft
from windlass.engine.model.loading.preflight import check_replicas, prepare_model
from windlass.engine.model.loading.quantized_checkpoint import QuantizedCheckpoint
from windlass.engine.model.loading.sentence_transformers_files import read_pooling
from windlass.engine.model.loading.weights import Progress, load_weights
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.tensor_parallel import ModelShard
from windlass.engine.model.weight_storage import plan_bytes
from windlass.engine.rotary.rope_scaling import RotaryGroup
from windlass.kernels import Backend, BlockWeight, PanelWeight, StackedWeight, Weight
from windlass.kernels.layouts import weight_layouts
from windlass.kernels.layouts.weight_layouts import PANEL

_RANDOM_BYTES = 4 << 20  # drawn at a time for a weight in panels: they are still in a cache when they are packed


def randomize_weights(decoder: Decoder, seed: int, progress: Progress | None = None) -> None:
    """Distinct random weights everywhere, scaled so that activations stay of order one."""
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
    """Uniform, several times quicker to draw than normal; the variance is that of 1 / fan-in."""
    bound = (3.0 / rows.shape[1]) ** 0.5
    rows.uniform_(-bound, bound, generator=generator)


def _randomize_panels(backend: Backend, weight: PanelWeight, generator: torch.Generator) -> None:
    """The same numbers that the weight would get as rows."""
    step = max(1, _RANDOM_BYTES // (PANEL * max(weight.columns, 1) * weight.dtype.itemsize)) * PANEL
    for first in range(0, weight.rows, step):
        rows = torch.empty((min(step, weight.rows - first), weight.columns), dtype=weight.dtype)
        _randomize_rows(rows, generator)
        backend.pack(weight.narrow(first, len(rows)), rows)


_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """digest identifies the weights (see `weights_digest`); cache_dtype is that of the KV pages.

    original_spec: with rows in the order of the original weights, whatever files they came from.
    pooling: how its files have its states pooled.
    rotary_groups: the model's own, before the server's scaling. quantization: what to call that of the weights, if any.
    whole: the specification of all of the model, where the decoder is one rank's part of it.
    """

    decoder: Decoder
    cache_dtype: torch.dtype
    digest: bytes
    notices: tuple[str, ...]
    rotary_groups: tuple[RotaryGroup, ...]
    quantization: str | None = None
    original_spec: ModelSpec | None = None
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)
    whole: ModelSpec | None = None

    @property
    def spec(self) -> ModelSpec:
        """Of all of the model."""
        return self.whole or self.decoder.spec


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Which of the ranks of `compute.tensor_parallel` loads, and the descriptors of what they meet in: see `kernels.RankGroup`."""

    rank: int
    memory: int
    store: int


def load_model(
    config: EngineConfig,
    progress: Progress | None = None,
    placement: RankPlacement | None = None,
    base_model: Decoder | None = None,
    what: MTPPart | None = None,
) -> LoadedModel:
    """Read config.json, allocate the decoder, fill it. Raises LoadError with one line that says what to do.

    seat: of the rank that it is loaded for, where there are several. base_model, what: the model whose prediction layer is
    loaded, and what of it; None: the model is.
    """
    if placement is not None:  # replicas share whole models, each rank loads its own part
        config = replace(config, loading=replace(config.loading, shared_memory=()))
    directory = Path(config.model)
    rank = 0 if placement is None else placement.rank
    device, of_device = choose_device(config.compute.device, rank, config.compute.tensor_parallel)
    shared, free = _shared_weights(config, device), free_memory(device)
    if free is not None:  # what is shared is there already
        free += sum(kernels.SharedWeights(number).num_bytes for number in config.loading.shared_memory)
    prepared = prepare_model(
        config,
        str(device),
        reads_narrow=kernels.reads_16bit_weights(device),
        multiplies_narrow=kernels.has_native_bf16(device),
        free=free,
        rank=rank,
        what=what,
    )
    part, stored = prepared.part, _TORCH_DTYPES[prepared.weight_dtype]
    spec, plan = (prepared.model.spec, prepared.plan) if part is None else (part.spec, part.plan)
    ranks = _ranks(part, placement, device)
    try:
        backend = kernels.select_backend(
            device,
            _TORCH_DTYPES[prepared.compute_dtype],
            stored,
            activations=config.compute.activations,
            deterministic=config.compute.deterministic,
            bf16_prefill=prepared.bf16_prefill,
            shared=shared,
            ranks=ranks,
        )
        decoder = Decoder(spec, backend, plan, base_model)
        if shared is not None and shared.note is not None:
            notices: tuple[str, ...] = ()
            digest = _found_digest(shared)
        elif config.loading.format == "dummy":
            notices = weight_cache.no_effect_notice(config, "`loading.format=dummy`")
            randomize_weights(decoder, config.loading.seed, progress)
            digest = f"dummy {config.loading.seed}".encode()
        else:
            digest = weights_digest(directory)
            notices = fill(decoder, directory, config, prepared.model.quantized, progress, part)
            if weights_digest(directory) != digest:  # what was read may be some of both
                raise LoadError(f"the checkpoint in {directory} changed while it was read: start again")
        if shared is not None and shared.note is None:
            shared.finish(digest)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        size = gib(plan_bytes(spec, plan))
        can_quantize = not prepared.model.is_quantized
        less = ", `compute.quantization=int8` or int4" if can_quantize else ""
        raise LoadError(
            f"the weights need {size} of memory, more than {device} gives: use `compute.dtype=bfloat16`{less} or a smaller model"
        ) from None
    cached = _TORCH_DTYPES[prepared.cache_dtype]
    notices = of_device + spec.notices + prepared.notices + notices
    model = prepared.model
    return LoadedModel(
        decoder,
        cached,
        digest,
        notices,
        model.unscaled_groups,
        prepared.quantization,
        model.original_spec,
        _pooling(directory, spec),
        None if part is None else part.whole,
    )


def _ranks(part: ModelShard | None, placement: RankPlacement | None, device: torch.device) -> kernels.RankGroup | None:
    """The ranks that hold the rest of the model; None where all of it is here. Raises LoadError."""
    if part is None:
        return None
    if placement is None:
        raise LoadError("`compute.tensor_parallel`: there is one process here: leave it out")
    if (reason := kernels.ranks_refusal(device)) is not None:
        raise LoadError(f"`compute.tensor_parallel`: {reason}: leave it out")
    return kernels.RankGroup(placement.memory, part.rank, part.ranks, part.columns, placement.store)


def _shared_weights(config: EngineConfig, device: torch.device) -> kernels.SharedWeights | None:
    """Where the weights lie that several engines have in common; None where this one has its own. Raises LoadError."""
    if not config.loading.shared_memory:
        return None
    check_replicas(config, str(device))
    return kernels.SharedWeights(config.loading.shared_memory[0])


def _found_digest(shared: kernels.SharedWeights) -> bytes:
    """The digest of shared weights that another engine has filled. Raises LoadError where they are not those of this model."""
    assert shared.note is not None
    if shared.note["layout"] != shared.layout:
        raise LoadError("the files of the model have changed since the first engine loaded it: start the server again")
    return bytes.fromhex(shared.note["digest"])


def _pooling(directory: Path, spec: ModelSpec) -> PoolingDefaults:
    """What the files say; the mean of an encoder's states where they say nothing, as sentence-transformers has it."""
    found = read_pooling(directory)
    return replace(found, kind="mean") if spec.is_bidirectional and not found.declared else found


def load_draft(config: EngineConfig, model: LoadedModel, progress: Progress | None = None) -> LoadedModel | None:
    """What the configuration lets draft for the model, a draft model or the model's prediction layer; its notices say whose they
    are. None where nothing does."""
    own, speculation = draft_config(config), config.scheduling.speculation
    if own is None:
        return None
    try:
        what = mtp(speculation)
        draft = load_model(own, progress, base_model=None if what is None else model.decoder, what=what)
    except LoadError as error:
        raise reword_for_draft(error, speculation) from None
    if speculation.mtp:  # what there is to say of its files was said of the model
        return replace(draft, notices=())
    return replace(draft, notices=tuple(f"the draft model: {notice}" for notice in draft.notices))


def fill(
    decoder: Decoder,
    directory: Path,
    config: EngineConfig,
    quantized: QuantizedCheckpoint | None = None,
    progress: Progress | None = None,
    part: ModelShard | None = None,
) -> tuple[str, ...]:
    """Put the checkpoint's weights into the decoder, quantized ones from the cache if there is one; returns notices.

    quantized: what weights are made of that the checkpoint holds quantized. part: what the decoder has of the model.
    """
    quantizes, on_cpu = config.compute.quantization != "none", decoder.device.type == "cpu"
    if config.loading.weight_cache is None or not quantizes or not on_cpu:
        load_weights(decoder, directory, progress, quantized, part)
        why = "`compute.quantization=none`" if not quantizes else f"weights on {decoder.device}"
        return weight_cache.no_effect_notice(config, why)
    cache = weight_cache.WeightCache(config.loading.weight_cache, directory, config.compute.quantization, decoder, part)
    if not cache.load(decoder, progress):
        load_weights(decoder, directory, progress, quantized, part)
        cache.store(decoder, progress)
    return tuple(cache.notices)
