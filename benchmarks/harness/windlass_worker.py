"""Windlass in a worker process: the engine itself, scheduling and sampling included, HTTP not.

python -m harness.windlass_worker MODEL '{"kv_cache_dtype": "int8", "threads": 2, …}'   (names of `option_names`)
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from collections import abc
from typing import Any

import torch
from harness.worker import serve

import windlass
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.scheduling.scheduler_output import SchedulerOutput, StepResult
from windlass.server.config.option_names import from_flat

_MOST_EARLIER = 400  # tokens of a stream before the measured ones
_COMPUTED = 64  # longest context that is computed before decoding; a longer one is filled with random numbers


class WindlassHandler:
    """See Handler. Raises ValueError for options that this version of Windlass does not have."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.core = EngineCore(from_flat(model, {"device": "cpu", "prefix_caching": False, **options}))
        self._rng = random.Random(0)
        self._count = 0
        self._filled = False
        info = self.core.info
        self.info = {
            "version": f"{windlass.__version__}, torch {torch.__version__}",
            "weight_bytes": info.weight_bytes,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "kv_cache_dtype": info.kv_cache_dtype,
        }
        self._run_to_end(self.add(64, 4))

    def measure(self, request: dict[str, Any], prepared: abc.Callable[[], None]) -> float:
        tokens, streams, steps = (request[name] for name in ("tokens", "streams", "steps"))
        if request["kind"] == "prompt":
            prepared()
            return self.prefill(tokens)
        return self.decode(streams, tokens, steps, prepared, filled=tokens > _COMPUTED)

    def add(self, length: int, max_tokens: int) -> str:
        """Queue a request of `length` random tokens."""
        self._count += 1
        prompt = [self._rng.randrange(10, self.core.info.vocab_size) for _ in range(length)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(EngineRequest(str(self._count), prompt, sampling))
        return str(self._count)

    def prefill(self, length: int) -> float:
        start = time.perf_counter()
        self._run_to_end(self.add(length, 1))
        return length / (time.perf_counter() - start)

    def decode(self, streams: int, prompt: int, steps: int, prepared: abc.Callable[[], None], *, filled: bool) -> float:
        """Tokens per second of all streams. filled: the cache holds random numbers instead of a computed prompt."""
        # While the last prompts are computed, the first streams decode already.
        ids = [self.add(prompt, steps + _MOST_EARLIER) for _ in range(streams)]
        if filled:
            self.fill_instead_of_computing(ids)
        waiting = set(ids)
        while waiting:
            waiting -= {output.request_id for output in self.core.step() if output.token_ids}
        prepared()
        for _ in range(3):  # bursts are planned by how long steps take
            self.core.step()
        seconds = tokens = 0
        while tokens < steps * streams:
            if not self.core.has_work():
                raise RuntimeError(f"{streams} streams ended before {steps} steps")
            start = time.perf_counter()
            outputs = self.core.step()
            seconds += time.perf_counter() - start
            tokens += sum(len(output.token_ids) for output in outputs)
        for request_id in ids:
            self.core.abort(request_id)
        return tokens / seconds

    def fill_instead_of_computing(self, ids: list[str]) -> None:
        """Take the requests to their first token without a forward pass: only what they read later matters, not how it
        came there. Everything but the computation runs: admission, blocks, chunks."""
        if not self._filled:
            self._randomise_cache()
            self._filled = True
        runner = self.core.runner
        runner.execute = self._pretend  # type: ignore[method-assign]
        try:
            waiting = set(ids)
            while waiting:
                waiting -= {output.request_id for output in self.core.step() if output.token_ids}
        finally:
            del runner.execute

    def _pretend(self, plan: SchedulerOutput) -> list[StepResult]:
        self.core.runner.apply(plan)
        return [StepResult(seq_id, token_ids=(11,)) for item in plan.sequences for seq_id in item.samples]

    def _randomise_cache(self) -> None:
        for layer in range(self.core.info.num_layers):
            pages = self.core.runner.cache.pages(layer)
            for field in dataclasses.fields(pages):
                tensor = getattr(pages, field.name)
                if not isinstance(tensor, torch.Tensor):
                    continue
                if not tensor.is_floating_point():
                    tensor.random_(-127, 128)
                elif "scale" in field.name:
                    tensor.uniform_(0.01, 0.02)
                else:
                    tensor.normal_()

    def _run_to_end(self, request_id: str) -> None:
        while self.core.has_work():
            self.core.step()


if __name__ == "__main__":
    serve(lambda: WindlassHandler(sys.argv[1], json.loads(sys.argv[2])))
