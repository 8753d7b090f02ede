"""Adapters: logits of a model into which they were merged, mixtures in a batch, storage dtype, and GGUF files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.gguf_checkpoints import convert, derived
from engine_helpers.rewritten_weights import logits
from helpers import gguf_conversion
from helpers.adapters import ALL, merged, save_adapter
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run
from helpers.gguf_models import make_gguf
from helpers.little_memory import NO_ROOM
from helpers.tiny_models import make_model
from helpers.tiny_unrotated import make_unrotated
from safetensors.torch import load_file, save_file

from windlass.engine.core import adapter_manager
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import DeviceMemoryError, LoadError, NotFiniteError, RequestError
from windlass.engine.interface.config import AdapterConfig
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest, PoolingRule
from windlass.engine.model.loading import adapter_loader
from windlass.engine.model.loading.adapter_loader import read_peft_config
from windlass.engine.model.lora import Adapter, LoadedAdapters
from windlass.kernels import LowRankPart, LowRankTarget, LowRankUpdate, select_backend

PROMPT = [3, 17, 42, 8, 99, 23, 54, 11, 76, 5, 31, 90]
SETTINGS = [
    ({"targets": ("q_proj",)}, {}),
    ({"targets": ("k_proj", "v_proj")}, {}),
    ({"targets": ("o_proj",)}, {}),
    ({"targets": ("gate_proj",)}, {}),
    ({"targets": ("up_proj", "down_proj")}, {}),
    ({"targets": ALL}, {}),
    ({"targets": ALL, "rank": 1, "use_rslora": True}, {}),
    ({"targets": ALL, "ranks": {"v_proj": 7, "down_proj": 2}, "alpha_pattern": {"q_proj": 11.0}}, {}),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama") / "model")


def with_adapters(model: Path, *adapters: Path, **options: object) -> EngineCore:
    sources = tuple(AdapterSource(i, f"a{i}", str(path)) for i, path in enumerate(adapters, start=1))
    return make_core(model, lora=sources, **options)


NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")


def only(finished: dict[tuple[str, int], Finished], name: str = "r") -> Finished:
    return finished[name, 0]


def distance(found: Finished, wanted: Finished) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    assert found.token_ids == wanted.token_ids
    a, b = torch.stack(found.logits), torch.stack(wanted.logits)
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("settings", [s for s, _ in SETTINGS], ids=[str(i) for i in range(len(SETTINGS))])
def test_adapter_equals_merged_weights(llama: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    adapter = save_adapter(tmp_path / "adapter", llama, **settings)  # type: ignore[arg-type]
    plain = only(run(make_core(llama), [greedy("r", PROMPT)]))
    wanted = only(run(make_core(merged(llama, adapter, tmp_path / "merged")), [greedy("r", PROMPT)]))
    core = with_adapters(llama, adapter)
    assert distance(only(run(core, [greedy("r", PROMPT, adapter=1)])), wanted) < 1e-5
    assert distance(only(run(core, [greedy("r", PROMPT)])), plain) == 0  # and the same engine without
    assert plain.logits[0].sub(wanted.logits[0]).abs().max() > 1e-2 * plain.logits[0].abs().max()


def test_other_layer_names_and_separate_heads(tmp_path: Path) -> None:
    model = make_model("gpt_neox", tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model, NEOX)
    plain = only(run(make_core(model), [greedy("r", PROMPT)]))
    wanted = only(run(make_core(merged(model, adapter, tmp_path / "merged")), [greedy("r", PROMPT)]))
    assert distance(only(run(with_adapters(model, adapter), [greedy("r", PROMPT, adapter=1)])), wanted) < 1e-5
    assert plain.logits[0].sub(wanted.logits[0]).abs().max() > 1e-2 * plain.logits[0].abs().max()


# -- mixtures ----------------------------------------------------------------------------------------------------------

MIXED_PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def sources(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterSource, ...]:
    root = tmp_path_factory.mktemp("adapters")
    made = [save_adapter(root / str(i), llama, rank=1 + i % 4, seed=i) for i in range(8)]
    return tuple(AdapterSource(i, f"a{i}", str(path)) for i, path in enumerate(made, start=1))


@pytest.mark.quick_cases(1)
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
    together = run(core, [greedy(f"r{i}", MIXED_PROMPT, adapter=i) for i in ids])
    seen = set()
    for i in ids:
        mine = [source for source in sources if source.adapter_id == i]
        alone = run(
            make_core(llama, lora=tuple(mine), deterministic=True, **options), [greedy("r", MIXED_PROMPT, adapter=i)]
        )
        found, wanted = together[f"r{i}", 0], alone["r", 0]
        assert found.token_ids == wanted.token_ids
        assert all(torch.equal(a, b) for a, b in zip(found.logits, wanted.logits, strict=True))
        seen.add(tuple(found.logits[0].tolist()))
    assert len(seen) == 9  # each of them gives other answers


def test_cached_blocks_belong_to_the_contents_of_an_adapter(llama: Path, sources: tuple[AdapterSource, ...]) -> None:
    core = make_core(llama, lora=sources[:2])

    def cached(adapter: int | None) -> int:
        return run(core, [greedy("r", MIXED_PROMPT, adapter=adapter)])["r", 0].outputs[-1].cached_tokens

    assert [cached(i) for i in (None, 1, 2)] == [0, 0, 0]
    assert [cached(i) for i in (None, 1, 2)] == [32, 32, 32]
    core.drop_adapter(1)
    with pytest.raises(RequestError, match="not loaded"):
        core.add(greedy("r", MIXED_PROMPT, adapter=1))
    again = AdapterSource(9, sources[0].name, sources[0].path)
    core.add_adapter(core.read_adapter(again).result(30))
    assert cached(9) == 32  # the same numbers, under another id
    core.drop_adapter(9)
    core.add_adapter(core.read_adapter(AdapterSource(10, sources[0].name, sources[2].path)).result(30))
    assert cached(10) == 0  # others, under the same name


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("value", [3e38, 1e12])
@pytest.mark.parametrize(
    "options",
    [{}, {"burst_seconds": 1.0}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"speculative_ngram": 4}],
    ids=str,
)
def test_overflowing_adapter_fails_only_its_own_requests(
    llama: Path, tmp_path: Path, value: float, options: dict[str, Any]
) -> None:
    adapter = save_adapter(tmp_path / "adapter", llama)
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.sign() * value for name, tensor in load_file(file).items()}, file)
    core = with_adapters(llama, adapter, **options)

    def finish(*requests: EngineRequest) -> dict[str, list[RequestOutput]]:
        found: dict[str, list[RequestOutput]] = {}
        for request in requests:
            core.add(request)
        while core.has_work():
            for output in core.step():
                found.setdefault(output.request_id, []).append(output)
        return found

    def tokens(outputs: list[RequestOutput]) -> list[int]:
        return [token for output in outputs for token in output.token_ids]

    expected = tokens(finish(greedy("plain", MIXED_PROMPT))["plain"])
    sampled = {"temperature": 1.0, "seed": 3}
    fields: list[dict[str, Any]] = [{}, sampled, {**sampled, "n": 2}, {"prompt_logprobs": 1}, {"logprobs": 2}]
    overflowing = [greedy(f"{i}", MIXED_PROMPT, adapter=1, **given) for i, given in enumerate(fields)]
    pooling = {"max_tokens": 0, "adapter": 1, "pooling": PoolingRule("mean")}
    for _ in range(2):  # the second time in the blocks of the first
        found = finish(greedy("plain", MIXED_PROMPT), *overflowing, greedy("pooled", MIXED_PROMPT, **pooling))
        assert tokens(found.pop("plain")) == expected
        assert len(found) == len(fields) + 1
        for outputs in found.values():
            assert isinstance(outputs[-1].error, NotFiniteError) and not tokens(outputs)


def test_adapter_in_use_is_unloaded_after_its_request(llama: Path, sources: tuple[AdapterSource, ...]) -> None:
    core = make_core(llama, lora=sources[:1])
    whole = run(core, [greedy("r", MIXED_PROMPT, 6, adapter=1)])["r", 0].token_ids
    core.add(greedy("s", MIXED_PROMPT, 6, adapter=1))
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


# -- storage -----------------------------------------------------------------------------------------------------------

STORED_PROMPT = list(range(3, 20))
HALVES = [torch.bfloat16, torch.float16]


def with_adapter(model: Path, adapter: Path, **options: object) -> EngineCore:
    return make_core(model, lora=(AdapterSource(1, "a", str(adapter)),), **options)


def adapter_logits(core: EngineCore) -> torch.Tensor:
    return torch.stack(run(core, [greedy("r", STORED_PROMPT, adapter=1)])["r", 0].logits)


def num_bytes(core: EngineCore) -> int:
    return core.adapters.loaded.num_bytes


def rewritten(adapter: Path, target: Path, dtype: torch.dtype) -> Path:
    """Return the numbers rounded to this dtype, in float32."""
    target.mkdir()
    (target / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: t.to(dtype).float() for name, t in tensors.items()}, target / "adapter_model.safetensors")
    return target


@ON_A_CPU
@pytest.mark.parametrize("dtype", HALVES)
def test_configured_dtype_rounds_and_halves_the_memory(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = save_adapter(tmp_path / "wide", llama, rank=5)
    name = str(dtype).removeprefix("torch.")
    exact, rounded = with_adapter(llama, adapter), with_adapter(llama, adapter, lora_dtype=name)
    assert 2 * num_bytes(rounded) == num_bytes(exact)
    # The rounded numbers are exact in this dtype, which is therefore their default.
    same = with_adapter(llama, rewritten(adapter, tmp_path / "narrow", dtype))
    assert num_bytes(same) == num_bytes(rounded)
    found = adapter_logits(rounded)
    assert torch.equal(found, adapter_logits(same)) and not torch.equal(found, adapter_logits(exact))
    wide = with_adapter(llama, tmp_path / "narrow", lora_dtype="float32")
    assert num_bytes(wide) == num_bytes(exact)
    assert torch.equal(found, adapter_logits(wide))


def test_numbers_beyond_the_dtype_are_refused(llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "large", llama, strength=1e5)
    with pytest.raises(LoadError, match=r"too large for `adapters.dtype=float16`"):
        with_adapter(llama, adapter, lora_dtype="float16")
    with pytest.raises(LoadError, match="unknown dtype 'int3'"):
        with_adapter(llama, adapter, lora_dtype="int3")
    assert num_bytes(with_adapter(llama, adapter, lora_dtype="bfloat16")) > 0


# -- GGUF files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_follow_the_original_order(tmp_path: Path, interleaved: bool) -> None:
    model = make_model("llama", tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model)
    made = make_gguf(model, tmp_path / "gguf", lambda name: "F32", interleaved=interleaved)
    core = make_core(made.derived, lora=(AdapterSource(1, "a", str(adapter)),))
    found = run(core, [greedy("r", range(3, 20), adapter=1)])["r", 0]
    wanted = run(make_core(merged(model, adapter, tmp_path / "merged")), [greedy("r", range(3, 20))])["r", 0]
    assert found.token_ids == wanted.token_ids
    a, b = torch.stack(found.logits), torch.stack(wanted.logits)
    assert (a - b).abs().max() < 1e-5 * b.abs().max()


def smollm3(family: str, directory: Path) -> Path:
    """As in GGUF, which does not specify which layers do not rotate."""
    return make_model(family, directory, no_rope_layer_interval=4, use_sliding_window=False, num_hidden_layers=5)


@pytest.mark.parametrize(
    ("family", "make", "convert"),
    [
        ("smollm3", smollm3, gguf_conversion.convert),
        ("cohere2", make_model, convert),
        ("granite4_h_nope", make_unrotated, convert),
        ("nemotron_h", make_unrotated, convert),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_rows_of_layers_that_do_not_rotate_follow_it_too(
    family: str, make: Callable[[str, Path], Path], convert: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """The converter also reorders rows of SmolLM3, Granite and Nemotron H; Cohere's have the same order in both."""
    model = make(family, tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model, ["q_proj", "k_proj"])
    found = logits(derived(convert(model, tmp_path / "model.gguf"), tmp_path / "derived"), adapter)
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_adapters_are_refused_for_weights_with_factors(tmp_path: Path) -> None:
    model = make_model("falcon_h1", tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model)
    directory = derived(convert(model, tmp_path / "model.gguf"), tmp_path / "derived")
    with pytest.raises(LoadError, match="multiplied by factors that it does not name"):
        logits(directory, adapter)


# -- refused adapters --------------------------------------------------------------------------------------------------

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MODULE = A.removesuffix(".lora_A.weight")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def core(model: Path) -> EngineCore:
    return make_core(model, max_lora_rank=8)


def config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_model.safetensors"
        found = load_file(path)
        edit(found)
        save_file(found, path)

    return change


def cut(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pipe(directory: Path) -> None:
    path = directory / "adapter_config.json"
    path.unlink()
    os.mkfifo(path)


CASES: list[tuple[Callable[[Path], None], str]] = [
    (config(peft_type="IA3"), "peft_type"),
    (config(use_dora=True), "DoRA"),
    (config(bias="all"), "bias"),
    (config(modules_to_save=["lm_head"]), "modules_to_save"),
    (config(target_modules=["lm_head"]), "lm_head"),
    (config(init_lora_weights="pissa_niter_4"), "pissa"),
    (config(init_lora_weights="lora_ga", lora_ga_config={"direction": "ArB2r"}), "lora_ga"),
    (config(use_something_new=True), "use_something_new"),
    (config(r=0), "r must be"),
    (config(r="4"), "r must be"),
    (config(r=9), "`adapters.max_rank`"),
    (config(r=5), "wrong|shape"),
    (config(lora_alpha=float("nan")), "lora_alpha"),
    (config(use_rslora="yes"), "use_rslora"),
    (config(alpha_pattern={"(a+)+$": 1.0}), "pattern"),
    (config(rank_pattern={"q_proj": 99}), "rank_pattern"),
    (lambda d: (d / "adapter_config.json").write_text("{"), "JSON"),
    (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json"),
    (lambda d: (d / "adapter_config.json").write_text(" " * (1 << 20) + "{}"), "larger than"),
    (pipe, "not a regular file"),
    (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    (lambda d: (d / "adapter_model.safetensors").write_bytes(b""), "cut off"),
    (cut, "^cannot read adapter_model.safetensors: it has .* bytes, but its header describes"),
    (tensors(lambda t: t[A].view(-1)[3].fill_(float("nan"))), "NaN"),
    (tensors(lambda t: t.pop(A)), "only one of"),
    (tensors(lambda t: t.clear()), "no tensors"),
    (tensors(lambda t: t.update({A: t[A][:, :-1].contiguous()})), "another model or rank"),
    (tensors(lambda t: t.update({A: t[A].to(torch.int32)})), "I32"),
    (tensors(lambda t: t.update({A.replace("layers.0", "layers.77"): t[A].clone()})), "layers.77"),
    (tensors(lambda t: t.update({f"{MODULE}.lora_magnitude_vector": torch.ones(4)})), "magnitude"),
]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_invalid_adapter_is_refused(core: EngineCore, model: Path, tmp_path: Path, case: int) -> None:
    break_it, said = CASES[case]
    adapter = save_adapter(tmp_path / "adapter", model)
    break_it(adapter)
    with pytest.raises(RequestError, match=said) as raised:
        core.read_adapter(AdapterSource(1, "a", str(adapter))).result(30)
    assert raised.value.param == "lora_path" and raised.value.code
    assert core.stats().adapters_loaded == 0


def test_missing_memory_is_reported(
    core: EngineCore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = AdapterSource(1, "poet", str(save_adapter(tmp_path / "adapter", model)))

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError(NO_ROOM)

    with monkeypatch.context() as patched:
        patched.setattr(adapter_manager, "read_adapter", fails)
        with pytest.raises(DeviceMemoryError, match="the adapter poet"):
            core.read_adapter(source).result(30)
    assert core.stats().adapters_loaded == 0
    assert core.read_adapter(source).result(30).info.name == "poet"


def test_start_with_an_invalid_adapter_fails(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", model, use_dora=True)
    with pytest.raises(LoadError, match=r"adapters\.sources=poet.*DoRA"):
        make_core(model, lora=(AdapterSource(1, "poet", str(adapter)),))


def test_patterns_are_compiled_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More patterns than the cache of `re` holds, and many modules."""
    patterns = {f"layers.{n}.q_proj": 1 + n % 8 for n in range(1000)} | {
        r"^model\.layers\.\d+\.v_proj": 3,
        "[ou]_proj": 5,
    }
    described = read_peft_config(save_adapter(tmp_path / "adapter", model, rank_pattern=patterns, alpha=4.0), 8)
    monkeypatch.setattr(adapter_loader, "re", None)
    found = [described.rank_of(f"model.layers.7.{name}_proj") for name in "qkvou"]
    assert found == [8, 4, 3, 5, 5]
    assert described.rank_of("model.layers.1007.q_proj") == described.rank_of("x.model.layers.7.v_proj") == 4
    assert described.scale_of("model.layers.7.q_proj") == 4.0 / 8


def test_number_of_adapters_is_bounded() -> None:
    assert AdapterConfig(max_loaded=1024).max_loaded == 1024
    with pytest.raises(LoadError, match=r"max_loaded.* at most 1024, got 1025"):
        AdapterConfig(max_loaded=1025)


# -- PEFT --------------------------------------------------------------------------------------------------------------

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def trained(model: Path, target: Path, **config: Any) -> torch.nn.Module:
    """Save an adapter as PEFT does, every matrix of it random, and return the model with it merged."""
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    adapted.save_pretrained(target)
    return adapted.merge_and_unload().eval()  # type: ignore[no-any-return]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"r": 8, "lora_alpha": 12, "target_modules": "all-linear"}),
        ("llama", {"r": 4, "lora_alpha": 9, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}),
        (
            "llama",
            {
                "r": 6,
                "lora_alpha": 6,
                "target_modules": "all-linear",
                "rank_pattern": {"down_proj": 3, r"layers\.1\.self_attn\.q_proj": 11},
                "alpha_pattern": {"k_proj": 20},
            },
        ),
        (
            "qwen3",
            {"r": 16, "lora_alpha": 32, "target_modules": ["o_proj", "gate_proj", "up_proj"], "lora_dropout": 0.1},
        ),
        ("phi3", {"r": 5, "lora_alpha": 10, "target_modules": "all-linear"}),
        ("gemma3", {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
        ("gemma4_e2b", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}),
    ],
    ids=["all", "rslora", "patterns", "qwen3", "phi3", "gemma3", "gemma4"],
)
def test_adapter_equals_the_model_that_peft_merged(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    merged = trained(model, tmp_path / "adapter", **config)
    core = make_core(model, lora=(AdapterSource(1, "a", str(tmp_path / "adapter")),))
    found = run(core, [greedy("r", PROMPT, adapter=1)])["r", 0]
    plain = run(core, [greedy("r", PROMPT)])["r", 0]
    ids = torch.tensor([[*PROMPT, *found.token_ids]])
    with torch.no_grad():
        wanted = merged(ids).logits[0, len(PROMPT) - 1 : -1]
    logits = torch.stack(found.logits)
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (logits[0] - plain.logits[0]).abs().max() > 1e-2 * wanted.abs().max()


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"bias": "all"}, "bias"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
    ],
    ids=["dora", "saved modules", "pissa", "biases", "embedding"],
)
def test_other_kinds_of_peft_are_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    trained(model, tmp_path / "adapter", **{"r": 4, "target_modules": ["q_proj"], **config})
    with pytest.raises(LoadError, match=f"(?i){reason}"):
        make_core(model, lora=(AdapterSource(1, "a", str(tmp_path / "adapter")),))
