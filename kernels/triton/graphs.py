"""CUDA graphs: see `windlass.kernels.recorder.Graphs`. All is asked for on torch's current stream, so its order is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from windlass.kernels.draws import SamplingTensors
from windlass.kernels.memory.marks import CudaEvent, DeviceEvent
from windlass.kernels.recorder import Graphs
from windlass.kernels.triton import drawing


class CudaGraphs(Graphs):
    """Of one device. All graphs take their memory from one pool, which is gone with the last of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # programs are compiled, and libraries take their memory, when they are first used
            torch.cuda.current_stream().wait_stream(stream)
            graph: Any = torch.cuda.CUDAGraph()
            # Other threads may go on: none of them uses the device.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        again: Callable[[], None] = graph.replay
        return again

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            work()

    def sample_rows(
        self, logits: Tensor, maxima: tuple[Tensor, Tensor], draws: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        return drawing.sample_rows(logits, maxima, draws)

    def join(self) -> None:
        pass

    def record_event(self) -> DeviceEvent:
        with torch.cuda.device(self._device):
            return CudaEvent()

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
