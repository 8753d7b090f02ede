"""Several adapters in one batch, with weights of every storage; they share no cached blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.adapters import save_adapter
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.errors import RequestError
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.engine.model.lora import Adapter, LoadedAdapters
from windlass.kernels import LowRankPart, LowRankTarget, LowRankUpdate, select_backend

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def sources(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterSource, ...]:
    root = tmp_path_factory.mktemp("adapters")
    made = [save_adapter(root / str(i), llama, rank=1 + i % 4, seed=i) for i in range(8)]
    return tuple(AdapterSource(i, f"a{i}", str(path)) for i, path in enumerate(made, start=1))


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_eight_adapters_in_a_batch_equal_single_requests(
    llama: Path, sources: tuple[AdapterSource, ...], options: dict[str, str]
) -> None:
    ids = [None, *range(1, 9)]
    core = make_core(llama, lora=sources, max_num_seqs=9, deterministic=True, **options)
    together = run(core, [greedy(f"r{i}", PROMPT, adapter=i) for i in ids])
    seen = set()
    for i in ids:
        mine = [source for source in sources if source.adapter_id == i]
        alone = run(make_core(llama, lora=tuple(mine), deterministic=True, **options), [greedy("r", PROMPT, adapter=i)])
        found, wanted = together[f"r{i}", 0], alone["r", 0]
        assert found.token_ids == wanted.token_ids
        assert all(torch.equal(a, b) for a, b in zip(found.logits, wanted.logits, strict=True))
        seen.add(tuple(found.logits[0].tolist()))
    assert len(seen) == 9  # each of them gives other answers


def test_cached_blocks_belong_to_the_contents_of_an_adapter(llama: Path, sources: tuple[AdapterSource, ...]) -> None:
    core = make_core(llama, lora=sources[:2])

    def cached(adapter: int | None) -> int:
        return run(core, [greedy("r", PROMPT, adapter=adapter)])["r", 0].outputs[-1].cached_tokens

    assert [cached(i) for i in (None, 1, 2)] == [0, 0, 0]
    assert [cached(i) for i in (None, 1, 2)] == [32, 32, 32]
    core.drop_adapter(1)
    with pytest.raises(RequestError, match="not loaded"):
        core.add(greedy("r", PROMPT, adapter=1))
    again = AdapterSource(9, sources[0].name, sources[0].path)
    core.add_adapter(core.read_adapter(again).result(30))
    assert cached(9) == 32  # the same numbers, under another id
    core.drop_adapter(9)
    core.add_adapter(core.read_adapter(AdapterSource(10, sources[0].name, sources[2].path)).result(30))
    assert cached(10) == 0  # others, under the same name


def test_adapter_in_use_is_unloaded_after_its_request(llama: Path, sources: tuple[AdapterSource, ...]) -> None:
    core = make_core(llama, lora=sources[:1])
    whole = run(core, [greedy("r", PROMPT, 6, adapter=1)])["r", 0].token_ids
    core.add(greedy("s", PROMPT, 6, adapter=1))
    found = list(core.step()[0].token_ids)
    core.drop_adapter(1)
    assert core.stats().adapters_loaded == 1
    while core.has_work():
        found += [token for output in core.step() for token in output.token_ids]
    assert found == whole
    assert core.stats().adapters_loaded == 0


def test_reloaded_adapter_has_its_own_slot() -> None:
    """Cached blocks of an adapter are not found by the next one."""
    backend = select_backend("cpu")
    loaded = LoadedAdapters(2, [{"q": LowRankTarget((8,), 8, 2), "v": LowRankTarget((8,), 8, 2)}], backend)

    def adapter(adapter_id: int, *names: str) -> Adapter:
        part = LowRankPart.of(torch.ones(8, 2), 0, 0, 1.0)
        layers = ({name: LowRankUpdate.of(torch.ones(2, 8), (part,)) for name in names},)
        return Adapter(AdapterInfo(adapter_id, f"{adapter_id}", "", 2, names, 1, "d"), layers)

    for one in (adapter(1, "q", "v"), adapter(1, "q", "v"), adapter(2, "q")):
        loaded.add(one)
    rows = loaded.rows([2], [1])
    assert len(loaded) == 2 and rows is not None
    out = torch.zeros(1, 8)
    rows.for_layer(0, backend).add("v", out, torch.ones(1, 8))
    assert not out.any()
    rows.for_layer(0, backend).add("q", out, torch.ones(1, 8))
    assert (out == 16).all()
