"""Introspection: cache snapshots compared with the block tables, and attention compared with transformers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.cache_invariants import assert_balanced
from helpers.engines import greedy, make_core, run
from helpers.little_memory import NO_ROOM
from helpers.tiny_models import make_model

from windlass.engine.core import introspection
from windlass.engine.errors import DeviceMemoryError, RequestError
from windlass.engine.interface.introspection import AttentionQuery, CacheQuery
from windlass.engine.rotary.rope_scaling import RopeScaling

IDS = torch.randint(3, 128, (48,), generator=torch.Generator().manual_seed(3)).tolist()
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=64)


@pytest.mark.parametrize("scaling", [None, LINEAR], ids=["own", "linear"])
def test_attention_is_that_of_transformers_while_others_run(model: Path, scaling: dict[str, object] | None) -> None:
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


def test_what_cannot_be_shown_is_refused(model: Path) -> None:
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


def test_no_memory_for_a_picture_is_told_to_whoever_looks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(model)

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError(NO_ROOM)

    with monkeypatch.context() as patched:
        patched.setattr(introspection, "snapshot_attention", fails)
        with pytest.raises(DeviceMemoryError, match="this picture"):
            core.inspect(AttentionQuery(tuple(IDS), 0, 0))
    assert core.inspect(AttentionQuery(tuple(IDS), 0, 0)).num_layers


def test_the_cache_is_shown_as_it_is(model: Path) -> None:
    core = make_core(model, block_size=16)
    core.add(greedy("a", IDS, 8))
    core.step()
    picture = core.inspect(CacheQuery())
    (group,), (sequence,) = picture.groups, picture.sequences
    assert picture.block_size == 16 and sum(group.held) == sequence.num_blocks == core.blocks.num_used_blocks
    assert (sequence.num_prompt_tokens, sequence.num_tokens, sequence.num_cached_tokens) == (48, 49, 0)
    assert group.owners.count(0) == len(core.scheduler.running[0].cache.tables[0].blocks)
    while core.has_work():
        core.step()
    picture = core.inspect(CacheQuery())
    assert picture.sequences == () and sum(picture.groups[0].held) == 0 and sum(picture.groups[0].idle) == 3
    assert_balanced(core.blocks)
