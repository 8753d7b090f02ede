"""Run of an EngineCore to completion, with the logits of every sampled row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.cache_invariants import assert_balanced
from helpers.configs import engine_config
from helpers.device import DEVICE, DTYPE

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rope_scaling import RotarySpec


@dataclass
class Finished:
    """All output of one sample of a request."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # [V] each, one per token

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason


def make_core(directory: Path, **options: Any) -> EngineCore:
    defaults: dict[str, Any] = {
        "kv_cache_memory": 8 << 20,
        "max_num_seqs": 8,
        "device": DEVICE,
        "dtype": DTYPE,
        "target_step_seconds": 0.0,
        "burst_seconds": 0.0,
    }
    return EngineCore(engine_config(directory, **{**defaults, **options}))


def greedy(request_id: str, prompt: Iterable[int], max_tokens: int = 8, **fields: Any) -> EngineRequest:
    sampling = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__slots__}
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling})
    return EngineRequest(request_id, list(prompt), params, **fields)


def specs_of(core: EngineCore, request: EngineRequest) -> tuple[RotarySpec, ...]:
    """Return the rotary specs of the request's prompt, one per rotary group."""
    return core.plan_rotation(request).stage(len(request.prompt_token_ids)).specs


def run(
    core: EngineCore, requests: Iterable[EngineRequest], max_steps: int = 5000, *, every_logit: bool = True
) -> dict[tuple[str, int], Finished]:
    """Add every request, step until idle, check the cache invariants, and return the results by (id, sample).

    every_logit: every token must be sampled by the sampler. Otherwise logits are recorded only while it is used.
    """
    for request in requests:
        core.add(request)
    finished: dict[tuple[str, int], Finished] = {}
    original = core.runner.sampler.sample
    recorded: dict[tuple[int, int], torch.Tensor] = {}
    ids: dict[int, tuple[str, int]] = {}

    def record(logits: torch.Tensor, slots: Any, *args: Any, **kwargs: Any) -> Any:
        live = {sequence.seq_id: sequence for sequence in core.scheduler.live_sequences()}
        for row, slot in slots:
            recorded[slot.seq_id, len(slot.token_ids) - slot.num_prompt_tokens] = logits[row].clone().cpu()
            ids[slot.seq_id] = (live[slot.seq_id].request.request_id, slot.index)
        return original(logits, slots, *args, **kwargs)

    core.runner.sampler.sample = record  # type: ignore[method-assign]
    try:
        for _ in range(max_steps):
            if not core.has_work():
                break
            for output in core.step():
                entry = finished.setdefault((output.request_id, output.index), Finished())
                entry.token_ids += output.token_ids
                entry.outputs.append(output)
        else:
            raise AssertionError(f"not idle after {max_steps} steps")
    finally:
        core.runner.sampler.sample = original  # type: ignore[method-assign]
    for (seq_id, position), logits in sorted(recorded.items()):
        entry = finished[ids[seq_id]]
        assert position == len(entry.logits) or not every_logit
        if position == len(entry.logits):
            entry.logits.append(logits)
    assert_balanced(core.blocks)
    return finished
