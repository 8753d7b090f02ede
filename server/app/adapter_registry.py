"""Adapter registry: adapters that requests may name as their model, loaded and unloaded at run time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from windlass.engine.client.engine_client import EngineClient
from windlass.engine.errors import RequestError
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.server.config.engine_options import NAME_RULE, is_adapter_name
from windlass.server.config.option_names import with_option_names
from windlass.server.config.settings import ServerSettings
from windlass.server.errors import ApiError, bad_request

_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """An adapter of the registry. info: None while the engine loads. users: requests that run with it. unused: set once it is
    unloading and has no users."""

    source: AdapterSource
    created: int
    info: AdapterInfo | None = None
    users: int = 0
    unloading: bool = False
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterRegistry:
    """The adapters of one app. All methods run on its event loop."""

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        now = int(time.time())
        self._by_name = {source.name: ServedAdapter(source, now) for source in settings.adapters}
        self._unloading: set[ServedAdapter] = set()
        self._loading: set[str] = set()
        last = max((source.adapter_id for source in settings.adapters), default=0)
        self._ids = itertools.count(last + 1)

    def find(self, name: str | None) -> ServedAdapter | None:
        """The adapter of this name, or None."""
        return None if name is None else self._current().get(name)

    def listed(self) -> list[ServedAdapter]:
        """Adapters that requests may name, oldest first."""
        return list(self._current().values())

    def active_names(self) -> list[str]:
        """Sorted names of adapters with running requests."""
        return sorted({adapter.source.name for adapter in (*self._by_name.values(), *self._unloading) if adapter.users})

    def info_of(self, adapter: ServedAdapter) -> AdapterInfo | None:
        """The engine's description of an adapter; None until the engine has loaded."""
        if adapter.info is None and (model := self._engine.info) is not None:
            adapter.info = next((i for i in model.adapters if i.adapter_id == adapter.source.adapter_id), None)
        return adapter.info

    @contextmanager
    def using(self, adapter: ServedAdapter | None) -> Iterator[None]:
        """Hold an adapter while a request runs with it. Raises ApiError if it was unloaded after the request was checked."""
        if adapter is None:
            yield
            return
        if adapter.unloading:
            raise adapter_not_found(adapter.source.name)
        adapter.users += 1
        try:
            yield
        finally:
            adapter.users -= 1
            self._drop_if_unused(adapter)

    async def load(self, name: str, path: str) -> ServedAdapter:
        """Load an adapter from the allowed folder. Raises ApiError or RequestError that names the field at fault."""
        folder = self._require_folder()
        if not is_adapter_name(name):
            raise bad_request(f"lora_name must be {NAME_RULE}", "lora_name")
        if name in self._current() or name in self._loading or name in self._settings.model_names:
            raise bad_request(f"the name {name!r} is taken: unload that adapter first", "lora_name", "name_taken")
        if len(self._by_name) + len(self._unloading) + len(self._loading) >= self._settings.max_loras:
            raise bad_request(
                f"this server holds at most {self._settings.max_loras} adapters (--max-loras): unload one first",
                "lora_name",
                "too_many_adapters",
            )
        self._loading.add(name)
        try:
            directory = await asyncio.to_thread(_resolve_inside, folder, path)
            source = AdapterSource(next(self._ids), name, str(directory))
            try:
                info = await self._engine.load_adapter(source)
            except RequestError as error:
                raise bad_request(with_option_names(error.message), error.param, error.code) from None
            adapter = self._by_name[name] = ServedAdapter(source, int(time.time()), info)
        finally:
            self._loading.discard(name)
        return adapter

    async def unload(self, name: str) -> bool:
        """Refuse further requests for an adapter and wait for running ones. Returns False if some still run at the time limit.

        The adapter is then unloaded later. Raises ApiError for an unknown one.
        """
        self._require_folder()
        adapter = self._current().pop(name, None)
        if adapter is None:
            raise adapter_not_found(name, param="lora_name")
        adapter.unloading = True
        self._unloading.add(adapter)
        self._drop_if_unused(adapter)
        try:
            async with asyncio.timeout(self._settings.adapter_drain_seconds):
                await adapter.unused.wait()
        except TimeoutError:
            return False
        return True

    def _current(self) -> dict[str, ServedAdapter]:
        """Adapters by name, without those that a restarted engine could not load again."""
        known = self._engine.adapter_ids
        if known is not None:
            for name, adapter in [*self._by_name.items()]:
                if adapter.source.adapter_id not in known:
                    adapter.unloading = True
                    del self._by_name[name]
        return self._by_name

    def _drop_if_unused(self, adapter: ServedAdapter) -> None:
        if adapter.unloading and adapter.users == 0 and not adapter.unused.is_set():
            self._unloading.discard(adapter)
            adapter.unused.set()
            self._engine.drop_adapter(adapter.source.adapter_id)

    def _require_folder(self) -> Path:
        folder = self._settings.lora_folder
        if folder is None:
            raise ApiError(
                403,
                "this server loads and unloads no adapters while it runs: start it with --lora-folder DIR, or load them at "
                "the start with --lora NAME=DIR",
                code="adapters_fixed",
            )
        return folder


def adapter_not_found(name: str, param: str = "model") -> ApiError:
    """The 404 for an unknown or unloaded adapter."""
    return ApiError(404, f"the adapter {name[:256]!r} does not exist (any more)", param=param, code="model_not_found")


def _resolve_inside(folder: Path, path: str) -> Path:
    """The directory that `path` names, if it and its files are in `folder` after resolving links."""
    try:
        allowed = folder.resolve(strict=True)
        directory = (allowed / path).resolve(strict=True)
        inside = all(p.is_relative_to(allowed) for p in (directory, *((directory / f).resolve() for f in _FILES)))
        if inside and directory.is_dir():
            return directory
    except (OSError, ValueError, RuntimeError):
        pass
    # One error for all cases, since it must not reveal files outside the folder.
    raise bad_request(
        f"lora_path {path[:200]!r} is not a directory in the folder that this server loads adapters from", "lora_path"
    )
