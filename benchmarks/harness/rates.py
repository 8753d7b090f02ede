"""Rates of the machine: read and copy bandwidth and matrix products, over a run and around a single sample."""

from __future__ import annotations

import contextlib
import time
from collections import abc
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from windlass.kernels.device_memory import advise_huge_pages

_Value = TypeVar("_Value")
_Work = tuple[abc.Callable[[], object], float]  # a call and its amount in the unit of the rate


class Rates:
    """Rates with `threads` threads: read and copy bandwidth in GB/s (copies count twice), float32 products in Gflop/s.

    Read: the sum of 1 GiB of float32 in huge pages. Copy: half of it to elsewhere. Product: two square matrices of 2,048.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._data = data = readable(1 << 30)
        a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
        self._works: dict[str, _Work] = {
            "read_gb_s": (data.sum, data.nbytes / 1e9),
            "fp32_gflop_s": (lambda: a @ b, 2 * 2048**3 / 1e9),
        }

    def samples(self, repeats: int = 5) -> dict[str, list[float]]:
        """`repeats` samples of each: read_gb_s, copy_gb_s, fp32_gflop_s."""
        target = readable(self._data.nbytes // 2)
        source = self._data[: target.numel()]
        copy: _Work = (lambda: target.copy_(source), 2 * target.nbytes / 1e9)
        found: dict[str, list[float]] = {}
        with _torch_threads(self._threads):
            for name, (run, amount) in {**self._works, "copy_gb_s": copy}.items():
                run()
                found[name] = [amount / _seconds(run) for _ in range(repeats)]
        return found

    def add_linear(self, name: str, shapes: abc.Sequence[tuple[int, int]], rows: int) -> None:
        """Add the rate of torch's bfloat16 `linear`, in Gflop/s: `rows` inputs times matrices of these (rows, columns)."""
        weights = [torch.randn(shape).bfloat16() for shape in shapes]
        inputs = {columns: torch.randn(rows, columns).bfloat16() for _, columns in shapes}
        amount = 2e-9 * rows * sum(each.numel() for each in weights)
        self._works[name] = (lambda: [linear(inputs[each.shape[1]], each) for each in weights], amount)

    def now(self, name: str, seconds: float = 0.2) -> float:
        """The rate over the next `seconds`; name: read_gb_s, fp32_gflop_s or an added one."""
        run, amount = self._works[name]
        with _torch_threads(self._threads):
            run()  # wakes the threads
            passed, runs = 0.0, 0
            while passed < seconds:
                passed += _seconds(run)
                runs += 1
        return runs * amount / passed

    def around(
        self, name: str, work: abc.Callable[[abc.Callable[[], None]], _Value]
    ) -> tuple[_Value, tuple[float, float]]:
        """The result of `work`, and the rates right before and right after it.

        `work` receives a function that it must call before its timed part: the first rate is measured then. Raises ValueError if
        it does not call it.
        """
        before: list[float] = []
        value = work(lambda: before.append(self.now(name)))
        if not before:
            raise ValueError("the work did not report that it was prepared")
        return value, (before[-1], self.now(name))


def readable(nbytes: int) -> Tensor:
    """A float32 tensor of ones in huge pages. If it exceeds the caches, its `sum` measures the read bandwidth.

    Weights and caches of a server are in huge pages too. With pages of 4 KiB the sum would measure the walk of page tables.
    """
    numbers = torch.empty(nbytes // 4, dtype=torch.float32)
    advise_huge_pages(numbers)
    return numbers.fill_(1.0)


@contextlib.contextmanager
def _torch_threads(count: int) -> abc.Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(run: abc.Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
