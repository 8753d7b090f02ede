"""OpenVINO GenAI's continuous batching pipeline in a worker process, step by step. Runs in an environment of its own.

python -m harness.openvino_worker MODEL.gguf '{"threads": 2, "vocab": 151936}'
"""

from __future__ import annotations

import json
import sys
import time
from collections import abc
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from harness.worker import serve

_COMPUTED_ONCE = 64  # a stream after a longer context continues in the next sample


class OpenVINOHandler:
    """See Handler."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        config = genai.SchedulerConfig()
        config.cache_size = 2  # GB
        config.max_num_batched_tokens = 512
        config.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": options["threads"], "PERFORMANCE_HINT": "LATENCY"}
        self.pipe = genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self.info = {"version": genai.__version__}
        self._rng = np.random.default_rng(0)
        self._count = 0
        self._vocab = options["vocab"]
        self._kept: tuple[int, Any] | None = None  # (prompt length, handle) of a request that stays between measures
        self._warm = False  # the first run compiles, which the start-up must not include

    def measure(self, request: dict[str, Any], prepared: abc.Callable[[], None]) -> float:
        tokens, streams, steps = (request[name] for name in ("tokens", "streams", "steps"))
        if not self._warm:
            self.prefill(64)
            self._warm = True
        if tokens > _COMPUTED_ONCE and streams == 1 and request["kind"] == "decode":
            return self.depth(tokens, steps, prepared)
        self._drop_kept()
        if request["kind"] == "prompt":
            prepared()
            return self.prefill(tokens)
        return self.decode(streams, tokens, steps, prepared)

    def prefill(self, length: int) -> float:
        start = time.perf_counter()
        handle = self._add(length, 1)
        while not handle.can_read():
            self.pipe.step()
        seconds = time.perf_counter() - start
        self._finish()
        return length / seconds

    def decode(self, streams: int, prompt: int, steps: int, prepared: abc.Callable[[], None]) -> float:
        handles = [self._add(prompt, steps + 16) for _ in range(streams)]
        self._step_until_all_decode(handles)
        value = self._timed_steps(handles, steps, prepared)
        for handle in handles:
            handle.cancel()
        self._finish()
        return value

    def depth(self, prompt: int, steps: int, prepared: abc.Callable[[], None]) -> float:
        """One stream after `prompt` tokens. The prompt is computed once; the next call continues the stream."""
        if self._kept is None or self._kept[0] != prompt:
            self._drop_kept()
            handle = self._add(prompt, 4096)
            self._step_until_all_decode([handle])
            self._kept = (prompt, handle)
        return self._timed_steps([self._kept[1]], steps, prepared)

    def _add(self, length: int, max_tokens: int) -> Any:
        self._count += 1
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        ids = self._rng.integers(10, self._vocab, (1, length), dtype=np.int64)
        return self.pipe.add_request(self._count, ov.Tensor(ids), config)

    def _step_until_all_decode(self, handles: list[Any]) -> None:
        for handle in handles:
            while not handle.can_read():
                self.pipe.step()

    def _timed_steps(self, handles: list[Any], steps: int, prepared: abc.Callable[[], None]) -> float:
        prepared()
        self.pipe.step()
        self._read_all(handles)
        start = time.perf_counter()
        for _ in range(steps):
            self.pipe.step()
        seconds = time.perf_counter() - start
        return self._read_all(handles) / seconds

    @staticmethod
    def _read_all(handles: list[Any]) -> int:
        """How many tokens came since the last call, over all handles."""
        tokens = 0
        for handle in handles:
            while handle.can_read():
                tokens += sum(len(output.generated_ids) for output in handle.read().values())
        return tokens

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self._kept[1].cancel()
            self._kept = None
            self._finish()

    def _finish(self) -> None:
        """Let the pipeline forget requests that were cancelled or are through."""
        while self.pipe.has_non_finished_requests():
            self.pipe.step()


if __name__ == "__main__":
    serve(lambda: OpenVINOHandler(sys.argv[1], json.loads(sys.argv[2])))
