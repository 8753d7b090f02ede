"""KV cache memory of an engine on a GPU: its share of the memory, less what is used and what the largest step needs.

The GPU's memory is simulated; the step is run by a real engine on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.thread_ranks import ranked
from helpers.adapters import save_adapter
from helpers.configs import engine_config
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.marks import slow_but
from helpers.played_copies import PlayedCopies
from helpers.prediction_layers import make_predicting
from helpers.tiny_models import make_model

from windlass.engine.cache import host_tier
from windlass.engine.cache.kv_cache_budget import device_kv_budget
from windlass.engine.core import memory_budget
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.execution.model_runner import ModelRunner
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.model_size import size_model
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.scheduling.scheduler_output import SchedulerOutput
from windlass.kernels import DeviceMemory, backend_selector
from windlass.kernels.backend import Backend, BackendOptions
from windlass.kernels.torch.torch_backend import TorchBackend

pytestmark = ON_A_CPU

MIB = 2**20
ModelOf = Callable[[str], Path]
# The largest step has a long context and is computed row by row, so these sizes are small.
STEPS: dict[str, Any] = {"max_num_seqs": 512, "max_num_batched_tokens": 600, "max_model_len": 1000}


class SimulatedMemory(DeviceMemory):
    """Memory of a GPU of 64 MiB: the engine uses 10, other processes 2, and the peak of a step is 5 more."""

    total, others, own, step = 64 * MIB, 2 * MIB, 10 * MIB, 5 * MIB

    def __init__(self) -> None:
        self.calls: list[str] = []

    def free(self) -> int:
        return self.total - self.others - self.own

    def used_by_process(self) -> int:
        return self.own

    def allocated(self) -> int:
        return self.own + 1

    def peak(self) -> int:
        self.calls.append("peak")
        return self.own + 1 + self.step

    def reset_peak(self) -> None:
        self.calls.append("reset")

    def release_cached(self) -> None:
        self.calls.append("release")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimulatedMemory:
    made = SimulatedMemory()
    monkeypatch.setattr("windlass.kernels.backend.device_memory_of", lambda device: made)
    return made


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the options of a GPU on the CPU."""
    monkeypatch.setattr("windlass.engine.model.loading.preflight.check_device_share", lambda config, device: None)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_model(family, tmp_path_factory.mktemp(family), max_position_embeddings=4096)
        return made[family]

    return get


def assert_cache_bytes(core: EngineCore, available: float) -> None:
    """The cache uses the available bytes up to a block."""
    block = core.info.kv_bytes_per_token * core.info.block_size
    assert available - block < core.info.kv_cache_bytes <= available


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, kv_cache_memory=None, **{**STEPS, **options})


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("share", "mib"), [(None, 64 * 0.9 - 10 - 5), (0.5, 64 * 0.5 - 10 - 5), (1.0, 64 - 2 - 10 - 5)]
)
def test_the_cache_gets_the_memory_left_by_weights_and_steps(
    model_of: ModelOf, memory: SimulatedMemory, share: float | None, mib: float
) -> None:
    core = core_of(model_of("llama"), gpu_memory_utilization=share)
    assert_cache_bytes(core, mib * MIB)
    order = memory.calls
    assert order.index("release") < order.index("reset") < order.index("peak") < len(order) - 1
    assert order[-1] == "release"  # before free memory is counted


@pytest.mark.usefixtures("on_a_gpu", "memory")
def test_workspaces_of_operations_stay_free(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Backend.__init__

    def with_workspace(backend: Backend, options: BackendOptions) -> None:
        real(backend, options)
        backend.workspace_bytes = 3 * MIB

    monkeypatch.setattr(Backend, "__init__", with_workspace)
    assert_cache_bytes(core_of(model_of("llama")), (64 * 0.9 - 10 - 5 - 3) * MIB)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("saves", [False, True])
def test_staging_rows_of_the_tiers_stay_free(
    model_of: ModelOf, memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch, saves: bool, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 4 * MIB)
    monkeypatch.setattr(host_tier, "_OUTGOING_BYTES", 2 * MIB)
    monkeypatch.setattr(Backend, "make_copies", lambda backend: PlayedCopies())
    options: dict[str, Any] = {"kv_host_memory": 4 * MIB} if saves else {"kv_persist": str(tmp_path)}
    core = core_of(model_of("llama"), **options)
    block = core.info.kv_bytes_per_token * core.info.block_size
    assert_cache_bytes(core, (64 * 0.9 - 10 - 5 - 4 - 4 * saves) * MIB - block)
    core.close()


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3", "deepseek_v2"], "gemma3"))
def test_the_profiled_step_leaves_nothing(
    model_of: ModelOf, memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    plans: list[tuple[SchedulerOutput, int]] = []
    execute = ModelRunner.execute

    def watched(self: ModelRunner, plan: SchedulerOutput) -> Any:
        found = execute(self, plan)
        plans.append((plan, len(found)))
        return found

    model = model_of(family)
    expected = run(make_core(model, kv_cache_memory=8 * MIB), [greedy("a", range(5, 30), 6)])["a", 0].token_ids
    monkeypatch.setattr(ModelRunner, "execute", watched)
    core = core_of(model)
    ((plan, results),) = plans
    assert plan.num_tokens == 600 and len(plan.sequences) == results == 512
    assert {item.start + item.num_tokens for item in plan.sequences} == {1000} and plan.sequences[-1].prompt_logprobs
    assert core.runner.positions_computed == 0 and len(core.runner.input_batch) == core.runner.tables.num_live == 0
    assert run(core, [greedy("a", range(5, 30), 6)])["a", 0].token_ids == expected


def test_a_draft_model_is_profiled_too(
    model_of: ModelOf, memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter((3 * MIB, 7 * MIB))
    monkeypatch.setattr(memory, "peak", lambda: memory.allocated() + next(peaks))
    model = model_of("llama")
    core = core_of(model, speculative_model=str(model))
    assert_cache_bytes(core, (64 * 0.9 - 10 - 7) * MIB)
    assert next(peaks, None) is None


def test_an_mtp_layer_needs_three_more_rows_of_states(memory: SimulatedMemory, tmp_path: Path) -> None:
    core = core_of(make_predicting("qwen3_5", tmp_path, max_position_embeddings=4096), speculative_mtp=True)
    available = (64 * 0.9 - 10 - 5) * MIB - 3 * 600 * 64 * 4
    block = 16 * core.info.kv_bytes_per_token
    assert available - block - core.info.state_bytes < core.info.kv_cache_bytes <= available
    assert memory.calls.count("peak") == 1 and len(run(core, [greedy("a", range(5, 30), 6)])["a", 0].token_ids) == 6


def test_pages_of_a_draft_model_are_zeroed(
    model_of: ModelOf, memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of the model need not be, as only written slots are read."""
    pages = Backend.pages
    monkeypatch.setattr(Backend, "pages", lambda self, shape, kind: pages(self, shape, kind).fill_(torch.nan))
    model = model_of("llama")
    core = core_of(model, speculative_model=str(model))
    (own,), (drafted,) = core.runner.cache.planes, core.runner.proposer.cache.planes
    assert all(bool(plane.isnan().all()) for plane in own if plane.numel())
    assert all(not bool(plane.any()) for plane in drafted)


@pytest.mark.slow
def test_memory_for_graphs_with_adapters_stays_free(
    model_of: ModelOf, memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For the model, not for a draft model, which has none."""
    model, asked = model_of("llama"), list[bool]()

    def counted(decoder: Decoder, memory: DeviceMemory, *, adapters: LoadedAdapters | None, **sizes: Any) -> int:
        asked.append(adapters is not None)
        return MIB * len(asked)

    monkeypatch.setattr(memory_budget, "profile_graph_memory", counted)
    sources = (AdapterSource(1, "a", str(save_adapter(tmp_path / "a", model))),)
    for lora in ((), sources):
        asked.clear()
        core = core_of(model, lora=lora, speculative_model=str(model))
        assert asked == [bool(lora), False]
        assert_cache_bytes(core, (64 * 0.9 - 10 - 5 - 3) * MIB)


def test_unwritten_pages_are_finite_for_the_profiled_step(
    model_of: ModelOf, memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a long context that no step computed."""
    pages, execute, steps = Backend.pages, ModelRunner.execute, []
    monkeypatch.setattr(Backend, "pages", lambda self, shape, kind: pages(self, shape, kind).fill_(torch.nan))
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: steps.append(execute(self, plan)) or steps[-1])
    core_of(model_of("llama"))
    ((*results,),) = steps
    assert len(results) == 512 and all(result.error is None for result in results)


def test_an_encoder_is_profiled_with_one_text(
    model_of: ModelOf, memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from helpers.tiny_encoders import make_encoder

    plans: list[SchedulerOutput] = []
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: plans.append(plan) or execute(self, plan))
    core_of(make_encoder("modernbert", tmp_path / "model"), max_num_batched_tokens=100, max_model_len=None)
    ((only,),) = (plan.sequences for plan in plans)
    assert (only.start, only.num_tokens, only.samples) == (0, 100, ())


def test_configured_cache_memory_is_used_without_profiling(model_of: ModelOf, memory: SimulatedMemory) -> None:
    core = make_core(model_of("llama"), kv_cache_memory=3 * MIB, max_num_seqs=512)
    assert 2.9 * MIB < core.info.kv_cache_bytes <= 3 * MIB and memory.calls == []


def refused(model: Path, **options: Any) -> str:
    with pytest.raises(LoadError) as error:
        core_of(model, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_no_memory_for_the_cache_is_refused(
    model_of: ModelOf, memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.own = 54 * MIB
    message = refused(model_of("llama"))
    assert "90% of the 64.0 MiB of cpu may be used, 8.0 MiB are free, this engine has taken 54.0 MiB" in message
    assert "a step needs 5.0 MiB: raise `cache.device_share`, lower `scheduling.max_num_batched_tokens`" in message
    memory.own = 51 * MIB
    assert "does not fit: it needs" in refused(model_of("llama"), max_model_len=4096)

    def fails(self: ModelRunner, plan: SchedulerOutput) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ModelRunner, "execute", fails)
    message = refused(model_of("llama"), max_num_batched_tokens=2048)
    assert (
        message.startswith("a step of 2048 tokens needs more memory than cpu has in addition to ")
        and "11.0 MiB of 64.0" in message
    )


def test_contradicting_memory_options_are_refused(model_of: ModelOf) -> None:
    model = model_of("llama")
    assert "use `cache.memory` on a CPU" in refused(model, gpu_memory_utilization=0.9)
    for share in (0.0, -1.0, 1.01):
        with pytest.raises(LoadError, match=r"`cache\.device_share` must be above 0 and at most 1"):
            engine_config(model, gpu_memory_utilization=share)
    with pytest.raises(LoadError, match="leave one of them out"):
        engine_config(model, gpu_memory_utilization=0.5, kv_cache_memory=1 << 20)
    config = engine_config(model, gpu_memory_utilization=0.5)
    assert prepare_model(config, DeviceCapabilities("cuda", False, free=1 << 30)).compute_dtype == "float32"


def test_model_size_uses_the_device_share(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.engine.model.loading.model_size.expect_device", lambda name: "cuda")
    model = model_of("llama")
    found = [
        size_model(engine_config(model, max_num_seqs=512, gpu_memory_utilization=share), 16 * MIB)
        for share in (None, 0.5)
    ]
    block = found[0].kv_bytes_per_token * found[0].block_size
    for size, share in zip(found, (0.9, 0.5), strict=True):
        assert 0 <= 16 * MIB * share - size.weight_bytes - size.kv_cache_bytes < block + 1


def test_device_kv_budget() -> None:
    gib = 2**30
    assert device_kv_budget(80 * gib, 20 * gib, 58 * gib, 0.9, 2 * gib) == 50 * gib
    assert device_kv_budget(80 * gib, 20 * gib, 30 * gib, 0.9, 2 * gib) == 28 * gib  # other processes use memory
    assert device_kv_budget(80 * gib, 20 * gib, 58 * gib, 0.25, gib) < 0


class OwnGpuBackend(TorchBackend):
    """Each rank has its own GPU, and that of the second rank is smaller."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        if options.ranks is not None:
            self.device_memory = memory = SimulatedMemory()
            memory.total = (64 - 10 * options.ranks.rank) * MIB


@pytest.fixture
def gpus_of_ranks(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backend_selector,
        "_NATIVE_BACKENDS",
        {"cpu": backend_selector._NativeBackend(lambda options: None, OwnGpuBackend, False)},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("gpus_of_ranks")
@pytest.mark.parametrize("heads", [pytest.param(4, marks=pytest.mark.slow), 3])
def test_the_fullest_device_limits_the_cache_of_all_ranks(tmp_path: Path, heads: int) -> None:
    """All run the largest step together; a rank with more key heads needs more memory per token."""
    wide = {"hidden_size": 96, "num_attention_heads": 2 * heads, "num_key_value_heads": heads, "head_dim": 16}
    model = make_model("llama", tmp_path / "model", max_position_embeddings=4096, **wide)
    asked = [greedy("a", range(5, 45), 10)]
    expected = run(make_core(model, kv_cache_memory=8 * MIB), asked)
    with ranked(model, 2, kv_cache_memory=None, **STEPS) as core:
        memory = core.runner.decoder.backend.device_memory
        assert isinstance(memory, SimulatedMemory) and memory.calls.count("peak") == 1
        large, small = ((total * 0.9 - 10 - 5) * MIB for total in (64, 54))
        assert_cache_bytes(core, min(large * heads / (heads // 2), small * heads / (heads - heads // 2)))
        assert run(core, asked)["a", 0].token_ids == expected["a", 0].token_ids


@pytest.mark.slow
@pytest.mark.usefixtures("gpus_of_ranks")
def test_a_rank_without_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", tmp_path / "model", max_position_embeddings=4096, num_key_value_heads=2)
    monkeypatch.setattr(SimulatedMemory, "step", 45 * MIB)  # more than the smaller GPU has free
    refused = pytest.raises(LoadError, match=r"no memory is left for the KV cache: 90% of the 54\.0 MiB")
    with refused, ranked(model, 2, kv_cache_memory=None, **STEPS):
        pass
