"""vLLM's offline engine on a CPU in a worker process, with its own scheduler. Runs in that peer's own environment.

python benchmarks/harness/vllm_worker.py MODEL '{"dtype": "bfloat16", "eager": false, "max_model_len": 8192, "max_num_seqs":
64}'

Run it by its path: with benchmarks/ on the module path, transformers would import kernels.py instead of Hugging Face's
package. The caller sets the number of threads and the size of the cache by environment variables of vLLM.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import abc
from typing import Any

import vllm
from vllm.sampling_params import RequestOutputKind
from worker import serve


class VLLMHandler:
    """See Handler. As vLLM runs by default (chunked prefill, compiled unless `eager`), but without its prefix cache."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.engine = vllm.LLM(
            model=model,
            dtype=options["dtype"],
            enforce_eager=options["eager"],
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        ).llm_engine
        self.info = {"version": vllm.__version__}
        self._rng = random.Random(0)
        self._count = 0
        self._vocab = options.get("vocab", 32000)
        self._warm = False  # the start-up must not include it

    def measure(self, request: dict[str, Any], prepared: abc.Callable[[], None]) -> list[float]:
        kind, prompt, streams, steps = (request[name] for name in ("kind", "prompt", "streams", "steps"))
        if not self._warm:
            self.prefill(64)
            self._warm = True
        if kind == "depth":
            raise ValueError("not measured at depth")
        if kind == "prefill":
            prepared()
            return [self.prefill(prompt)]
        return [self.decode(streams, prompt, steps, prepared)]

    def prefill(self, length: int) -> float:
        start = time.perf_counter()
        self._add(length, 1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return length / (time.perf_counter() - start)

    def decode(self, streams: int, prompt: int, steps: int, prepared: abc.Callable[[], None]) -> float:
        """Tokens per second of all streams."""
        ids = [self._add(prompt, 4 * steps + 64) for _ in range(streams)]
        waiting = set(ids)
        while waiting:
            waiting -= set(self._step())
        prepared()
        self._step()
        start = time.perf_counter()
        tokens = 0
        while tokens < streams * steps:
            tokens += sum(self._step().values())
        seconds = time.perf_counter() - start
        self.engine.abort_request(ids)
        return tokens / seconds

    def _add(self, length: int, max_tokens: int) -> str:
        """Queue a request of `length` random tokens; the id that its outputs carry."""
        self._count += 1
        prompt = [self._rng.randrange(10, self._vocab) for _ in range(length)]
        sampling = vllm.SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(str(self._count), {"prompt_token_ids": prompt}, sampling)
        return str(self._count)

    def _step(self) -> dict[str, int]:
        """New tokens by request."""
        return {output.request_id: sum(len(part.token_ids) for part in output.outputs) for output in self.engine.step()}


if __name__ == "__main__":
    serve(lambda: VLLMHandler(sys.argv[1], json.loads(sys.argv[2])))
