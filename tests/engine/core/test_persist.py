"""Blocks that outlive an engine: the same bits after a restart, and never a file that is damaged or of something else."""

import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.persisting import files_in, keeping, written
from helpers.adapters import save_adapter
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run
from helpers.eventually import eventually
from helpers.marks import slow_but
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass.engine.cache.disk_tier import BlockDirectory
from windlass.engine.cache.host_tier import CPUBlockTransfer
from windlass.engine.core import engine_builder as keeping_module
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.model.loading.checkpoint import weight_files
from windlass.engine.rotary.rope_scaling import RopeScaling

_GENERATOR = torch.Generator().manual_seed(3)


def tokens(count: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=_GENERATOR).tolist()


PROMPT = tokens(103)
FULL = 96  # tokens of its whole blocks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "gemma3", "smollm3", "deepseek_v3")
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in names}


def ask(core: EngineCore, prompt: list[int] = PROMPT, max_tokens: int = 12, **fields: Any) -> Finished:
    return run(core, [greedy("a", prompt, max_tokens, **fields)])["a", 0]


def cached(got: Finished) -> int:
    return got.outputs[-1].cached_tokens


def same(one: Finished, other: Finished) -> bool:
    return one.token_ids == other.token_ids and all(
        torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)
    )


def same_tokens(one: Finished, other: Finished) -> bool:
    return one.token_ids == other.token_ids


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("llama", {}, {}),
    "bfloat16": ("llama", {"kv_cache_dtype": "bfloat16"}, {}),
    "int8": ("llama", {"kv_cache_dtype": "int8"}, {}),
    "bfloat16 weights": ("llama", {"dtype": "bfloat16"}, {}),
    "quantized": ("llama", {"quantization": "int8"}, {}),
    "windows": ("gemma3", {}, {}),
    "windows, int8": ("gemma3", {"kv_cache_dtype": "int8"}, {}),
    "layers without rotation": ("smollm3", {}, {}),
    "latent": ("deepseek_v3", {}, {}),
    "latent, int8": ("deepseek_v3", {"kv_cache_dtype": "int8"}, {}),
    "larger blocks": ("llama", {"block_size": 32}, {}),
    "salt": ("llama", {}, {"cache_salt": "one"}),
    "scaling": ("llama", {}, {"rope_scaling": RopeScaling.from_dict({"rope_type": "yarn", "factor": 4})}),
    "far keys": (
        "llama",
        {},
        {"rope_scaling": RopeScaling.from_dict({"rope_type": "rerope", "window": 12, "factor": 3.5})},
    ),
    "window of the request": ("llama", {}, {"context": ContextRule(attention_window=40, attention_sinks=4)}),
    "rotate": (
        "llama",
        {"max_model_len": 512},
        {"rope_scaling": RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4}), "rope_update": "rotate"},
    ),
    "drafting": ("llama", {"speculative_model": "itself", "speculative_adaptive": False}, {}),
}


# Latent rows of 8 bits are for a CPU.
ON_THIS_DEVICE = [
    pytest.param("latent, int8", marks=ON_A_CPU),
    *slow_but(
        [kind for kind in KINDS if kind != "latent, int8"],
        "float32",
        "windows, int8",
        "drafting",
        "far keys",
        "scaling",
    ),
]


@pytest.mark.parametrize("kind", ON_THIS_DEVICE)
def test_the_same_bits_after_a_restart(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    family, options, fields = KINDS[kind]
    model = models[family]
    options = {name: str(model) if value == "itself" else value for name, value in options.items()}
    right = ask(make_core(model, deterministic=True, **options), **fields)
    with keeping(model, tmp_path, **options) as core:
        first = ask(core, **fields)
        written(core)
        assert cached(first) == 0 and core.stats().persist.written_blocks > 0
    with keeping(model, tmp_path, **options) as core:
        again = ask(core, **fields)
        stats = core.stats()
        assert cached(again) == FULL and stats.persist.restored_tokens >= FULL
        assert core.runner.positions_computed < len(PROMPT)
        if kind == "drafting":
            assert stats.spec_decode_num_accepted_tokens > 0.9 * stats.spec_decode_num_draft_tokens
    if kind != "drafting":  # a row of several is not recorded as one of its own
        assert same(first, right) and same(again, right)
    assert first.token_ids == again.token_ids == right.token_ids


def test_a_chat_goes_on(models: dict[str, Path], tmp_path: Path) -> None:
    """What was generated is kept as well as what was sent."""
    with keeping(models["llama"], tmp_path) as core:
        first = ask(core, max_tokens=40)
    longer = [*PROMPT, *first.token_ids, *tokens(5)]
    right = ask(make_core(models["llama"], deterministic=True), longer)
    with keeping(models["llama"], tmp_path) as core:
        again = ask(core, longer)
    assert cached(again) == (len(PROMPT) + 39) // 16 * 16 and same(again, right)


def test_passages_are_found_after_a_restart(models: dict[str, Path], tmp_path: Path) -> None:
    """At any offset, and only within their scope."""
    document = tokens(70)
    source, turned = [*tokens(7), *document, *tokens(4)], [*tokens(19), *document, *tokens(6)]
    offer = NonPrefixReuseParams(0, scope="me")
    options: dict[str, Any] = {"deterministic": False, "max_num_batched_tokens": 40}
    with keeping(models["llama"], tmp_path, **options) as core:
        ask(core, source)  # computed before anybody may find it
        ask(core, source, reuse=offer)
    with keeping(models["llama"], tmp_path, **options) as core:
        assert cached(ask(core, turned, reuse=NonPrefixReuseParams(32, scope="you"))) == 0
    for number in range(2):  # the second finds what the first took up elsewhere
        with keeping(models["llama"], tmp_path, **options) as core:
            again = ask(core, [*tokens(5 + number), *turned], reuse=NonPrefixReuseParams(32, scope="me"))
            assert 70 <= cached(again) == core.stats().reused_tokens
            assert core.stats().persist.restored_tokens >= 80


def test_adapters_are_told_apart_by_what_they_add(models: dict[str, Path], tmp_path: Path) -> None:
    """Their numbers start again with every server."""
    one, other = (save_adapter(tmp_path / name, models["llama"], seed=seed) for seed, name in enumerate("ab"))

    def asked(adapter: Path) -> Finished:
        with keeping(models["llama"], tmp_path / "kept", lora=(AdapterSource(0, "it", str(adapter)),)) as core:
            return ask(core, adapter=0)

    first, foreign, again = asked(one), asked(other), asked(one)
    assert (cached(first), cached(foreign), cached(again)) == (0, 0, FULL)
    assert same(first, again) and not same(first, foreign)


def rewrite(model: Path, target: Path) -> None:
    """Other weights of the same names, sizes and times."""
    shutil.copytree(model, target, dirs_exist_ok=True)
    file = target / "model.safetensors"
    before = file.stat()
    weights = load_file(file)
    weights["model.layers.2.mlp.down_proj.weight"][3, 5] += 1.0
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_one_changed_weight_is_another_model(models: dict[str, Path], tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "kept"
    shutil.copytree(models["llama"], model)
    with keeping(model, folder) as core:
        ask(core)
    rewrite(models["llama"], model)
    with keeping(model, folder) as core:
        assert core.stats().persist.known_blocks == 0 and cached(ask(core)) == 0


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "config": ({"rms_norm_eps": 0.01}, {}, {}),
    "cache dtype": ({}, {"kv_cache_dtype": "bfloat16"}, {}),
    "dtype": ({}, {"dtype": "bfloat16"}, {}),
    "quantization": ({}, {"quantization": "int8"}, {}),
    "block size": ({}, {"block_size": 32}, {}),
    "no fixed order": ({}, {"deterministic": False}, {}),
    "salt": ({}, {}, {"cache_salt": "other"}),
    "scaling": ({}, {}, {"rope_scaling": RopeScaling.from_dict({"rope_type": "linear", "factor": 2})}),
    "window": ({}, {}, {"context": ContextRule(attention_window=64)}),
    "server's scaling": ({}, {"rope_scaling": RopeScaling.from_dict({"rope_type": "linear", "factor": 2})}, {}),
}


@pytest.mark.parametrize("change", slow_but(CHANGES, "config", "cache dtype", "salt", "scaling", "window"))
def test_whatever_changes_a_key_changes_its_name(change: str, models: dict[str, Path], tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "kept"
    shutil.copytree(models["llama"], model)
    with keeping(model, folder) as core:
        ask(core)
    config, options, fields = CHANGES[change]
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with keeping(model, folder, **options) as core:
        assert cached(ask(core, **fields)) == 0 and core.stats().persist.read_blocks == 0


def test_damaged_files_are_skipped_counted_and_made_anew(models: dict[str, Path], tmp_path: Path) -> None:
    with keeping(models["llama"], tmp_path) as core:
        right = ask(core)
    files = files_in(tmp_path)
    with keeping(models["llama"], tmp_path) as core:  # it knows them; then they change under it
        for number, file in enumerate(files):
            data = bytearray(file.read_bytes())
            if number % 3 == 0:
                file.write_bytes(data[: len(data) // 2])
            elif number % 3 == 1:
                data[len(data) * 2 // 3] ^= 4
                file.write_bytes(data)
            else:
                file.write_bytes(files[0].read_bytes())  # of another block, and half of it
        again = ask(core)
        written(core)
        stats = core.stats().persist
        assert same(again, right) and cached(again) == 0
        assert stats.damaged_blocks + stats.foreign_blocks >= 1 and stats.read_blocks == 0
    with keeping(models["llama"], tmp_path) as core:
        ask(core)
        assert core.stats().persist.read_blocks >= 1


def test_a_damaged_file_in_the_middle_ends_the_prefix_there(models: dict[str, Path], tmp_path: Path) -> None:
    with keeping(models["llama"], tmp_path) as core:
        right = ask(core)
        chain = core.scheduler._frequency_changes.new_cache(
            greedy("x", PROMPT), core.plan_rotation(greedy("x", PROMPT)).stage(9)
        ).chain
        chain.extend(PROMPT, FULL)
    (file,) = tmp_path.glob(f"*/{chain.digests[3].hex()}-0.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for expected, damaged in ((3 * 16, 1), (FULL, 0)):  # it is created again
        with keeping(models["llama"], tmp_path) as core:
            again = ask(core)
            written(core)
            assert (cached(again), core.stats().persist.damaged_blocks) == (expected, damaged)
            assert same(again, right)


def test_a_file_of_another_block_under_this_name(models: dict[str, Path], tmp_path: Path) -> None:
    with keeping(models["llama"], tmp_path) as core:
        right = ask(core)
    files = files_in(tmp_path)
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    with keeping(models["llama"], tmp_path) as core:
        again = ask(core)
        assert same(again, right) and cached(again) == 0 and core.stats().persist.foreign_blocks == 1


def test_a_block_of_another_namespace_that_was_moved_here(models: dict[str, Path], tmp_path: Path) -> None:
    """The same prompt under other options has the names of its own; a file keeps what it is."""
    with keeping(models["llama"], tmp_path) as core:
        right = ask(core)
    (here,) = tmp_path.iterdir()
    there = tmp_path / "0123456789abcdef0123456789abcdef"
    here.rename(there)
    with keeping(models["llama"], tmp_path, kv_persist_size=1 << 30) as core:
        written(core)
    for file in there.iterdir():
        data = file.read_bytes()
        (here / file.name).write_bytes(data.replace(here.name.encode(), there.name.encode()))
    with keeping(models["llama"], tmp_path) as core:
        again = ask(core)
        assert same(again, right) and cached(again) == 0 and core.stats().persist.foreign_blocks == 1


def test_two_engines_share_a_folder(models: dict[str, Path], tmp_path: Path) -> None:
    right = ask(make_core(models["llama"], deterministic=True))
    with keeping(models["llama"], tmp_path) as one, keeping(models["llama"], tmp_path) as other:
        ask(one)
        written(one)
        eventually(lambda: other.stats().persist.known_blocks >= FULL // 16, 30)  # it scans from time to time
        got = ask(other)
        assert cached(got) == FULL and same(got, right)
        assert other.stats().persist.written_blocks == 0


def test_what_was_evicted_comes_back(models: dict[str, Path], tmp_path: Path) -> None:
    small = {"max_model_len": 160, "max_num_seqs": 1, "kv_cache_memory": None}
    probe = make_core(models["llama"])
    small["kv_cache_memory"] = probe.info.kv_bytes_per_token * 16 * 20
    with keeping(models["llama"], tmp_path, **small) as core:
        first = ask(core)
        written(core)
        for _ in range(4):
            ask(core, tokens(150), 4)
            written(core)
        read = core.stats().persist.read_blocks
        again = ask(core)
        assert cached(again) == FULL and same(again, first)
        assert core.stats().persist.read_blocks - read == FULL // 16


def test_the_cap_is_held(models: dict[str, Path], tmp_path: Path) -> None:
    probe = make_core(models["llama"])
    block = probe.info.kv_bytes_per_token * 16
    cap = 80 * block
    with keeping(models["llama"], tmp_path, kv_persist_size=cap) as core:
        for _ in range(12):
            ask(core, tokens(200), 2)
            written(core)
            assert sum(file.stat().st_size for file in files_in(tmp_path)) <= cap
        stats = core.stats().persist
        assert stats.evicted_blocks > 40 and stats.known_blocks <= 80
        eventually(lambda: core.stats().persist.known_blocks == len(files_in(tmp_path)), 30)


def test_a_full_disk_is_said_once_and_the_engine_goes_on(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = ask(make_core(models["llama"], deterministic=True))
    write, full = os.write, threading.Event()

    def limited(number: int, data: Any) -> int:
        if full.is_set():
            raise OSError(28, "No space left on device")
        return write(number, data)

    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr("windlass.engine.cache.block_store._MIN_BACKOFF", 0.05)
    monkeypatch.setattr("windlass.engine.cache.block_store._MAX_BACKOFF", 0.05)
    full.set()
    with caplog.at_level(logging.WARNING), keeping(models["llama"], tmp_path) as core:
        assert same(ask(core), right)
        eventually(lambda: core.stats().persist.failures >= 3, 30)
        assert len(caplog.records) == 1 and "No space left on device" in caplog.text
        assert files_in(tmp_path) == [] and not list(tmp_path.glob("*/.*"))
        full.clear()  # there is space again
        eventually(lambda: not core.stats().persist.waiting_blocks, 30)
        assert core.stats().persist.written_blocks >= FULL // 16
        assert len(caplog.records) == 2 and "this is over" in caplog.text


def test_a_folder_that_vanishes_costs_an_engine_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    with keeping(models["llama"], tmp_path / "kept") as core:
        right = ask(core)
        written(core)
    with keeping(models["llama"], tmp_path / "kept") as core:
        shutil.rmtree(tmp_path / "kept")
        again = ask(core)
        assert same(again, right) and cached(again) == 0
        eventually(lambda: core.stats().persist.known_blocks == 0, 30)


def test_requests_that_end_while_they_wait_leave_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    with keeping(models["llama"], tmp_path) as core:
        right = ask(core)
    with keeping(models["llama"], tmp_path) as core:
        for number in range(5):
            core.add(greedy(str(number), PROMPT, 12))
        core.step()  # they are held back
        assert all(seq.fetch is not None for seq in core.scheduler.live_sequences()[:1])
        for number in range(5):
            core.abort(str(number))
        assert not core.has_work()
        assert same(ask(core), right)
        eventually(lambda: core._store.transfer._staged == {}, 30)


def test_what_several_want_is_read_once(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = threading.Event(), BlockDirectory.read
    monkeypatch.setattr(BlockDirectory, "read", lambda *given: read(*given) if gate.wait(60) else None)
    monkeypatch.setattr("windlass.engine.scheduling.kv_restore._GRACE_SECONDS", 60.0)
    longer = [*PROMPT[:64], *tokens(60)]
    with keeping(models["llama"], tmp_path) as core:
        right = {"a": ask(core), "b": ask(core, longer)}
    with keeping(models["llama"], tmp_path) as core:
        requests = [
            greedy(f"{name}{number}", prompt, 12)
            for number in range(3)
            for name, prompt in (("a", PROMPT), ("b", longer))
        ]
        for request in requests:
            core.add(request)
        core.step()  # all have searched
        core.abort("a0")  # which the others wait for
        gate.set()
        got = run(core, [])
        assert len(got) == 5
        for (name, _), one in got.items():
            assert same_tokens(one, right[name[0]]) and cached(one) == (FULL if name[0] == "a" else 112)
        assert core.stats().persist.read_blocks == FULL // 16 + 3
        assert core.scheduler._kv_restorer.fetches == [] and core._store.transfer._staged == {}


def test_a_disk_that_answers_slowly_is_not_waited_for(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeping(models["llama"], tmp_path) as core:
        right = ask(core)
    go_on = threading.Event()
    monkeypatch.setattr(BlockDirectory, "read", lambda *_: go_on.wait() and None)
    monkeypatch.setattr("windlass.engine.scheduling.kv_restore._GRACE_SECONDS", 0.1)
    try:
        with keeping(models["llama"], tmp_path) as core:
            got = ask(core)
            assert same(got, right) and cached(got) == 0
            go_on.set()
    finally:
        go_on.set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_caching": False}, "they share nothing without `cache.prefix_caching`"),
        ({"kv_persist_size": 1000}, "`cache.persist_size` is 0.0 MiB, and 64 blocks of this model take .*: raise it"),
        ({"kv_persist_size": 0}, "`cache.persist_size` must be at least 1"),
    ],
)
def test_options_that_do_not_fit(
    options: dict[str, Any], message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=message):
        make_core(models["llama"], kv_persist=str(tmp_path), **options)


def test_a_cap_without_a_folder(models: dict[str, Path]) -> None:
    with pytest.raises(LoadError, match=r"name one with `cache\.persist`"):
        make_core(models["llama"], kv_persist_size=1 << 30)


def test_folders_that_cannot_serve(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="is a file: give a folder"):
        make_core(models["llama"], kv_persist=str(tmp_path / "file"))
    with pytest.raises(LoadError, match=r"cannot be written to \(Not a directory\)"):
        make_core(models["llama"], kv_persist=str(tmp_path / "file" / "below"))
    with pytest.raises(LoadError, match="cannot be written to"):
        make_core(models["llama"], kv_persist="/proc/windlass")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LoadError, match=r"may be written to by other users.*chmod 700"):
        make_core(models["llama"], kv_persist=str(tmp_path / "open"))
    with keeping(models["llama"], tmp_path / "new" / "one"):
        assert (tmp_path / "new" / "one").stat().st_mode & 0o777 == 0o700


@ON_A_CPU  # whose threads copy blocks during steps that write to them
def test_a_block_that_is_evicted_while_it_is_copied_is_not_written(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_block, copied, asked = CPUBlockTransfer.read_block, list[int](), list[int]()
    prompts = [tokens(130) for _ in range(12)]

    def slow(pages: CPUBlockTransfer, group: int, block: int, full_since: float) -> list[Any]:
        first = read_block(pages, group, block, full_since)
        if len(copied) % 3 == 0:  # until others are where it was
            seen = len(asked)
            eventually(lambda: len(asked) in (*range(seen + 3, 99), len(prompts)), 60)
        copied.append(block)
        second = read_block(pages, group, block, full_since)
        return [*first[:1], *second[1:]]  # keys of before, values of behind

    monkeypatch.setattr(CPUBlockTransfer, "read_block", slow)
    small = {"max_model_len": 160, "max_num_seqs": 2}
    small["kv_cache_memory"] = make_core(models["llama"]).info.kv_bytes_per_token * 16 * 22
    right = [ask(make_core(models["llama"], deterministic=True), prompt, 4) for prompt in prompts]
    with keeping(models["llama"], tmp_path, **small) as core:
        for prompt, wanted in zip(prompts, right, strict=True):
            assert same(ask(core, prompt, 4), wanted)
            asked.append(1)
        assert core.stats().persist.lost_blocks > 0
    monkeypatch.undo()
    with keeping(models["llama"], tmp_path) as core:
        got = [ask(core, prompt, 4) for prompt in prompts]
        assert all(same(one, wanted) for one, wanted in zip(got, right, strict=True))
        assert sum(cached(one) for one in got) > 0


@pytest.fixture
def slow_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is hashed with the weights, and cannot be read before it is written."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(keeping_module, "weight_files", lambda directory: [*weight_files(directory), pipe])
    return pipe


def test_an_engine_that_ends_before_its_folder_was_open_writes_its_blocks_all_the_same(
    models: dict[str, Path], slow_weights: Path, tmp_path: Path
) -> None:
    core = make_core(models["llama"], deterministic=True, kv_persist=str(tmp_path / "kept"))
    assert cached(ask(core)) == 0 and not files_in(tmp_path / "kept")
    threading.Timer(0.3, slow_weights.write_bytes, [b"late"]).start()
    core.close()
    assert len(files_in(tmp_path / "kept")) >= FULL // 16


def test_the_first_request_behind_a_warm_up_finds_what_files_hold(
    models: dict[str, Path], slow_weights: Path, tmp_path: Path
) -> None:
    for expected in (0, FULL):
        core = make_core(models["llama"], deterministic=True, kv_persist=str(tmp_path / "kept"))
        threading.Timer(0.3, slow_weights.write_bytes, [b"late"]).start()
        core.warm_up()
        assert cached(ask(core)) == expected
        core.close()
