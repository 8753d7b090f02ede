"""Introspection: cache occupancy against a count of every block, and attention against transformers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_helpers.cached_sequence import CachedSequence
from helpers.cache_invariants import assert_balanced
from helpers.engines import greedy, make_core, run
from helpers.little_memory import NO_ROOM
from helpers.tiny_models import make_model

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.core import introspection
from windlass.engine.core.introspection import snapshot_cache
from windlass.engine.errors import DeviceMemoryError, RequestError
from windlass.engine.execution.attention_maps import attention_weights
from windlass.engine.interface.introspection import MAX_CACHE_CELLS, AttentionQuery, CacheQuery
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer

IDS = torch.randint(3, 128, (48,), generator=torch.Generator().manual_seed(3)).tolist()
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=64)


@pytest.mark.parametrize("scaling", [None, LINEAR], ids=["own", "linear"])
def test_attention_equals_transformers_while_others_run(model: Path, scaling: dict[str, object] | None) -> None:
    config = transformers.AutoConfig.from_pretrained(model)
    if scaling is not None:
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **scaling}
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = reference.eval()(torch.tensor([IDS]), output_attentions=True).attentions
    core = make_core(model, dtype="float32")
    others = [greedy("a", IDS[:20], 12), greedy("b", IDS[5:40], 12)]
    plain = run(core, others)
    for request in others:
        core.add(request)
    asked = None if scaling is None else RopeScaling.from_dict(scaling)
    drawn: dict[str, list[int]] = {"a": [], "b": []}
    for layer, weights in enumerate(wanted):
        for output in core.step():  # others continue between the queries
            drawn[output.request_id] += output.token_ids
        for head in range(weights.shape[1]):
            picture = core.inspect(AttentionQuery(tuple(IDS), layer, head, asked))
            found = torch.tensor(struct.unpack(f"{len(IDS) ** 2}f", picture.weights)).view(len(IDS), len(IDS))
            torch.testing.assert_close(found, weights[0, head], atol=2e-5, rtol=1e-4)
            scores = torch.tensor(struct.unpack(f"{len(IDS) ** 2}f", picture.scores)).view(len(IDS), len(IDS))
            torch.testing.assert_close(scores.softmax(-1), weights[0, head], atol=2e-5, rtol=1e-4)
            assert (picture.num_layers, picture.num_heads) == (len(wanted), weights.shape[1])
            assert picture.rows(picture.weights)[3] == found[3, :4].tolist()
    while core.has_work():
        for output in core.step():
            drawn[output.request_id] += output.token_ids
    assert drawn == {name: plain[name, 0].token_ids for name in drawn}


def test_attention_queries_out_of_range_are_refused(model: Path) -> None:
    core = make_core(model)
    for layer, head, ids, param in (
        (9, 0, IDS, "layer"),
        (0, 99, IDS, "head"),
        (0, 0, IDS[:1], "prompt"),
        (0, 0, [5] * 257, "prompt"),
    ):
        with pytest.raises(RequestError) as caught:
            core.inspect(AttentionQuery(tuple(ids), layer, head))
        assert caught.value.param == param


def test_attention_without_memory_fails_only_the_query(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(model)

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError(NO_ROOM)

    with monkeypatch.context() as patched:
        patched.setattr(introspection, "snapshot_attention", fails)
        with pytest.raises(DeviceMemoryError, match="this picture"):
            core.inspect(AttentionQuery(tuple(IDS), 0, 0))
    assert core.inspect(AttentionQuery(tuple(IDS), 0, 0)).num_layers


def test_cache_query_equals_the_block_tables(model: Path) -> None:
    core = make_core(model, block_size=16)
    core.add(greedy("a", IDS, 8))
    core.step()
    snapshot = core.inspect(CacheQuery())
    (group,), (sequence,) = snapshot.groups, snapshot.sequences
    assert snapshot.block_size == 16 and sum(group.held) == sequence.num_blocks == core.blocks.num_used_blocks
    assert (sequence.num_prompt_tokens, sequence.num_tokens, sequence.num_cached_tokens) == (48, 49, 0)
    assert group.owners.count(0) == len(core.scheduler.running[0].cache.tables[0].blocks)
    while core.has_work():
        core.step()
    snapshot = core.inspect(CacheQuery())
    assert snapshot.sequences == () and sum(snapshot.groups[0].held) == 0 and sum(snapshot.groups[0].idle) == 3
    assert_balanced(core.blocks)


SIZE = 4


@pytest.mark.parametrize("num_blocks", [40, 300, 5000])
def test_cache_snapshot_counts_every_block_once(num_blocks: int) -> None:
    manager = BlockManager([KVGroupLayout(num_blocks, None, (0,))], SIZE)
    shared = range(3 * SIZE)
    texts = (range(100, 100 + 5 * SIZE), [*shared, 50, 51], [*shared, *range(60, 60 + (num_blocks - 12) * SIZE)])
    gone, first, second = (CachedSequence(manager, text) for text in texts)
    for sequence in (gone, first, second):
        sequence.start()
        sequence.compute()
    gone.free()
    (drawn,) = snapshot_cache(manager, [first.cache, second.cache])
    pool = manager.pools[0]
    per = drawn.blocks_per_cell
    assert len(drawn.held) <= MAX_CACHE_CELLS and (drawn.num_blocks, drawn.window) == (num_blocks, None)
    assert len(drawn.held) * per >= drawn.num_shown > 0
    assert all(
        pool.ref_counts[block] == 0 and pool.digests[block] is None for block in range(drawn.num_shown, num_blocks)
    )
    for cell, counts in enumerate(zip(drawn.held, drawn.shared, drawn.idle, strict=True)):
        blocks = range(cell * per, min((cell + 1) * per, num_blocks))
        refs = [pool.ref_counts[block] for block in blocks]
        idle = sum(pool.ref_counts[block] == 0 and pool.digests[block] is not None for block in blocks)
        assert counts == (refs.count(1), sum(count > 1 for count in refs), idle)
        holders = [i for i, one in enumerate((first, second)) if set(one.block_tables[0]) & set(blocks)]
        assert drawn.owners[cell] == (holders[0] if holders else -1)
    assert sum(drawn.shared) == 3 and sum(drawn.idle) == 5


def test_cache_snapshot_of_empty_and_unlisted_caches() -> None:
    manager = BlockManager([KVGroupLayout(1000, 8, (0,))], SIZE)
    (drawn,) = snapshot_cache(manager, [])
    assert (drawn.num_shown, drawn.window) == (256, 8) and sum(drawn.held + drawn.shared + drawn.idle) == 0
    sequence = CachedSequence(manager, range(SIZE))
    sequence.start()
    sequence.compute()
    (drawn,) = snapshot_cache(manager, [])
    assert sum(drawn.held) == 1 and set(drawn.owners) == {-1}


SHORT_IDS = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def load(directory: Path) -> Scorer:
    return Scorer(Scorer.load(directory, device="cpu", dtype="float32").decoder, torch.float32, chunk=16)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma4_e2b"])
def test_attention_weights_equal_transformers(family: str, tmp_path: Path) -> None:
    """With grouped heads, head norms, soft caps, windows of 8, and layers that read the keys of others."""
    scorer = load(make_model(family, tmp_path, max_position_embeddings=64))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([SHORT_IDS]), output_attentions=True).attentions
    assert len(wanted) > 1
    for layer, expected in enumerate(wanted):
        found = attention_weights(scorer, SHORT_IDS, layer)
        torch.testing.assert_close(found, expected[0], atol=2e-5, rtol=1e-4)


def test_scaled_attention_weights_leave_the_model_unchanged(tmp_path: Path) -> None:
    scorer = load(make_model("llama", tmp_path, max_position_embeddings=64))
    plain = attention_weights(scorer, SHORT_IDS, 0)
    scaled = attention_weights(scorer, SHORT_IDS, 0, RopeScaling.from_dict({"rope_type": "linear", "factor": 8}))
    assert (scaled - plain).abs().max() > 1e-3
    torch.testing.assert_close(scaled.sum(-1), torch.ones(scaled.shape[:2]))
    assert torch.equal(attention_weights(scorer, SHORT_IDS, 0), plain)


def test_attention_weights_of_unknown_layers_or_distance_rules_are_refused(tmp_path: Path) -> None:
    scorer = load(make_model("llama", tmp_path, max_position_embeddings=64))
    with pytest.raises(RequestError, match="layers 0 to"):
        attention_weights(scorer, SHORT_IDS, 99)
    with pytest.raises(RequestError, match="plain attention"):
        attention_weights(scorer, SHORT_IDS, 0, RopeScaling.from_dict({"rope_type": "rerope", "window": 8}))
