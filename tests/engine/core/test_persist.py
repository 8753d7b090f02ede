"""Disk tier of an engine: equal bits after a restart, and no block from a damaged or foreign file."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_helpers.persisting import (
    FULL,
    KINDS,
    PROMPT,
    ask,
    cached,
    files_in,
    keeping,
    kind_of_keys,
    same_bits,
    tokens,
    written,
)
from helpers.adapters import save_adapter
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run
from helpers.eventually import eventually
from helpers.marks import slow_but
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass.engine.cache.block_store import Fetch
from windlass.engine.cache.cache_operations import LoadedBlock
from windlass.engine.cache.disk_tier import BlockDirectory
from windlass.engine.cache.host_tier import CPUBlockTransfer
from windlass.engine.core import engine_builder
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.model.loading.checkpoint import weight_files
from windlass.engine.rotary.rope_scaling import RopeScaling

Engine = Callable[..., contextlib.AbstractContextManager[EngineCore]]
Models = dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    names = ("llama", "gemma3", "smollm3", "deepseek_v3")
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture
def engine(models: Models, tmp_path: Path) -> Engine:
    """`keeping` for one model and folder."""
    return functools.partial(keeping, models["llama"], tmp_path)


def oracle(models: Models) -> EngineCore:
    """An engine that stores nothing."""
    return make_core(models["llama"], deterministic=True)


QUICK_KINDS = ("windows, int8", "draft model", "far keys")
ON_THIS_DEVICE = [
    pytest.param("latent, int8", marks=[ON_A_CPU, pytest.mark.slow]),  # 8-bit latent rows are for a CPU
    *slow_but([kind for kind in KINDS if kind != "latent, int8"], *QUICK_KINDS),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ON_THIS_DEVICE)
def test_restored_blocks_have_the_same_bits_after_a_restart(kind: str, models: Models, tmp_path: Path) -> None:
    model, options, fields = kind_of_keys(kind, models)
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
        if kind == "draft model":
            assert stats.spec_decode_num_accepted_tokens > 0.9 * stats.spec_decode_num_draft_tokens
    if kind != "draft model":  # a row of several is not recorded as one of its own
        assert same_bits(first, right) and same_bits(again, right)
    assert first.token_ids == again.token_ids == right.token_ids


def test_generated_tokens_are_restored(engine: Engine, models: Models) -> None:
    with engine() as core:
        first = ask(core, max_tokens=40)
    longer = [*PROMPT, *first.token_ids, *tokens(5)]
    right = ask(oracle(models), longer)
    with engine() as core:
        again = ask(core, longer)
    assert cached(again) == (len(PROMPT) + 39) // 16 * 16 and same_bits(again, right)


def to_link(file: Path) -> None:
    file.rename(file.with_name("moved"))
    file.symlink_to("moved")


def to_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(file.parent):  # its whole path would be too long
        made.bind(file.name)


INVALID_ENTRIES: dict[
    str, Callable[[Path], object]
] = {  # in place of a block's file, which is removed before all but a link
    "directory": Path.mkdir,
    "link": to_link,
    "link to nothing": lambda file: file.symlink_to("nothing"),
    "link to itself": lambda file: file.symlink_to(file),
    "directory with files": lambda file: (file / "other").mkdir(parents=True),
    "pipe": os.mkfifo,
    "socket": to_socket,
    "empty": Path.touch,
    "short": lambda file: file.write_bytes(bytes(100)),
    "huge": lambda file: (file.touch(), os.truncate(file, 1 << 42)),
    "other name": lambda file: file.with_name("0" * 64 + "-9.safetensors").touch(),
    "unreadable": lambda file: (file.touch(), file.chmod(0)),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("appears", ["before", "during"])
@pytest.mark.parametrize("kind", INVALID_ENTRIES)
def test_an_invalid_entry_disables_one_block(
    kind: str, appears: str, engine: Engine, models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = ask(oracle(models))
    with engine() as core:
        ask(core)
    by_index = sorted(files_in(tmp_path), key=lambda file: -file.stat().st_mtime_ns)
    file = by_index[3]

    def replace_file() -> None:
        if kind != "link":
            file.unlink()
        INVALID_ENTRIES[kind](file)

    if appears == "before":
        replace_file()
    with engine() as core:
        if appears == "during":
            replace_file()
        again = ask(core)
        assert cached(again) == 3 * 16 and same_bits(again, right)
        other = tokens(64)
        ask(core, other)
        eventually(lambda: not core.stats().persist.waiting_blocks, 30)  # all others are written, one after another
        assert core.stats().persist.failures == ("directory" in kind)
    assert sum("a directory has the name" in record.message for record in caplog.records) == ("directory" in kind)
    assert len(caplog.records) == ("directory" in kind)
    with engine() as core:
        assert cached(ask(core, other)) == 48  # the last block is computed
        again = ask(core)
        assert cached(again) == (48 if "directory" in kind else FULL) and same_bits(again, right)


@pytest.mark.slow
def test_passages_are_restored_at_any_offset_within_their_scope(engine: Engine) -> None:
    document = tokens(70)
    source, turned = [*tokens(7), *document, *tokens(4)], [*tokens(19), *document, *tokens(6)]
    offer = NonPrefixReuseParams(0, scope="me")
    options: dict[str, Any] = {"deterministic": False, "max_num_batched_tokens": 40}
    with engine(**options) as core:
        ask(core, source)  # stored outside the scope
        ask(core, source, reuse=offer)
    with engine(**options) as core:
        assert cached(ask(core, turned, reuse=NonPrefixReuseParams(32, scope="you"))) == 0
    for number in range(2):  # the second finds what the first stored at another offset
        with engine(**options) as core:
            again = ask(core, [*tokens(5 + number), *turned], reuse=NonPrefixReuseParams(32, scope="me"))
            assert 70 <= cached(again) == core.stats().reused_tokens
            assert core.stats().persist.restored_tokens >= 80


@pytest.mark.slow
def test_adapters_are_distinguished_by_their_weights(models: Models, tmp_path: Path) -> None:
    """Their ids start at 0 in every server."""
    one, other = (save_adapter(tmp_path / name, models["llama"], seed=seed) for seed, name in enumerate("ab"))

    def asked(adapter: Path) -> Finished:
        with keeping(models["llama"], tmp_path / "kept", lora=(AdapterSource(0, "it", str(adapter)),)) as core:
            return ask(core, adapter=0)

    first, foreign, again = asked(one), asked(other), asked(one)
    assert (cached(first), cached(foreign), cached(again)) == (0, 0, FULL)
    assert same_bits(first, again) and not same_bits(first, foreign)


def rewrite(model: Path, target: Path) -> None:
    """Write other weights with the same names, sizes and times."""
    shutil.copytree(model, target, dirs_exist_ok=True)
    file = target / "model.safetensors"
    before = file.stat()
    weights = load_file(file)
    weights["model.layers.2.mlp.down_proj.weight"][3, 5] += 1.0
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_blocks_of_a_model_with_one_changed_weight_are_not_used(models: Models, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("change", slow_but(CHANGES, "cache dtype", "scaling"))
def test_blocks_under_other_options_are_not_used(change: str, models: Models, tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "kept"
    shutil.copytree(models["llama"], model)
    with keeping(model, folder) as core:
        ask(core)
    config, options, fields = CHANGES[change]
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with keeping(model, folder, **options) as core:
        assert cached(ask(core, **fields)) == 0 and core.stats().persist.read_blocks == 0


@pytest.mark.slow
def test_damaged_files_are_skipped_counted_and_written_again(engine: Engine, tmp_path: Path) -> None:
    with engine() as core:
        right = ask(core)
    files = files_in(tmp_path)
    with engine() as core:  # it has read their names; then their contents change
        for number, file in enumerate(files):
            data = bytearray(file.read_bytes())
            if number % 3 == 0:
                file.write_bytes(data[: len(data) // 2])
            elif number % 3 == 1:
                data[len(data) * 2 // 3] ^= 4
                file.write_bytes(data)
            else:
                file.write_bytes(files[0].read_bytes())  # of another block
        again = ask(core)
        written(core)
        stats = core.stats().persist
        assert same_bits(again, right) and cached(again) == 0
        assert stats.damaged_blocks + stats.foreign_blocks >= 1 and stats.read_blocks == 0
    with engine() as core:
        ask(core)
        assert core.stats().persist.read_blocks >= 1


@pytest.mark.slow
def test_a_damaged_file_ends_the_restored_prefix(engine: Engine, tmp_path: Path) -> None:
    with engine() as core:
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
        with engine() as core:
            again = ask(core)
            written(core)
            assert (cached(again), core.stats().persist.damaged_blocks) == (expected, damaged)
            assert same_bits(again, right)


def test_a_file_of_another_block_is_foreign(engine: Engine, tmp_path: Path) -> None:
    with engine() as core:
        right = ask(core)
    files = files_in(tmp_path)
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    with engine() as core:
        again = ask(core)
        assert same_bits(again, right) and cached(again) == 0 and core.stats().persist.foreign_blocks == 1


@pytest.mark.slow
def test_a_file_of_another_namespace_is_foreign(engine: Engine, tmp_path: Path) -> None:
    """A renamed file still names its own namespace."""
    with engine() as core:
        right = ask(core)
    (here,) = tmp_path.iterdir()
    there = tmp_path / "0123456789abcdef0123456789abcdef"
    here.rename(there)
    with engine(kv_persist_size=1 << 30) as core:
        written(core)
    for file in there.iterdir():
        data = file.read_bytes()
        (here / file.name).write_bytes(data.replace(here.name.encode(), there.name.encode()))
    with engine() as core:
        again = ask(core)
        assert same_bits(again, right) and cached(again) == 0 and core.stats().persist.foreign_blocks == 1


@pytest.mark.slow
def test_two_engines_share_a_folder(engine: Engine, models: Models) -> None:
    right = ask(oracle(models))
    with engine() as one, engine() as other:
        ask(one)
        written(one)
        eventually(lambda: other.stats().persist.known_blocks >= FULL // 16, 30)  # it scans the folder at intervals
        got = ask(other)
        assert cached(got) == FULL and same_bits(got, right)
        assert other.stats().persist.written_blocks == 0


def test_evicted_blocks_are_restored(engine: Engine, models: Models) -> None:
    small = {"max_model_len": 160, "max_num_seqs": 1, "kv_cache_memory": None}
    probe = make_core(models["llama"])
    small["kv_cache_memory"] = probe.info.kv_bytes_per_token * 16 * 20
    with engine(**small) as core:
        first = ask(core)
        written(core)
        for _ in range(4):
            ask(core, tokens(150), 4)
            written(core)
        read = core.stats().persist.read_blocks
        again = ask(core)
        assert cached(again) == FULL and same_bits(again, first)
        assert core.stats().persist.read_blocks - read == FULL // 16


@pytest.mark.slow
def test_the_size_limit_holds(engine: Engine, models: Models, tmp_path: Path) -> None:
    probe = make_core(models["llama"])
    block = probe.info.kv_bytes_per_token * 16
    cap = 80 * block
    with engine(kv_persist_size=cap) as core:
        for _ in range(12):
            ask(core, tokens(200), 2)
            written(core)
            assert sum(file.stat().st_size for file in files_in(tmp_path)) <= cap
        stats = core.stats().persist
        assert stats.evicted_blocks > 40 and stats.known_blocks <= 80
        eventually(lambda: core.stats().persist.known_blocks == len(files_in(tmp_path)), 30)


def test_a_full_disk_is_logged_once_and_the_engine_continues(
    engine: Engine, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = ask(oracle(models))
    write, full = os.write, threading.Event()

    def limited(number: int, data: Any) -> int:
        if full.is_set():
            raise OSError(28, "No space left on device")
        return write(number, data)

    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr("windlass.engine.cache.block_store._MIN_BACKOFF", 0.05)
    monkeypatch.setattr("windlass.engine.cache.block_store._MAX_BACKOFF", 0.05)
    full.set()
    with caplog.at_level(logging.WARNING), engine() as core:
        assert same_bits(ask(core), right)
        eventually(lambda: core.stats().persist.failures >= 3, 30)
        assert len(caplog.records) == 1 and "No space left on device" in caplog.text
        assert files_in(tmp_path) == [] and not list(tmp_path.glob("*/.*"))
        full.clear()  # there is space again
        eventually(lambda: not core.stats().persist.waiting_blocks, 30)
        assert core.stats().persist.written_blocks >= FULL // 16
        assert len(caplog.records) == 2 and "resolved: " in caplog.text


@pytest.mark.slow
def test_an_engine_continues_after_its_folder_is_deleted(models: Models, tmp_path: Path) -> None:
    with keeping(models["llama"], tmp_path / "kept") as core:
        right = ask(core)
        written(core)
    with keeping(models["llama"], tmp_path / "kept") as core:
        shutil.rmtree(tmp_path / "kept")
        again = ask(core)
        assert same_bits(again, right) and cached(again) == 0
        eventually(lambda: core.stats().persist.known_blocks == 0, 30)


def test_requests_aborted_while_blocks_are_read_leave_nothing(engine: Engine) -> None:
    with engine() as core:
        right = ask(core)
    with engine() as core:
        for number in range(5):
            core.add(greedy(str(number), PROMPT, 12))
        core.step()  # they wait for their blocks
        assert all(seq.fetch is not None for seq in core.scheduler.live_sequences()[:1])
        for number in range(5):
            core.abort(str(number))
        assert not core.has_work()
        assert same_bits(ask(core), right)
        eventually(lambda: core._store.transfer._staged == {}, 30)


def test_blocks_wanted_by_several_requests_are_read_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, read = threading.Event(), BlockDirectory.read
    monkeypatch.setattr(BlockDirectory, "read", lambda *given: read(*given) if gate.wait(60) else None)
    monkeypatch.setattr("windlass.engine.scheduling.kv_restore._GRACE_SECONDS", 60.0)
    longer = [*PROMPT[:64], *tokens(60)]
    with engine() as core:
        right = {"a": ask(core), "b": ask(core, longer)}
    with engine() as core:
        requests = [
            greedy(f"{name}{number}", prompt, 12)
            for number in range(3)
            for name, prompt in (("a", PROMPT), ("b", longer))
        ]
        for request in requests:
            core.add(request)
        core.step()  # all have searched
        core.abort("a0")  # the others wait for its blocks
        gate.set()
        got = run(core, [])
        assert len(got) == 5
        for (name, _), one in got.items():
            assert one.token_ids == right[name[0]].token_ids and cached(one) == (FULL if name[0] == "a" else 112)
        assert core.stats().persist.read_blocks == FULL // 16 + 3
        assert core.scheduler._kv_restorer.fetches == [] and core._store.transfer._staged == {}


def test_blocks_on_a_slow_disk_are_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as core:
        right = ask(core)
    proceed = threading.Event()
    monkeypatch.setattr(BlockDirectory, "read", lambda *_: proceed.wait() and None)
    monkeypatch.setattr("windlass.engine.scheduling.kv_restore._GRACE_SECONDS", 0.1)
    try:
        with engine() as core:
            got = ask(core)
            assert same_bits(got, right) and cached(got) == 0
            proceed.set()
    finally:
        proceed.set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_caching": False}, "which requires `cache.prefix_caching`"),
        ({"kv_persist_size": 1000}, "`cache.persist_size` is 0.0 MiB, and 64 blocks of this model take .*: raise it"),
        ({"kv_persist_size": 0}, "`cache.persist_size` must be at least 1"),
    ],
)
def test_persist_options_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=message):
        make_core(models["llama"], kv_persist=str(tmp_path), **options)


def test_a_size_limit_without_a_folder_is_refused(models: Models) -> None:
    with pytest.raises(LoadError, match=r"name one with `cache\.persist`"):
        make_core(models["llama"], kv_persist_size=1 << 30)


def test_unusable_folders_are_refused(models: Models, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="is a file: give a folder"):
        make_core(models["llama"], kv_persist=str(tmp_path / "file"))
    with pytest.raises(LoadError, match=r"cannot be written to \(Not a directory\)"):
        make_core(models["llama"], kv_persist=str(tmp_path / "file" / "below"))
    with pytest.raises(LoadError, match="cannot be written to"):
        make_core(models["llama"], kv_persist="/proc/windlass")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LoadError, match=r"is writable for other users.*chmod 700"):
        make_core(models["llama"], kv_persist=str(tmp_path / "open"))
    with keeping(models["llama"], tmp_path / "new" / "one"):
        assert (tmp_path / "new" / "one").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@ON_A_CPU  # whose threads copy blocks during steps that write to them
def test_a_block_evicted_while_it_is_copied_is_not_written(
    engine: Engine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_block, copied, asked = CPUBlockTransfer.read_block, list[int](), list[int]()
    prompts = [tokens(130) for _ in range(12)]

    def slow(pages: CPUBlockTransfer, group: int, block: int, full_since: float) -> list[Any]:
        first = read_block(pages, group, block, full_since)
        if len(copied) % 3 == 0:  # until other tokens are in the block
            seen = len(asked)
            eventually(lambda: len(asked) in (*range(seen + 3, 99), len(prompts)), 60)
        copied.append(block)
        second = read_block(pages, group, block, full_since)
        return [*first[:1], *second[1:]]  # old keys and new values

    monkeypatch.setattr(CPUBlockTransfer, "read_block", slow)
    small = {"max_model_len": 160, "max_num_seqs": 2}
    small["kv_cache_memory"] = make_core(models["llama"]).info.kv_bytes_per_token * 16 * 22
    right = [ask(oracle(models), prompt, 4) for prompt in prompts]
    with engine(**small) as core:
        for prompt, wanted in zip(prompts, right, strict=True):
            assert same_bits(ask(core, prompt, 4), wanted)
            asked.append(1)
        assert core.stats().persist.lost_blocks > 0
    monkeypatch.undo()
    with engine() as core:
        got = [ask(core, prompt, 4) for prompt in prompts]
        assert all(same_bits(one, wanted) for one, wanted in zip(got, right, strict=True))
        assert sum(cached(one) for one in got) > 0


@pytest.fixture
def slow_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe that is hashed with the weights, and cannot be read before it is written."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(engine_builder, "weight_files", lambda directory: [*weight_files(directory), pipe])
    return pipe


def test_blocks_are_written_if_the_engine_ends_before_its_folder_is_open(
    models: Models, slow_weights: Path, tmp_path: Path
) -> None:
    core = make_core(models["llama"], deterministic=True, kv_persist=str(tmp_path / "kept"))
    assert cached(ask(core)) == 0 and not files_in(tmp_path / "kept")
    threading.Timer(0.3, slow_weights.write_bytes, [b"late"]).start()
    core.close()
    assert len(files_in(tmp_path / "kept")) >= FULL // 16


@pytest.mark.slow
def test_the_first_request_of_a_prepared_engine_finds_stored_blocks(
    models: Models, slow_weights: Path, tmp_path: Path
) -> None:
    for expected in (0, FULL):
        core = make_core(models["llama"], deterministic=True, kv_persist=str(tmp_path / "kept"))
        threading.Timer(0.3, slow_weights.write_bytes, [b"late"]).start()
        core.prepare()
        assert cached(ask(core)) == expected
        core.close()


OFFER, ANY = NonPrefixReuseParams(0, scope="me"), NonPrefixReuseParams(32, scope="me")


def contents(folder: Path) -> dict[str, str]:
    """A digest of each file without its header, by name."""
    found = {}
    for file in files_in(folder):
        data = file.read_bytes()
        found[file.name] = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    return found


def restore_late(core: EngineCore, puts: list[int]) -> None:
    """Restore blocks together, into the cache, once the thread that writes files has finished all work queued by
    then."""
    store = core._store
    pages, write_queue = store.transfer, store._write_queue
    put, take, taken = pages.put, write_queue.take, list[float]()

    def late(loaded: Sequence[LoadedBlock]) -> None:
        if loaded:
            eventually(lambda: not len(write_queue), 30)
            count = len(taken)
            eventually(lambda: len(taken) > count, 30)  # what it took before is written
        puts.append(len(loaded))
        put(loaded)

    def all_read(fetches: Sequence[Fetch], seconds: float) -> bool:
        eventually(lambda: all(fetch.is_done for fetch in fetches), 30)
        return True

    def counted(seconds: float) -> Any:
        taken.append(seconds)
        return take(seconds)

    pages.put, write_queue.take, store.reader.wait = late, counted, all_read


@pytest.mark.slow
def test_a_restored_block_is_written_again_only_after_its_bytes_have_arrived(tmp_path: Path) -> None:
    model, folder = make_model("llama", tmp_path / "model"), tmp_path / "kept"
    options: dict[str, Any] = {"max_model_len": 256, "deterministic": False}
    prefix, passage = tokens(64), tokens(48)
    with keeping(model, folder, **options) as core:
        right = ask(core, [*prefix, 5, 6, 7], 6)  # in files that no scope finds
        ask(core, [*tokens(16), *passage, *tokens(9)], 1, reuse=OFFER)
    before, puts = contents(folder), list[int]()
    with keeping(model, folder, **options) as core:
        restore_late(core, puts)
        both = ask(core, [*prefix, *passage, 9, 9], 4, reuse=ANY).outputs[-1]
        assert both.context is not None and both.context.reused_tokens == 48 and both.cached_tokens == 64 + 48
    assert puts == [4 + 3]
    assert before.items() <= contents(folder).items()
    with keeping(model, folder, **options) as core:
        again = ask(core, [*prefix, 5, 6, 7], 6)
        assert again.outputs[-1].cached_tokens == 64 and again.token_ids == right.token_ids
        # Restored blocks are found in the scope from then on.
        moved = ask(core, [*tokens(16), *prefix, 9, 9], 4, reuse=ANY).outputs[-1]
        assert moved.context is not None and moved.context.reused_tokens == 64
