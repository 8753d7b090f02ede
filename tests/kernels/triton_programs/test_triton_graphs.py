"""Decode steps on Triton programs, captured and replayed by a simulated device.

Launches are captured with their operands, as by CUDA, and programs are interpreted at each replay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import save_adapter
from helpers.engines import greedy, make_core, run
from helpers.every_request import same
from helpers.played_graphs import PlayedGraphs, opaque
from helpers.tiny_models import make_model
from helpers.tiny_unrotated import make_unrotated
from kernels_helpers.interpreted import PLAYED
from torch import Tensor

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.cuda_graphs import DecodeGraphs, GraphKey
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.model_info import AdapterSource
from windlass.kernels import Filters, Graphs, Penalties, SamplingTensors, backend_selector, encode_filters
from windlass.kernels.triton import launch, triton_sampler
from windlass.kernels.triton.triton_backend import TritonBackend

pytestmark = PLAYED
PROMPT = torch.randint(3, 128, (7,), generator=torch.Generator().manual_seed(0)).tolist()


class _TritonGraphs(PlayedGraphs):
    def sample_rows(
        self, logits: Tensor, maxima: tuple[Tensor, Tensor], draws: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        return triton_sampler.sample_rows(logits, maxima, draws)


class _Played(TritonBackend):
    def make_graph_runner(self) -> Graphs | None:
        return _TritonGraphs()


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    own = backend_selector._NativeBackend(lambda options: None, _Played, narrow=False)
    monkeypatch.setattr(backend_selector, "_NATIVE_BACKENDS", {"cpu": own})
    started = launch.launch

    def captured(kernel: Any, grid: tuple[int, ...], on: Any, *operands: Any, **sizes: Any) -> None:
        opaque(lambda: started(kernel, grid, on, *operands, **sizes))

    for name, module in list(sys.modules.items()):
        if name.startswith("windlass.kernels.triton.") and getattr(module, "launch", None) is started:
            monkeypatch.setattr(module, "launch", captured)


def captures(core: EngineCore, sizes: list[int]) -> DecodeGraphs:
    graphs = core.runner.graphs
    assert graphs is not None
    graphs.capture(sizes)
    assert graphs.obstacle is None and graphs.captured == sorted(sizes)
    return graphs


@pytest.mark.slow
def test_graphs_do_not_change_tokens(tmp_path: Path) -> None:
    """One row of two is padding. Tokens are greedy and sampled with filters, across the end of a block."""
    directory = make_model("llama", tmp_path / "m", num_hidden_layers=1)
    for drawn in ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3, "ignore_eos": True}):
        sent = [greedy("a", PROMPT * 2, 5, **drawn)]
        options: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 2}
        want = run(make_core(directory, cuda_graphs=False, **options), sent)
        core = make_core(directory, **options)
        graphs = captures(core, [2])
        got = run(core, sent, every_logit=False)
        assert got["a", 0].token_ids == want["a", 0].token_ids
        assert graphs.num_replayed == 4


@pytest.mark.slow
def test_graphs_do_not_change_key_ranges(tmp_path: Path) -> None:
    """A context that shifts, a window with sinks, and a plain sequence that ends: one row of four is padding."""
    directory = make_model("llama", tmp_path / "m", num_hidden_layers=1)
    sent = [
        greedy("shift", PROMPT * 6, 10, context=ContextRule("shift", keep_tokens=16), logprobs=1),
        greedy("sinks", PROMPT * 2, 6, context=ContextRule(attention_window=8, attention_sinks=2), logprobs=1),
        greedy("plain", PROMPT, 4, logprobs=1),
    ]
    options: dict[str, Any] = {"max_model_len": 64, "shift_context": 48, "max_num_seqs": 4}
    want = run(make_core(directory, cuda_graphs=False, **options), sent)
    core = make_core(directory, **options)
    graphs = captures(core, [4])
    same(run(core, sent, every_logit=False), want, 1e-5)
    assert graphs.lazy_graphs.captured == [GraphKey(4, 2)] and graphs.num_replayed >= 7


@pytest.mark.slow
def test_graphs_do_not_change_adapters(tmp_path: Path) -> None:
    """Capture before any adapter is loaded, use two at once, and then replace the first one."""
    directory = make_model("llama", tmp_path / "m", num_hidden_layers=1)
    sources = [
        AdapterSource(i, f"{i}", str(save_adapter(tmp_path / f"{i}", directory, rank=5 * i, seed=i, strength=0.3)))
        for i in (1, 2, 3)
    ]
    options: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 2, "max_loras": 2}
    plain, core = make_core(directory, cuda_graphs=False, **options), make_core(directory, **options)
    graphs, found = captures(core, [2]), list[list[int]]()
    graphs.lazy_graphs.capture(GraphKey(2, adapted=True))
    for own in ((sources[0], sources[1]), (sources[2], sources[1])):
        for one in (plain, core):
            held = {info.adapter_id for info in one.adapters.loaded.infos}
            for adapter_id in held - {source.adapter_id for source in own}:
                one.drop_adapter(adapter_id)
            for source in own:
                if source.adapter_id not in held:
                    one.add_adapter(one.read_adapter(source).result(30))
        sent = [
            greedy(f"{source.name}", PROMPT[i:], 5 - i, adapter=source.adapter_id, logprobs=1)
            for i, source in enumerate(own)
        ]
        got = run(core, sent, every_logit=False)
        same(got, run(plain, sent), 1e-5)
        found += [one.token_ids for one in got.values()]
    assert graphs.num_replayed == 8 and graphs.lazy_graphs.captured == [GraphKey(2, adapted=True)]
    assert found[0] != found[2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite4_h_experts", "falcon_h1"])
def test_graphs_do_not_change_states(family: str, tmp_path: Path) -> None:
    """A stream crosses the end of a block, where its state is stored during the next step, and another continues from that
    state. Padding rows reach experts too."""
    directory = make_model(family, tmp_path / "m")
    options: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2}
    plain, core = make_core(directory, cuda_graphs=False, **options), make_core(directory, **options)
    graphs = captures(core, [2])
    first = [greedy("a", PROMPT * 2, 5, logprobs=1)]
    want = run(plain, first)
    same(run(core, first, every_logit=False), want, 1e-5)
    then = [greedy("b", [*PROMPT * 2, *want["a", 0].token_ids[:4], 9], 2, logprobs=1)]
    got = run(core, then, every_logit=False)
    same(got, run(plain, then), 1e-5)
    assert got["b", 0].outputs[-1].cached_tokens == 16 and graphs.num_replayed == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {}),
        ("gemma4_26b", {}),
        ("gemma4_e2b", {}),
        ("gpt_oss", {}),
        ("qwen2_moe", {"quantization": "int8", "activations": "float32"}),
        ("deepseek_v2", {}),
        ("bloom", {}),
        ("llama", {"quantization": "int4", "activations": "float32", "kv_cache_dtype": "int8"}),
    ],
)
def test_every_kind_of_layer_can_be_captured(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    make = make_unrotated if family == "bloom" else make_model
    core = make_core(make(family, tmp_path / "m"), max_model_len=32, max_num_seqs=1, **options)
    graphs = captures(core, [1])
    graphs.lazy_graphs.capture(GraphKey(1, 2))
    assert graphs.lazy_graphs.obstacle is None


def test_rows_draw_the_same_as_the_sampler() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 300, generator=generator)
    logits[4, 7] = float("nan")
    filters = [
        Filters(),
        Filters(temperature=0.0),
        Filters(temperature=0.7, top_k=5),
        Filters(top_p=0.6),
        Filters(),
        Filters(temperature=2.0, min_p=0.2),
    ]
    token_sampler = triton_sampler.TritonSampler()
    draws = [token_sampler.new(one, Penalties()) for one in filters]
    for row, one in enumerate(draws):
        one.row, one.uniform = row, 0.17 * (row + 1) % 1
    token_sampler.sample(logits, draws)
    numbers = torch.tensor([encode_filters(one, 300) for one in filters], dtype=torch.float64)
    tensors = SamplingTensors(
        numbers[:, 0].float(),
        numbers[:, 1].int(),
        numbers[:, 2].int(),
        numbers[:, 3].contiguous(),
        torch.tensor([one.uniform for one in draws], dtype=torch.float64),
    )
    tokens, statuses = triton_sampler.sample_rows(logits, triton_sampler.row_maxima(logits), tensors)
    assert tokens.tolist() == [one.token for one in draws]
    assert statuses.tolist() == [one.status for one in draws] and statuses[4] == 1
