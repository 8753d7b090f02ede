"""A step under many rotary scalings calls the same kernels, and as often, as a step under one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.device import DEVICE
from helpers.engines import greedy, make_core
from helpers.tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.kernels import Backend, select_backend

KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "ntk", "factor": 3.0},
    {"rope_type": "ntk", "factor": 5.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "default", "rope_theta": 77_000.0},
]


class CountOperations(TorchDispatchMode):
    """Counts every torch operation by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step_calls(core: EngineCore, calls: Counter[str]) -> tuple[Counter[str], Counter[str]]:
    calls.clear()
    with CountOperations() as operations:
        core.step()
    return Counter(calls), operations.counts


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_eight_scalings_take_no_more_calls(
    family: str, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    backend = type(select_backend(DEVICE, deterministic=deterministic))
    for name, operation in vars(Backend).items():
        if name.startswith("_") or not callable(operation):
            continue
        original = getattr(backend, name)

        def counting(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(backend, name, counting)
    directory = make_model(family, tmp_path)
    found = []
    for kinds in ([KINDS[3]] * 8, KINDS):
        core = make_core(directory, deterministic=deterministic)
        for i, kind in enumerate(kinds):
            core.add(greedy(str(i), range(3 + i, 23 + i), 8, rope_scaling=RopeScaling.from_dict(kind)))
        prefill, decode = step_calls(core, calls), step_calls(core, calls)
        assert core.stats().rotary_specs_live == len({str(kind) for kind in kinds})
        assert core.stats().generation_tokens == 16  # the second step decodes every sequence
        found.append((prefill[0], decode))  # at admission each new scaling is written to the tables
    assert found[0] == found[1]
    decode = found[1][1]
    layers = len(core.runner.decoder.layers)
    assert decode[0]["rotate_and_append"] == decode[0]["paged_attention"] == layers
    if DEVICE == "cpu":
        assert decode[0]["rotary_angles"] == 0  # one call fills all rows, allocated once
        assert decode[0]["linear"] == 4 * layers + 1
    assert sum(decode[1].values()) > layers
