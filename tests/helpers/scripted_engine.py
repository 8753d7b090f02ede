"""EngineClient without an engine: generates scripted tokens at a scripted speed, and records requests.

Sample i of a request yields `reply[j % len(reply)]` as its j-th token, for any prompt. Log-probabilities are a
function of the token: of each pair (2k, 2k + 1) the even one is more likely.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from windlass.engine.errors import DeadlineError, EngineDeadError
from windlass.engine.interface.context import ContextReport
from windlass.engine.interface.introspection import (
    A,
    AttentionQuery,
    AttentionSnapshot,
    CacheGroupSnapshot,
    CacheQuery,
    CacheSequenceSnapshot,
    CacheSnapshot,
    IntrospectionQuery,
)
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, PooledRows, RequestOutput, TokenLogprobs
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup
from windlass.engine.rotary.rotary_policy import RotaryReport

LIKELY, UNLIKELY = -0.25, -1.5
ROTARY = (RotaryGroup("full_attention", RotaryBase(10000.0, 16, 16, 128), RopeScaling()),)


def logprobs_of(token_id: int, top: int) -> TokenLogprobs:
    """Return the log-probabilities at a position of `token_id`."""
    even = token_id - token_id % 2
    others = [(even, LIKELY), (even + 1, UNLIKELY)]
    others += [((even + 2 + i) % 400, -3.0 - i) for i in range(max(0, top - 2))]
    rank = 1 + token_id % 2
    return TokenLogprobs(token_id, LIKELY if rank == 1 else UNLIKELY, rank, tuple(others[:top]))


def pooled_rows(request: EngineRequest, classes: int | None = None) -> PooledRows:
    """Return rows: a token (the last one for the entire prompt), then 1, 2, …. For `classify` minus the number of tokens etc.

    For `answer` it is only the first value.
    """
    rule, ids = request.pooling, request.prompt_token_ids
    assert rule is not None
    widths = {"classify": classes or 0, "answer": 1}
    width = widths.get(rule.kind, min(rule.dimensions or 8, 8))
    first = [-len(ids)] if rule.kind in widths else ids if rule.kind == "all" else ids[-1:]
    values = [value for token in first for value in (token, *range(1, width))]
    return PooledRows(struct.pack(f"<{len(values)}f", *values), width)


def model_info(**fields: object) -> ModelInfo:
    """Return a small model with the 423 tokens of the toy byte-level tokenizer and a context of 256."""
    defaults: dict[str, object] = {
        "path": "/models/toy",
        "architecture": "ToyForCausalLM",
        "vocab_size": 423,
        "max_model_len": 256,
        "trained_len": 128,
        "dtype": "float32",
        "weight_dtype": "float32",
        "kv_cache_dtype": "float32",
        "quantization": None,
        "device": "cpu",
        "num_parameters": 1000,
        "num_layers": 2,
        "block_size": 16,
        "num_kv_blocks": (64,),
        "kv_cache_bytes": 1 << 20,
        "kv_bytes_per_token": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "eos_token_ids": (421,),
        "rotary_groups": ROTARY,
        "model_rotary_groups": ROTARY,
        "weight_bytes": 4000,
        "load_seconds": 0.1,
        "hidden_size": 8,
    }
    chosen = {**defaults, **fields}
    return ModelInfo(**{"shift_context": chosen["max_model_len"], **chosen})  # type: ignore[arg-type]


@dataclass
class ScriptedEngine:
    """See the module. refuse, fail_after: raise errors. delay: seconds before each token. first_delay: before the first.

    held: while True, no request receives its first token, only the progress of its cached tokens. made: number of outputs
    taken, of all requests.
    """

    reply: list[int] = field(default_factory=lambda: [65, 66, 67])
    answer: Callable[[EngineRequest], list[int]] | None = None  # the tokens before the EOS id, instead of `reply`
    delay: float = 0.0
    first_delay: float = 0.0
    held: bool = False
    tokens_per_output: int = 1
    eos_after: int | None = None  # number of tokens before the EOS id
    cached_tokens: int = 0
    refuse: Callable[[EngineRequest], Exception | None] = lambda request: None
    fail_after: tuple[int, Exception] | None = None
    ignore_deadline: bool = False
    report: Callable[[EngineRequest], RotaryReport | None] = lambda request: None  # on the last output of each sample
    context: ContextReport | None = None  # on the last output of each sample

    info: ModelInfo | None = field(default_factory=model_info)
    state: str = "ready"
    restarts: int = 0
    engine_stats: EngineStats = field(default_factory=EngineStats)

    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    aborted_at: list[float] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)  # adapters
    attention: list[AttentionQuery] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    made: int = 0

    name, has_replicas, crash_report, adapter_ids = "", False, None, None

    @property
    def engines(self) -> tuple[ScriptedEngine, ...]:
        return (self,)

    def reset(self) -> None:
        """Restore the defaults and clear the records."""
        self.__init__()  # type: ignore[misc]

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        return AdapterInfo(source.adapter_id, source.name, source.path, 8, ("q_proj",), 4096, "d")

    def drop_adapter(self, adapter_id: int) -> None:
        self.dropped.append(adapter_id)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        if self.state != "ready":
            raise EngineDeadError("the engine is being restarted; try again soon")
        if (error := self.refuse(request)) is not None:
            raise error
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        finished = False
        try:
            await asyncio.sleep(self.first_delay)
            if request.reports_progress:
                yield self._progress(request, self.cached_tokens)
            while self.held:
                await asyncio.sleep(0.005)
            async for output in self._outputs(request):
                yield output
                self.made += 1
            finished = True
        finally:
            self.running -= 1
            if not finished:
                self.aborted.append(request.request_id)
                self.aborted_at.append(time.monotonic())

    def _progress(self, request: EngineRequest, computed: int) -> RequestOutput:
        return RequestOutput(request.request_id, cached_tokens=self.cached_tokens, prompt_computed=computed)

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        sampling = request.sampling
        if request.pooling is not None:
            await asyncio.sleep(self.delay)
            classes = None if self.info is None or self.info.classifier is None else len(self.info.classifier.labels)
            yield RequestOutput(request.request_id, finish_reason="length", pooled=pooled_rows(request, classes))
            return
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None:
            rest = [logprobs_of(token, sampling.prompt_logprobs) for token in request.prompt_token_ids[1:]]
            prompt_logprobs = (None, *rest)
        live = list(range(sampling.n))
        reply, eos_after = self.reply, self.eos_after
        if self.answer is not None:
            reply = self.answer(request)
            eos_after = len(reply)
        if request.reports_progress:
            await asyncio.sleep(self.delay)
            yield self._progress(request, len(request.prompt_token_ids))
        made = 0
        while live:
            if self.delay:
                await asyncio.sleep(self.delay)
            if request.deadline is not None and time.monotonic() > request.deadline and not self.ignore_deadline:
                raise DeadlineError("the request's deadline passed")
            if self.fail_after is not None and made >= self.fail_after[0]:
                raise self.fail_after[1]
            count = min(self.tokens_per_output, sampling.max_tokens - made)
            tokens = [reply[(made + i) % len(reply)] for i in range(count)]
            stop_id = None
            for position, token in enumerate(tokens):
                index = made + position
                if eos_after is not None and index >= eos_after and not sampling.ignore_eos:
                    token = tokens[position] = self.info.eos_token_ids[0] if self.info else 0
                    stop_id = token
                if token in sampling.stop_token_ids and index >= sampling.min_tokens:
                    stop_id = token
                if stop_id is not None:
                    tokens = tokens[: position + 1]
                    break
            made += len(tokens)
            reason = "stop" if stop_id is not None else "length" if made >= sampling.max_tokens else None
            live = [index for index in live if (request.request_id, index) not in self.ended]
            for index in list(live):
                yield RequestOutput(
                    request.request_id,
                    index,
                    tuple(tokens),
                    None if sampling.logprobs is None else tuple(logprobs_of(t, sampling.logprobs) for t in tokens),
                    prompt_logprobs if index == 0 else None,
                    reason,  # type: ignore[arg-type]
                    stop_id,
                    self.cached_tokens,
                    None if reason is None else self.report(request),
                    None if reason is None else self.context,
                )
                if reason is not None:
                    live.remove(index)
            prompt_logprobs = None
            if not self.delay:
                await asyncio.sleep(0)

    def end_sample(self, request_id: str, index: int) -> None:
        self.ended.append((request_id, index))

    async def inspect(self, question: IntrospectionQuery[A]) -> A:
        """Return one group of 4 cells for the cache, and equal attention weights with scores of minus the distance."""
        if isinstance(question, CacheQuery):
            group = CacheGroupSnapshot(64, 4, 1, None, (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, -1, -1))
            return CacheSnapshot(16, (group,), (CacheSequenceSnapshot(20, 18, 16, 2, 0, 0),))  # type: ignore[return-value]
        assert isinstance(question, AttentionQuery)
        self.attention.append(question)
        count = len(question.token_ids)
        weights = [1 / (i + 1) if j <= i else 0.0 for i in range(count) for j in range(count)]
        scores = [float(j - i) if j <= i else -math.inf for i in range(count) for j in range(count)]
        both = [struct.pack(f"{count * count}f", *values) for values in (weights, scores)]
        return AttentionSnapshot(count, 2, 4, *both, "f")  # type: ignore[return-value]

    async def stats(self) -> EngineStats:
        if self.state != "ready":
            raise EngineDeadError("there is no engine")
        return self.engine_stats

    async def close(self) -> None:
        self.state = "closed"
