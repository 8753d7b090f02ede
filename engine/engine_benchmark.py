"""Engine benchmark: prefill and decode throughput of a batch of random prompts, scheduling and sampling included.

Prompts are distinct and random, so none hits the prefix cache, and a warm-up runs first. Prefill and decode are timed on
separate batches: in one batch, prompts that finish early would decode while others still prefill.
"""

from __future__ import annotations

import contextlib
import random
import resource
import time
from typing import Any

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.model.loading.weights import Progress

DEFAULT_INPUT_LEN = 512


def run_engine_benchmark(
    config: EngineConfig, *, batch_size: int, input_len: int | None, output_len: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Throughput of `batch_size` requests of `input_len` prompt tokens and `output_len` greedy output tokens.

    input_len: None for DEFAULT_INPUT_LEN, or what the context leaves.
    prefill_tokens_per_second: prompt tokens over the time from the first step to the last first token.
    decode_tokens_per_second: tokens of all requests together over the steps in which every request decodes; None when
    output_len < 2, since the first token belongs to the prefill. decode_step_milliseconds: for one token of each request.
    Raises LoadError for lengths that do not fit.
    """
    if min(batch_size, input_len or batch_size) < 1 or output_len < 0:
        raise LoadError("`batch_size` and `input_len` must be at least 1 and `output_len` at least 0")
    most = config.scheduling.max_num_seqs
    if batch_size > most:
        raise LoadError(f"`batch_size={batch_size}` needs `scheduling.max_num_seqs={batch_size}` or more, it is {most}")
    with contextlib.closing(EngineCore(config, progress)) as core:
        return _measure(core, config, batch_size, input_len, output_len, progress)


def _measure(
    core: EngineCore,
    config: EngineConfig,
    batch_size: int,
    input_len: int | None,
    output_len: int,
    progress: Progress | None,
) -> dict[str, Any]:
    context = core.info.max_model_len
    if input_len is None:
        input_len = max(1, min(DEFAULT_INPUT_LEN, context - max(output_len, 1)))
    if input_len + max(output_len, 1) > context:
        raise LoadError(
            f"`input_len={input_len}` and `output_len={output_len}` exceed the context of {context} tokens: lower one of them"
        )
    rng = random.Random(config.loading.seed)

    def start(name: str, count: int, length: int, max_tokens: int) -> list[str]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        ids = [f"{name}-{i}" for i in range(count)]
        for request_id in ids:
            prompt = [rng.randrange(core.info.vocab_size) for _ in range(length)]
            core.add(EngineRequest(request_id, prompt, sampling))
        return ids

    report = progress or (lambda stage, done, total: None)
    start("warm-up", min(batch_size, 2), min(input_len, 64), min(4, context - min(input_len, 64)))
    while core.has_work():
        core.step()

    start("prefill", batch_size, input_len, min(output_len, 1))
    finished, begin = 0, time.perf_counter()
    while core.has_work():
        finished += sum(output.finish_reason is not None for output in core.step())
        report("prefill", finished, batch_size)
    prefill_seconds = time.perf_counter() - begin

    decode_steps, decode_tokens, decode_seconds = 0, 0, 0.0
    if output_len > 1:
        # No request may finish before all have decoded their share, so each may run to the end of the context.
        ids = start("decode", batch_size, input_len, context - input_len)
        waiting = set(ids)
        while waiting:
            waiting -= {output.request_id for output in core.step() if output.token_ids}
            report("filling the cache for decode", batch_size - len(waiting), batch_size)
        wanted = output_len - 1
        while decode_tokens < wanted * batch_size:
            begin = time.perf_counter()
            outputs = core.step()
            decode_seconds += time.perf_counter() - begin
            if sum(bool(output.token_ids) for output in outputs) != batch_size:
                raise LoadError(
                    "the batch does not fit the KV cache at once: raise `cache.memory` or lower `batch_size`"
                )
            decode_steps += 1
            # Several tokens each with multi-step or speculative decoding.
            decode_tokens += sum(len(output.token_ids) for output in outputs)
            report("decode", min(decode_tokens // batch_size, wanted), wanted)
            if any(output.finish_reason is not None for output in outputs):
                break  # the end of the context, which speculation may reach sooner
        for request_id in ids:
            core.abort(request_id)
    stats = core.stats()
    return {
        "model": config.model,
        "prefill_tokens_per_second": batch_size * input_len / prefill_seconds,
        "decode_tokens_per_second": decode_tokens / decode_seconds if decode_tokens else None,
        "decode_step_milliseconds": 1000 * decode_seconds * batch_size / decode_tokens if decode_tokens else None,
        "decode_steps": decode_steps,
        "prefill_seconds": prefill_seconds,
        "load_seconds": core.info.load_seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "settings": {
            "batch_size": batch_size,
            "input_len": input_len,
            "output_len": output_len,
            "resolved_dtype": core.info.dtype,
            "resolved_device": core.info.device,
            "resolved_quantization": core.info.quantization,
            "num_parameters": core.info.num_parameters,
            "rope_scaling": {g.name: g.scaling.to_dict() for g in core.info.rotary_groups},
        },
    }
