"""An engine with random weights on a device: time of streams, prompts, mixed scalings and shifts, with bounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from harness.gpu_figures import Bounds, Figure, wait

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.config.option_names import from_flat

_GREEDY = {"temperature": 0.0}
_SHIFTS = 9


class _GraphClock:
    """Seconds that captured work had the device, by events around each."""

    def __init__(self, core: EngineCore) -> None:
        self._spans: list[tuple[Any, Any]] = []
        graphs = core.runner.graphs
        assert graphs is not None
        for size, captured in graphs._captured.items():
            graphs._captured[size] = captured._replace(replay=self._timed(captured.replay))

    def _timed(self, replay: Any) -> Any:
        def timed() -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            self._spans.append((begin, end))

        return timed

    def take(self) -> list[float]:
        """Those since the last time."""
        spans, self._spans = self._spans, []
        return [begin.elapsed_time(end) / 1e3 for begin, end in spans]


class Streams:
    """options: flat names of the engine's configuration."""

    def __init__(self, model: Path, bounds: Bounds, **options: Any) -> None:
        given = {"device": str(bounds.device), "load_format": "dummy", "prefix_caching": False, **options}
        self.core, self.bounds = EngineCore(from_flat(str(model), given)), bounds
        self.core.warm_up()
        self._rng, self._count = random.Random(0), 0

    def add(self, length: int, tokens: int, **fields: Any) -> str:
        """A stream, greedy unless `draw` is set, behind a prompt of random tokens; its id."""
        request = self._request(length, tokens, **fields)
        self.core.add(request)
        return request.request_id

    def _request(self, length: int, tokens: int, *, draw: Mapping[str, Any] = _GREEDY, **fields: Any) -> EngineRequest:
        self._count += 1
        prompt = [self._rng.randrange(10, self.core.info.vocab_size) for _ in range(length)]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **draw)
        return EngineRequest(str(self._count), prompt, sampling, **fields)

    def decode(self, each: list[dict[str, Any]], prompt: int, steps: int) -> float:
        """Seconds in which each of the streams gets a token. each: fields of their requests, `draw` how they draw."""
        ids = [self.add(prompt, steps + 64, **fields) for fields in each]
        try:
            waiting = set(ids)
            while waiting:
                waiting -= self._step()[1]
            for _ in range(4):  # how long steps take is learnt
                self._step()
            tokens, begin = 0, time.perf_counter()
            while tokens < steps * len(ids):
                tokens += self._step()[0]
            seconds = time.perf_counter() - begin
        finally:
            self._end(ids)  # a failure leaves no streams behind
        return seconds * len(ids) / tokens

    def prefill(self, length: int) -> float:
        """Seconds until the first token, the least of three prompts."""
        found = []
        for _ in range(3):
            request = self._request(length, 1)
            wait(self.bounds.device)
            begin = time.perf_counter()
            self.core.add(request)
            while self.core.has_work():
                self._step()
            found.append(time.perf_counter() - begin)
        return min(found)

    def shift(self, steps: int) -> tuple[float, float]:
        """Seconds that a full context takes beyond steps where it drops its oldest block, and what those take: medians.

        Of the step in which it is booked and the next one, as it may be planned a step ahead. For an engine that takes a step for
        each token.
        """
        capacity, counters = self.core.info.shift_context, self.core.scheduler.counters
        one = self.add(capacity - 8, steps + 1024 + 16 * _SHIFTS, context=ContextRule(overflow="shift"))
        begun = counters.context_shifts
        while counters.context_shifts < begun + 2:  # programs are compiled at the first one
            self._step()
        taken, booked = list[float](), list[int]()
        while len(taken) < steps or len(booked) < _SHIFTS or booked[-1] + 1 == len(taken):
            before, begin = counters.context_shifts, time.perf_counter()
            self._step()
            if counters.context_shifts > before:
                booked.append(len(taken))
            taken.append(time.perf_counter() - begin)
        self._end([one])
        usual = statistics.median(taken)
        return statistics.median([taken[place] + taken[place + 1] for place in booked]) - 2 * usual, usual

    def beyond_graphs(self, prompt: int, steps: int) -> float | None:
        """Seconds of a step that the device is not at its graph; None where there are none."""
        if self.core.runner.graphs is None or self.bounds.device.type != "cuda":
            return None
        clock = _GraphClock(self.core)
        whole = self.decode([{}], prompt, steps)
        wait(self.bounds.device)
        return whole - statistics.median(clock.take())

    def bytes_of_step(self, streams: int, context: int) -> float:
        """That it reads: weights, experts as far as these streams are likely to choose them, keys and values."""
        core = self.core
        spec = core.runner.decoder.spec
        weights = core.runner.decoder.weights()
        read = 0.0
        for name, weight in weights.items():
            share = 1.0
            if name == "embedding" and "head" in weights:
                share = 0.0
            if ".experts." in name:
                layer = spec.layers[int(name.split(".")[1])].feed_forward
                count, chosen = layer.experts, layer.router.top_k  # type: ignore[union-attr]
                share = 1 - (1 - chosen / count) ** streams
            read += share * weight.nbytes
        return read + streams * context * core.info.kv_bytes_per_token

    def operations_of_prompt(self, length: int) -> float:
        """Of all products of its tokens, the head's for the last one alone, and of attention."""
        core, weights, parameters = self.core, self.core.runner.decoder.weights(), 0.0
        spec = core.runner.decoder.spec
        for name, weight in weights.items():
            if name in ("embedding", "head"):
                continue
            share = 1.0
            if ".experts." in name:
                layer = spec.layers[int(name.split(".")[1])].feed_forward
                share = layer.router.top_k / layer.experts  # type: ignore[union-attr]
            parameters += share * weight.numel()
        pairs = length * (length + 1) / 2
        attention = sum(4 * x.mixer.num_heads * x.mixer.head_dim * pairs for x in spec.layers)  # type: ignore[union-attr]
        return 2 * parameters * length + attention

    def _step(self) -> tuple[int, set[str]]:
        outputs = self.core.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return sum(len(x.token_ids) for x in outputs), {x.request_id for x in outputs if x.token_ids}

    def _end(self, ids: list[str]) -> None:
        for one in ids:
            self.core.abort(one)
        while self.core.has_work():
            self._step()


def stream_figures(
    name: str, streams: Streams, wanted: float | None, *, many: int, prompt: int, far: int, steps: int
) -> Iterator[Figure]:
    """Of a shape: one stream, one over a long context, many, a prompt, mixed scalings."""
    bounds = streams.bounds
    for count, length, least in ((1, prompt, wanted), (1, far, wanted), (many, prompt, None)):
        seconds = streams.decode([{}] * count, length, steps)
        bound = streams.bytes_of_step(count, length + steps // 2) / bounds.bandwidth
        yield Figure(f"{name}: {count} stream(s) behind {length:,} tokens, a token", seconds, bound, least)
    seconds = streams.prefill(far)
    bound = streams.operations_of_prompt(far) / bounds.matrix
    yield Figure(f"{name}: a prompt of {far:,} tokens", seconds, bound, 0.55)
    scalings: list[dict[str, Any]] = [
        {"rope_scaling": RopeScaling.from_dict({"rope_type": "linear", "factor": 1.0 + i / 4})} for i in range(8)
    ]
    same, mixed = (streams.decode(each, prompt, steps) for each in (scalings[1:2] * 8, scalings))
    yield Figure(f"{name}: 8 scalings mixed, over one for all", mixed / same, wanted=1.02, plain=True)
    for draw in (
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
        {"temperature": 0.8, "top_p": 0.95},
    ):
        seconds = streams.decode([{"draw": draw}], prompt, steps)
        drawn = ", ".join(f"{key} {value:g}" for key, value in draw.items())
        yield Figure(f"{name}: 1 stream behind {prompt:,} tokens, drawn with {drawn}, a token", seconds)


def step_figures(name: str, streams: Streams, *, prompt: int, steps: int) -> Iterator[Figure]:
    """Figures of an engine with one step per token: the time outside the graph, and the cost of a context shift."""
    beyond = streams.beyond_graphs(prompt, steps)
    note = "" if beyond is not None else "no graphs on this device"
    yield Figure(f"{name}: a step beyond its graph", beyond, wanted=150e-6, note=note)
    shift, shifted = streams.shift(steps)
    bound = streams.bytes_of_step(1, streams.core.info.shift_context) / streams.bounds.bandwidth
    yield Figure(f"{name}: a shift, beyond a step", shift, wanted=1e-3)
    yield Figure(f"{name}: 1 stream whose context was shifted, a token", shifted, bound)


def growth(streams: Streams, count: int, length: int, steps: int) -> dict[str, Any]:
    """Seconds per token and their bound, for `count` streams with contexts of `length` tokens."""
    seconds = streams.decode([{}] * count, length, steps)
    bound = streams.bytes_of_step(count, length + steps // 2) / streams.bounds.bandwidth
    return {"streams": count, "context": length, "seconds": seconds, "bound": bound}


def seconds_of_token(model: Path, bounds: Bounds, prompt: int, steps: int) -> float:
    """Seconds per token of one greedy stream in transformers with a compiled static cache and random weights.

    Computed from the difference of two runs. Raises ImportError without transformers.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device(bounds.device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=bounds.dtype).eval()
    ids = torch.randint(10, config.vocab_size, (1, prompt), device=bounds.device)

    def run(tokens: int) -> float:
        wait(bounds.device)
        begin = time.perf_counter()
        made.generate(
            ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, cache_implementation="static",
            attention_mask=torch.ones_like(ids), pad_token_id=0,
        )  # fmt: skip
        wait(bounds.device)
        return time.perf_counter() - begin

    run(4 + steps)  # compiles
    few, many = (min(run(tokens) for _ in range(3)) for tokens in (4, 4 + steps))
    return max(many - few, 1e-9) / steps
