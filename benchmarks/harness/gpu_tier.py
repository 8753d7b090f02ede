"""Blocks that leave the cache of a GPU and return, compared with pinned copies and with computing the prompt again."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness.gpu_figures import Bounds, Figure, fastest, wait

from windlass.engine.cache.cache_operations import LoadedBlock
from windlass.engine.cache.disk_tier import PersistCounters
from windlass.engine.cache.host_tier import DeviceBlockTransfer, HostTier
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.kernels import Copies, CopyStream, DeviceEvent
from windlass.kernels.backend import Backend
from windlass.kernels.device_memory import copies_of
from windlass.server.config.option_names import from_flat

_BLOCK = 16


class _AtOnce(Copies, CopyStream, DeviceEvent):
    """What there is on a CPU, to see that all of this runs: copies are done where they are asked for."""

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def record_event(self) -> DeviceEvent:
        return self

    def queue(self) -> CopyStream:
        return self

    def submit(self, copies: Callable[[], None], after: Sequence[DeviceEvent] = ()) -> DeviceEvent:
        copies()
        return self

    def wait(self) -> None:
        pass

    make_stream_wait = wait


@contextlib.contextmanager
def _copies_everywhere(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        yield
    else:
        with mock.patch.object(Backend, "make_copies", lambda backend: _AtOnce()):
            yield


def _pinned(bounds: Bounds, num_bytes: int) -> tuple[float, float]:
    """Bytes per second to the host and back, of one large copy."""
    device = torch.empty(num_bytes, dtype=torch.uint8, device=bounds.device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=bounds.device.type == "cuda")
    out, back = (
        fastest(lambda t=t, s=s: t.copy_(s, non_blocking=True), bounds.device, 5, captured=False)  # type: ignore[misc]
        for t, s in ((host, device), (device, host))
    )
    return num_bytes / out, num_bytes / back


def tier_figures(name: str, model: Path, bounds: Bounds, *, far: int, tiny: bool) -> Iterator[Figure]:
    """Of a shape; far: tokens of the prompt."""
    to_host, to_device = _pinned(bounds, 1 << 20 if tiny else 256 << 20)
    yield Figure(f"pinned memory: a gigabyte to the host, {to_host / 1e9:.1f} GB/s", 1e9 / to_host)
    yield Figure(f"pinned memory: a gigabyte to the device, {to_device / 1e9:.1f} GB/s", 1e9 / to_device)
    token_bytes = _token_bytes(model, bounds)
    with _copies_everywhere(bounds.device), tempfile.TemporaryDirectory() as folder:
        yield from _ways(name, bounds, token_bytes * _BLOCK, to_host, to_device, 8 if tiny else 256)
        yield from _prompts(name, model, bounds, far, token_bytes, to_device)
        yield from _from_files(name, model, bounds, far, token_bytes, Path(folder))


def _token_bytes(model: Path, bounds: Bounds) -> int:
    config = json.loads((model / "config.json").read_text())
    items = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(items) * bounds.dtype.itemsize


def _ways(name: str, bounds: Bounds, block_bytes: int, to_host: float, to_device: float, count: int) -> list[Figure]:
    """Many blocks of one group out and back by themselves."""
    layers = 32
    shape = layers, 2 * count, block_bytes // layers // 4
    planes = [torch.randint(-128, 128, shape, dtype=torch.int8, device=bounds.device) for _ in range(4)]
    counts = PersistCounters()
    tier = HostTier(count, [sum(plane[:, 0].numel() for plane in planes)], _BLOCK, counts)
    pages = DeviceBlockTransfer([planes], copies_of(bounds.device) or _AtOnce(), tier)
    order = random.Random(0).sample(range(2 * count), count)
    size, most = count * pages.block_bytes[0], pages.max_blocks_per_load

    def save(keys: list[BlockKey]) -> None:
        for key, block in zip(keys, order, strict=True):
            tier.admit(key, block, None)
        pages.save(tier.take_pending_saves())
        wait(bounds.device)

    def load(keys: list[BlockKey]) -> None:
        for first in range(0, count, most):
            held = [one for key in keys[first : first + most] if (one := tier.acquire(key)) is not None]
            tickets = pages.load(held, lambda: False) or []
            for one in held:
                tier.release(one)
            pages.put([LoadedBlock(0, order[first + i], ticket) for i, ticket in enumerate(tickets)])
        wait(bounds.device)

    out, back = [], []
    for turn in range(4):  # each takes the places of the one before
        keys = [BlockKey(0, (turn * count + i).to_bytes(32, "big")) for i in range(count)]
        before = [plane[:, order].clone() for plane in planes]
        out.append(_timed(lambda keys=keys: save(keys), bounds.device))  # type: ignore[misc]
        for plane in planes:
            plane[:, order] = 0
        back.append(_timed(lambda keys=keys: load(keys), bounds.device))  # type: ignore[misc]
        if not all(torch.equal(plane[:, order], one) for plane, one in zip(planes, before, strict=True)):
            raise RuntimeError("other bytes came back")
    megabytes = f"{size >> 20:,} MiB in blocks"
    return [
        Figure(f"{name}: {megabytes} to the host", min(out), size / to_host, 0.7),
        Figure(f"{name}: {megabytes} back into the pages", min(back), size / to_device, 0.6),
    ]


def _timed(work: Callable[[], None], device: torch.device) -> float:
    wait(device)  # for what was asked of it before
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class _Asking:
    """An engine with random weights, whose cache holds the prompt once and a half. options: flat names."""

    def __init__(self, model: Path, bounds: Bounds, far: int, token_bytes: int, **options: Any) -> None:
        given: dict[str, Any] = {"device": str(bounds.device), "load_format": "dummy", "max_num_seqs": 8}
        given |= {"max_model_len": far + 64, "max_num_batched_tokens": far, "target_step_seconds": 0.0}
        given |= {"kv_cache_memory": token_bytes * (far * 3 // 2 + 256)}
        self.core = EngineCore(from_flat(str(model), given | options))
        self.core.warm_up()

    def ask(self, prompt: list[int], tokens: int = 1) -> tuple[float, int, list[int]]:
        """Seconds until the last token, cached tokens, and what was drawn."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        begin, cached, drawn = time.perf_counter(), 0, list[int]()
        self.core.add(EngineRequest("a", prompt, sampling))
        while self.core.has_work():
            for output in self.core.step():
                if output.error is not None:
                    raise output.error
                cached = output.cached_tokens
                drawn += output.token_ids
        return time.perf_counter() - begin, cached, drawn

    def close(self) -> None:
        self.core.close()


def _check(bounds: Bounds, far: int, cached: int, drawn: list[int], again: list[int]) -> None:
    """That the prompt came back. Its last tokens are computed in products of other sizes: rounded, other tokens may be drawn."""
    if cached < far - 2 * _BLOCK or (bounds.dtype == torch.float32 and drawn != again):
        raise RuntimeError(f"{cached} of {far} tokens came back, and {again} was drawn instead of {drawn}")


def _give_back(bounds: Bounds) -> None:
    gc.collect()  # engines hold themselves
    if bounds.device.type == "cuda":
        torch.cuda.empty_cache()


def _prompt(number: int, length: int) -> list[int]:
    drawn = random.Random(number)
    return [drawn.randrange(10, 120) for _ in range(length)]


def _prompts(name: str, model: Path, bounds: Bounds, far: int, token_bytes: int, to_device: float) -> list[Figure]:
    one = _Asking(model, bounds, far, token_bytes, kv_host_memory=token_bytes * max(8 * far, 2048))
    one.ask(_prompt(0, far))  # programs are compiled
    one.ask(_prompt(1, far))
    computed, back, evicting = [], [], []
    for number in range(2, 5):
        prompt = _prompt(number, far)
        seconds, _, drawn = one.ask(prompt)
        evicting.append(seconds)
        one.ask(_prompt(number + 10, far))  # takes its place
        seconds, cached, again = one.ask(prompt)
        _check(bounds, far, cached, drawn, again)
        back.append(seconds)
    one.close()
    del one
    _give_back(bounds)
    plain = _Asking(model, bounds, far, token_bytes, prefix_caching=False)
    for number in range(4):
        computed.append(plain.ask(_prompt(number, far))[0])
    plain.close()
    del plain
    _give_back(bounds)
    bound, plainly = far * token_bytes / to_device, min(computed)
    with_copies = f"{name}: the same, as many blocks evicted to the host, over that"
    return [
        Figure(f"{name}: a prompt of {far:,} tokens computed, nothing evicted", plainly),
        Figure(with_copies, min(evicting) / plainly, wanted=1.15, plain=True),
        Figure(f"{name}: the same returned from the host, compared with a pinned copy", min(back), bound, 0.4),
        Figure(f"{name}: that over computing it", min(back) / plainly, wanted=0.5, plain=True),
    ]


def _from_files(name: str, model: Path, bounds: Bounds, far: int, token_bytes: int, folder: Path) -> list[Figure]:
    """After a restart, the system holding the files in memory."""
    folder.chmod(0o700)
    prompt = _prompt(50, far)
    options = {"kv_persist": str(folder), "kv_persist_size": token_bytes * max(4 * far, 2048)}
    first = _Asking(model, bounds, far, token_bytes, **options)
    _, _, drawn = first.ask(prompt, 4)
    begin = time.perf_counter()
    while first.core.stats().persist.waiting_blocks:
        time.sleep(0.005)
    written = time.perf_counter() - begin
    first.close()
    del first
    _give_back(bounds)
    second = _Asking(model, bounds, far, token_bytes, **options)
    seconds, cached, again = second.ask(prompt, 4)
    second.close()
    del second
    _give_back(bounds)
    _check(bounds, far, cached, drawn, again)
    return [
        Figure(
            f"{name}: the prompt's {far * token_bytes >> 20:,} MiB written to files, behind its first token", written
        ),
        Figure(f"{name}: the prompt read back from files after a restart", seconds),
    ]
