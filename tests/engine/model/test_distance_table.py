"""Distance-based attention compared with a table of distances in float64: compiled kernels, plain torch, drafts, exact bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.distance_oracle import Distance, DistanceOracle, dual_chunk, log_n, rerope, self_extend
from helpers.cpu_kernels import choose
from helpers.device import DEVICE
from helpers.engines import Finished, greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling, resolve

TRAINED = 64
PROMPT = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(7)).tolist()
MADE = 20

# Each with its distances, and the length from which scores grow.
KINDS: dict[str, tuple[dict[str, Any], Distance | None, int | None]] = {
    "defaults": ({"rope_type": "dual_chunk"}, dual_chunk(40, 48), None),
    "small chunks": ({"rope_type": "dual_chunk", "chunk_size": 25, "local_size": 8}, dual_chunk(17, 25), None),
    "yarn": ({"rope_type": "dual_chunk", "chunk_size": 90, "local_size": 50, "factor": 2}, dual_chunk(40, 90), None),
    "all": (
        {"rope_type": "dual_chunk", "chunk_size": 42, "local_size": 9, "log_n": True, "length_scores": True},
        dual_chunk(33, 42),
        TRAINED,
    ),
    "self_extend": ({"rope_type": "self_extend"}, self_extend(4, 16), None),
    "threes": ({"rope_type": "self_extend", "group_size": 3, "window": 20, "log_n": True}, self_extend(3, 20), TRAINED),
    "rerope": ({"rope_type": "rerope"}, rerope(32), None),
    "leaky": ({"rope_type": "rerope", "window": 23, "factor": 5.5}, rerope(23, 5.5), None),
    "log_n": ({"rope_type": "log_n", "original_max_position_embeddings": 40}, None, 40),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=TRAINED)


@pytest.fixture(params=["compiled", "plain torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain torch":
        if DEVICE != "cpu":
            pytest.skip("of kernels for a CPU")
        choose(monkeypatch, "turned off by this test")
    return str(request.param)


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 256, "max_num_batched_tokens": 37, **options})


def asked(kind: str, prompt: list[int] = PROMPT) -> EngineRequest:
    scaling = None if kind == "plain" else RopeScaling.from_dict(KINDS[kind][0])
    return greedy(kind, prompt, MADE, rope_scaling=scaling)


def right_logits(model: Path, core: EngineCore, kind: str, tokens: list[int], **options: bool) -> torch.Tensor:
    """Return the logits of every token by the table, with the frequencies inside of chunks."""
    fields, distance, logarithm = KINDS.get(kind, ({}, None, None))
    inside = {"rope_type": "yarn", "factor": fields["factor"]} if kind == "yarn" else {"rope_type": "default"}
    spec = resolve(RopeScaling.from_dict(inside), core.info.model_rotary_groups[0].base, 1)
    longest = TRAINED * 2 ** (math.ceil(4 * math.log2(len(tokens) / TRAINED)) / 4)  # prompt and output, on the grid
    factor = 0.1 * math.log(longest / TRAINED) + 1 if fields.get("length_scores") else 1.0
    grows = log_n(logarithm) if logarithm else lambda i: 1.0
    given: dict[str, Any] = {**options, **({"distance": distance} if distance else {})}
    oracle = DistanceOracle(
        model, spec.inv_freq, growth=lambda i: factor * grows(i), rotary_scale=spec.rotary_scale, **given
    )
    return oracle.logits(tokens)


def check(got: Finished, prompt: list[int], right: torch.Tensor) -> None:
    right = right[len(prompt) - 1 : len(prompt) - 1 + len(got.logits)]
    assert (torch.stack(got.logits) - right).abs().max() / right.abs().max() < 1e-5
    assert got.token_ids == right.argmax(-1).tolist()


def test_logits_equal_the_table(kernels: str, model: Path) -> None:
    core = core_of(model)
    assert core.runner.decoder.backend.explain().startswith("plain torch") == (kernels == "plain torch")
    for kind in KINDS:
        got = run(core, [asked(kind)])[kind, 0]
        check(got, PROMPT, right_logits(model, core, kind, PROMPT + got.token_ids))


def test_one_key_head_equals_the_table(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path, max_position_embeddings=TRAINED, num_key_value_heads=1)
    core = core_of(model)
    got = run(core, [asked("all")])["all", 0]
    check(got, PROMPT, right_logits(model, core, "all", PROMPT + got.token_ids))


@pytest.mark.parametrize("family", ["gemma", "olmo2", "granite", "exaone4_full"])
def test_families_with_other_query_norms_equal_the_table(family: str, tmp_path: Path) -> None:
    """Norm offsets, norms over all heads, a separate scale, and norms per head after the projections."""
    model = make_model(family, tmp_path, max_position_embeddings=TRAINED)
    core = core_of(model)
    got = run(core, [asked("small chunks")])["small chunks", 0]
    check(got, PROMPT, right_logits(model, core, "small chunks", PROMPT + got.token_ids))


@pytest.mark.parametrize("kind", ["small chunks", "threes", "leaky"])
def test_latent_attention_equals_the_table(kind: str, tmp_path: Path) -> None:
    model = make_model("deepseek_v3_half", tmp_path, max_position_embeddings=TRAINED)
    core = core_of(model)
    got = run(core, [asked(kind)])[kind, 0]
    check(got, PROMPT, right_logits(model, core, kind, PROMPT + got.token_ids, rotated_last=True))


def crowd() -> list[EngineRequest]:
    """Requests of every kind and of several lengths."""
    return [asked(kind, PROMPT[: 150 - 13 * n]) for n, kind in enumerate([*KINDS, "plain"])]


def test_all_kinds_in_one_batch_equal_the_table(kernels: str, model: Path) -> None:
    core = core_of(model, max_num_seqs=16)
    got = run(core, crowd())
    for request in crowd():
        prompt, found = list(request.prompt_token_ids), got[request.request_id, 0]
        check(found, prompt, right_logits(model, core, request.request_id, prompt + found.token_ids))


@pytest.mark.parametrize("pages", ["auto", "int8"])
def test_deterministic_bits_in_any_chunks_and_batches(pages: str, model: Path) -> None:
    fixed = {"deterministic": True, "max_num_seqs": 16, "kv_cache_dtype": pages, "prefix_caching": False}
    together = run(core_of(model, **fixed), crowd())
    for budget in (16, 2048):
        core = core_of(model, **fixed, max_num_batched_tokens=budget)
        for request in crowd():
            alone, other = run(core, [request])[request.request_id, 0], together[request.request_id, 0]
            assert torch.equal(torch.stack(alone.logits), torch.stack(other.logits)), (request.request_id, budget)


def test_draft_model_uses_the_rule(model: Path) -> None:
    """A model that is its own draft model proposes its own tokens, as long as both see keys at the same distances."""
    core = core_of(model, speculative_model=str(model), speculative_adaptive=False)
    alone = core_of(model)
    for kind in KINDS:
        before = core.stats()
        got = run(core, [asked(kind)])[kind, 0]
        assert got.token_ids == run(alone, [asked(kind)])[kind, 0].token_ids
        after = core.stats()
        proposed = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
        assert (
            proposed and after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens == proposed
        ), kind
