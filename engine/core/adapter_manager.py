"""Adapter manager: loads LoRA adapters in the background and evicts them when no request uses them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from windlass.engine.core.oom_recovery import device_memory_guard
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.config import AdapterConfig, parse_dtype
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.engine.model.loading.adapter_loader import AdapterStorage, read_adapter
from windlass.engine.model.loading.loader import LoadedModel
from windlass.engine.model.lora import Adapter, LoadedAdapters
from windlass.engine.model.weight_spec import WeightSpec
from windlass.kernels import LowRankTarget

_logger = logging.getLogger("windlass.engine")


def make_empty_adapters(config: AdapterConfig, model: LoadedModel) -> LoadedAdapters:
    """Empty slots for `config.max_loaded` adapters."""
    decoder = model.decoder
    dtype = _dtype_of(config) or decoder.dtype

    def changed(weight: WeightSpec) -> LowRankTarget:
        parts = tuple([stored.rows for stored in weight.stored])
        return LowRankTarget(parts, weight.shape[1], len(parts) * config.max_rank, dtype)

    parts = ({weight.name: changed(weight) for weight in weights} for _, weights in decoder.spec.adapted_parts())
    return LoadedAdapters(config.max_loaded, parts, decoder.backend)


def _dtype_of(config: AdapterConfig) -> torch.dtype | None:
    name = parse_dtype(config.dtype)
    return None if name == "auto" else getattr(torch, name)


class AdapterManager:
    """Loads the adapters of `config` at once. Raises LoadError if a required one cannot be loaded."""

    def __init__(self, config: AdapterConfig, model: LoadedModel) -> None:
        self._config, self._decoder = config, model.decoder
        self._spec = model.original_spec or model.decoder.spec
        self._dtype = _dtype_of(config)
        self.loaded = make_empty_adapters(config, model)
        self._unloading: set[int] = set()
        self._reader = ThreadPoolExecutor(1, "adapter-reader")
        for source in config.sources:
            try:
                self.loaded.add(self._read(source))
            except RequestError as error:
                if not source.required:
                    _logger.error(
                        "adapter %s could not be loaded again after the restart: %s", source.name, error.message
                    )
                    continue
                raise LoadError(f"`adapters.sources={source.name}={source.path}`: {error.message}") from None

    def check(self, adapter_id: int | None) -> None:
        """Raises RequestError for an adapter that requests cannot use."""
        if adapter_id is not None and (adapter_id not in self.loaded or adapter_id in self._unloading):
            raise RequestError("the adapter is not loaded: it may have been unloaded", "model", "model_not_found")

    def read_in_background(self, source: AdapterSource) -> Future[Adapter]:
        """Read and check an adapter, one at a time. The future may fail with RequestError or DeviceMemoryError."""
        return self._reader.submit(self._read_guarded, source)

    def add(self, adapter: Adapter) -> AdapterInfo:
        """Make an adapter available to requests. Raises RequestError if too many are loaded."""
        self.loaded.add(adapter)
        return adapter.info

    def unload(self, adapter_id: int) -> None:
        """Refuse further requests for an adapter; `unload_unused` drops it."""
        if adapter_id in self.loaded:
            self._unloading.add(adapter_id)

    @property
    def has_unloading(self) -> bool:
        """Whether adapters wait to be dropped."""
        return bool(self._unloading)

    def unload_unused(self, used: Iterable[int | None]) -> None:
        """Drop the adapters that wait for it and are not among `used`."""
        if self._unloading:
            unused = self._unloading.difference(used)
            self._unloading -= unused
            for adapter_id in unused:
                self.loaded.drop(adapter_id)

    def _read_guarded(self, source: AdapterSource) -> Adapter:
        with device_memory_guard(f"the adapter {source.name}"):
            return self._read(source)

    def _read(self, source: AdapterSource) -> Adapter:
        self.loaded.check_capacity()
        decoder = self._decoder
        storage = AdapterStorage(decoder.dtype, decoder.device, self._dtype)
        return read_adapter(source, self._spec, storage, self._config.max_rank)
