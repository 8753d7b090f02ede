"""The cache of an engine on a GPU: its share of the memory, less what is taken and what the largest step needs.

The GPU's memory is played; the step is run by a real engine on a CPU.
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
# What steps are given here: the largest sees a long context and is run, row by row, before anything is served.
STEPS: dict[str, Any] = {"max_num_seqs": 512, "max_num_batched_tokens": 600, "max_model_len": 1000}


class PlayedMemory(DeviceMemory):
    """Of a GPU of 64 MiB; the engine has taken 10, others 2, and 5 are more at the peak of what is watched."""

    total, others, own, step = 64 * MIB, 2 * MIB, 10 * MIB, 5 * MIB

    def __init__(self) -> None:
        self.said: list[str] = []

    def free(self) -> int:
        return self.total - self.others - self.own

    def used_by_process(self) -> int:
        return self.own

    def allocated(self) -> int:
        return self.own + 1

    def peak(self) -> int:
        self.said.append("peak")
        return self.own + 1 + self.step

    def reset_peak(self) -> None:
        self.said.append("forget")

    def release_cached(self) -> None:
        self.said.append("give back")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> PlayedMemory:
    made = PlayedMemory()
    monkeypatch.setattr("windlass.kernels.backend.device_memory_of", lambda device: made)
    return made


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for one where options are checked."""
    monkeypatch.setattr("windlass.engine.model.loading.preflight.check_device_share", lambda config, device: None)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_model(family, tmp_path_factory.mktemp(family), max_position_embeddings=4096)
        return made[family]

    return get


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, kv_cache_memory=None, **{**STEPS, **options})


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("share", "mib"), [(None, 64 * 0.9 - 10 - 5), (0.5, 64 * 0.5 - 10 - 5), (1.0, 64 - 2 - 10 - 5)]
)
def test_pages_get_what_weights_and_steps_leave(
    model_of: Callable[[str], Path], memory: PlayedMemory, share: float | None, mib: float
) -> None:
    core = core_of(model_of("llama"), gpu_memory_utilization=share)
    block = core.info.kv_bytes_per_token * core.info.block_size
    assert mib * MIB - block < core.info.kv_cache_bytes <= mib * MIB
    order = memory.said
    assert order.index("give back") < order.index("forget") < order.index("peak") < len(order) - 1
    assert order[-1] == "give back"  # before what is free is counted


@pytest.mark.usefixtures("on_a_gpu", "memory")
def test_what_operations_may_take_in_other_steps_is_kept_free(
    model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Backend.__init__

    def taking(backend: Backend, options: BackendOptions) -> None:
        real(backend, options)
        backend.workspace_bytes = 3 * MIB

    monkeypatch.setattr(Backend, "__init__", taking)
    core, mib = core_of(model_of("llama")), 64 * 0.9 - 10 - 5 - 3
    block = core.info.kv_bytes_per_token * core.info.block_size
    assert mib * MIB - block < core.info.kv_cache_bytes <= mib * MIB


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("saves", [False, True])
def test_copies_to_the_host_are_kept_free(
    model_of: Callable[[str], Path], memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch, saves: bool, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 4 * MIB)
    monkeypatch.setattr(host_tier, "_OUTGOING_BYTES", 2 * MIB)
    monkeypatch.setattr(Backend, "make_copies", lambda backend: PlayedCopies())
    options: dict[str, Any] = {"kv_host_memory": 4 * MIB} if saves else {"kv_persist": str(tmp_path)}
    core = core_of(model_of("llama"), **options)
    block = core.info.kv_bytes_per_token * core.info.block_size
    room = (64 * 0.9 - 10 - 5 - 4 - 4 * saves) * MIB - block
    assert room - block < core.info.kv_cache_bytes <= room
    core.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2"])
def test_the_largest_step_is_run_and_leaves_nothing(
    model_of: Callable[[str], Path], memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch, family: str
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


def test_a_draft_model_has_its_largest_step_too(
    model_of: Callable[[str], Path], memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter((3 * MIB, 7 * MIB))
    monkeypatch.setattr(memory, "peak", lambda: memory.allocated() + next(peaks))
    model = model_of("llama")
    core = core_of(model, speculative_model=str(model))
    block = core.info.kv_bytes_per_token * core.info.block_size
    room = (64 * 0.9 - 10 - 7) * MIB
    assert room - block < core.info.kv_cache_bytes <= room and next(peaks, None) is None


def test_a_prediction_layer_takes_three_rows_of_states_more(memory: PlayedMemory, tmp_path: Path) -> None:
    core = core_of(make_predicting("qwen3_5", tmp_path, max_position_embeddings=4096), speculative_mtp=True)
    room = (64 * 0.9 - 10 - 5) * MIB - 3 * 600 * 64 * 4
    kept = 16 * core.info.kv_bytes_per_token
    assert room - kept - core.info.state_bytes < core.info.kv_cache_bytes <= room
    assert memory.said.count("peak") == 1 and len(run(core, [greedy("a", range(5, 30), 6)])["a", 0].token_ids) == 6


def test_pages_of_what_drafts_hold_numbers_from_the_start(
    model_of: Callable[[str], Path], memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the model need not: of them nothing is read that was not written."""
    pages = Backend.pages
    monkeypatch.setattr(Backend, "pages", lambda self, shape, kind: pages(self, shape, kind).fill_(torch.nan))
    model = model_of("llama")
    core = core_of(model, speculative_model=str(model))
    assert core.runner.proposer is not None
    (own,), (drafted,) = core.runner.cache.planes, core.runner.proposer.cache.planes
    assert all(bool(plane.isnan().all()) for plane in own if plane.numel())
    assert all(not bool(plane.any()) for plane in drafted)


def test_captured_steps_with_adapters_are_kept_free_where_there_are_some(
    model_of: Callable[[str], Path], memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the model, not of a draft model, which knows none."""
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
        block = core.info.kv_bytes_per_token * core.info.block_size
        room = (64 * 0.9 - 10 - 5 - 3) * MIB
        assert room - block < core.info.kv_cache_bytes <= room


def test_pages_that_nobody_has_written_hold_numbers(
    model_of: Callable[[str], Path], memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the largest step, which sees a long context that no step computed."""
    pages, execute, steps = Backend.pages, ModelRunner.execute, []
    monkeypatch.setattr(Backend, "pages", lambda self, shape, kind: pages(self, shape, kind).fill_(torch.nan))
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: steps.append(execute(self, plan)) or steps[-1])
    core_of(model_of("llama"))
    ((*results,),) = steps
    assert len(results) == 512 and all(result.error is None for result in results)


def test_an_encoder_reads_a_whole_text(
    model_of: Callable[[str], Path], memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from helpers.tiny_encoders import make_encoder

    plans: list[SchedulerOutput] = []
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: plans.append(plan) or execute(self, plan))
    core_of(make_encoder("modernbert", tmp_path / "model"), max_num_batched_tokens=100, max_model_len=None)
    ((only,),) = (plan.sequences for plan in plans)
    assert (only.start, only.num_tokens, only.samples) == (0, 100, ())


def test_an_operators_bytes_count_and_no_step_is_run(model_of: Callable[[str], Path], memory: PlayedMemory) -> None:
    core = make_core(model_of("llama"), kv_cache_memory=3 * MIB, max_num_seqs=512)
    assert 2.9 * MIB < core.info.kv_cache_bytes <= 3 * MIB and memory.said == []


def refused(model: Path, **options: Any) -> str:
    with pytest.raises(LoadError) as error:
        core_of(model, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_where_nothing_is_left(
    model_of: Callable[[str], Path], memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.own = 54 * MIB
    said = refused(model_of("llama"))
    assert "90% of the 64.0 MiB of cpu may be used, 8.0 MiB are free, this engine has taken 54.0 MiB" in said
    assert "a step needs 5.0 MiB: raise `cache.device_share`, lower `scheduling.max_num_batched_tokens`" in said
    memory.own = 51 * MIB
    assert "does not fit: it needs" in refused(model_of("llama"), max_model_len=4096)

    def fails(self: ModelRunner, plan: SchedulerOutput) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ModelRunner, "execute", fails)
    said = refused(model_of("llama"), max_num_batched_tokens=2048)
    assert (
        said.startswith("a step of 2048 tokens needs more memory than cpu has next to ") and "11.0 MiB of 64.0" in said
    )


def test_options_that_say_it_twice_or_wrongly(model_of: Callable[[str], Path]) -> None:
    model = model_of("llama")
    assert "use `cache.memory` on a CPU" in refused(model, gpu_memory_utilization=0.9)
    for share in (0.0, -1.0, 1.01):
        with pytest.raises(LoadError, match=r"`cache\.device_share` must be above 0 and at most 1"):
            engine_config(model, gpu_memory_utilization=share)
    with pytest.raises(LoadError, match="leave one of them out"):
        engine_config(model, gpu_memory_utilization=0.5, kv_cache_memory=1 << 20)
    config = engine_config(model, gpu_memory_utilization=0.5)
    assert prepare_model(config, DeviceCapabilities("cuda", False, free=1 << 30)).compute_dtype == "float32"


def test_sizes_are_counted_by_the_share(model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.engine.model.loading.model_size.expect_device", lambda name: "cuda")
    model = model_of("llama")
    found = [
        size_model(engine_config(model, max_num_seqs=512, gpu_memory_utilization=share), 16 * MIB)
        for share in (None, 0.5)
    ]
    block = found[0].kv_bytes_per_token * found[0].block_size
    for size, share in zip(found, (0.9, 0.5), strict=True):
        assert 0 <= 16 * MIB * share - size.weight_bytes - size.kv_cache_bytes < block + 1


def test_budgets() -> None:
    gib = 2**30
    assert device_kv_budget(80 * gib, 20 * gib, 58 * gib, 0.9, 2 * gib) == 50 * gib
    assert device_kv_budget(80 * gib, 20 * gib, 30 * gib, 0.9, 2 * gib) == 28 * gib  # others are there
    assert device_kv_budget(80 * gib, 20 * gib, 58 * gib, 0.25, gib) < 0


class OnItsOwnGpu(TorchBackend):
    """Each rank has a GPU, and that of the second is smaller."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        if options.ranks is not None:
            self.device_memory = memory = PlayedMemory()
            memory.total = (64 - 10 * options.ranks.rank) * MIB


@pytest.fixture
def gpus_of_ranks(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backend_selector,
        "_NATIVE_BACKENDS",
        {"cpu": backend_selector._NativeBackend(lambda options: None, OnItsOwnGpu, False)},
    )


@pytest.mark.usefixtures("gpus_of_ranks")
@pytest.mark.parametrize("heads", [4, 3])
def test_pages_of_ranks_get_what_the_fullest_device_allows(tmp_path: Path, heads: int) -> None:
    """All run the largest step together; the rank with more heads of keys takes more of each token."""
    wide = {"hidden_size": 96, "num_attention_heads": 2 * heads, "num_key_value_heads": heads, "head_dim": 16}
    model = make_model("llama", tmp_path / "model", max_position_embeddings=4096, **wide)
    asked = [greedy("a", range(5, 45), 10)]
    expected = run(make_core(model, kv_cache_memory=8 * MIB), asked)
    with ranked(model, 2, kv_cache_memory=None, **STEPS) as core:
        memory = core.runner.decoder.backend.device_memory
        assert isinstance(memory, PlayedMemory) and memory.said.count("peak") == 1
        large, small = ((total * 0.9 - 10 - 5) * MIB for total in (64, 54))
        room = min(large * heads / (heads // 2), small * heads / (heads - heads // 2))
        block = core.info.kv_bytes_per_token * core.info.block_size
        assert room - block < core.info.kv_cache_bytes <= room
        assert run(core, asked)["a", 0].token_ids == expected["a", 0].token_ids


@pytest.mark.usefixtures("gpus_of_ranks")
def test_a_rank_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", tmp_path / "model", max_position_embeddings=4096, num_key_value_heads=2)
    monkeypatch.setattr(PlayedMemory, "step", 45 * MIB)  # more than the smaller GPU leaves
    refused = pytest.raises(LoadError, match=r"no memory is left for the KV cache: 90% of the 54\.0 MiB")
    with refused, ranked(model, 2, kv_cache_memory=None, **STEPS):
        pass
