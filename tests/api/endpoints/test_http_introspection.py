"""`/v1/cache`, `/v1/attention` and `/v1/rotary/curves` with a scripted engine: contents, permissions and limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.live_server import Live, live_server
from helpers.rotary_formulas import by_formula
from helpers.scripted_engine import ROTARY, ScriptedEngine, model_info

from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.outputs import EngineStats
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup

ATTENTION, CURVES = "/v1/attention", "/v1/rotary/curves"
YARN = {"rope_type": "yarn", "factor": 4.0}


# ---- the cache -------------------------------------------------------------------------------------------------------
def test_pages_and_counters_of_the_cache(live: Live) -> None:
    live.engine.engine_stats = EngineStats(num_running=1, prefix_cache_queries=40, prefix_cache_hits=16)
    live.wait(lambda: live.http.get("/v1/cache").json()["counters"]["num_running"] == 1)
    shown = live.http.get("/v1/cache").json()
    (group,) = shown["groups"]
    assert (group["held"], group["shared"], group["idle"], group["owners"]) == (
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, -1, -1],
    )
    assert shown["sequences"][0]["num_cached_tokens"] == 16 and shown["counters"]["prefix_cache_hits"] == 16
    assert (shown["block_size"], shown["bytes_per_token"]) == (16, 64)


def test_concurrent_requests_share_one_answer() -> None:
    with live_server() as live:
        times = {live.http.get("/v1/cache").json()["time"] for _ in range(8)}
        assert len(times) < 8
        live.wait(lambda: live.http.get("/v1/cache").json()["time"] not in times)


def test_unavailable_without_an_engine() -> None:
    with live_server(ScriptedEngine(info=None, state="starting")) as live:
        assert live.http.get("/v1/cache").status_code == 503


# ---- attention -------------------------------------------------------------------------------------------------------
def test_attention_maps_are_off_by_default(live: Live) -> None:
    error = live.refuse(ATTENTION, {"prompt": "hello"}, 403)
    assert error["code"] == "attention_off" and "--attention-maps" in error["message"]


def test_attention_map_and_its_means() -> None:
    with live_server(attention_maps=True) as live:
        shown = live.post(ATTENTION, {"prompt": "hello", "layer": 1, "head": 3, "rope_scaling": YARN}).json()
        (question,) = live.engine.attention
        assert (question.layer, question.head, question.rope_scaling) == (1, 3, RopeScaling.from_dict(YARN))
        count = len(shown["tokens"])
        assert shown["tokens"] == list(question.token_ids) == live.tokenizer.encode("hello", add_special_tokens=True)
        assert [len(row) for row in shown["weights"]] == list(range(1, count + 1))
        assert shown["weights"][2] == pytest.approx([1 / 3] * 3) and shown["scores"][2] == [-2, -1, 0]
        assert shown["score_by_distance"] == [-back for back in range(count)]
        rows = [[1 / (i + 1)] * (i + 1) for i in range(count)]
        assert shown["weight_by_distance"] == pytest.approx(
            [np.mean([rows[i][i - back] for i in range(back, count)]) for back in range(count)]
        )
        again = live.post(ATTENTION, {"tokens": shown["tokens"], "layer": 1, "head": 3, "rope_scaling": YARN}).json()
        assert again == shown


def test_adapters_are_refused() -> None:
    sources = (AdapterSource(1, "poet", "/poet"),)
    with live_server(attention_maps=True, adapters=sources, max_loras=1) as live:
        assert live.refuse(ATTENTION, {"prompt": "hello", "model": "poet"})["param"] == "model"


# ---- curves ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "scaling", [None, YARN, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}]
)
def test_curves_match_the_formulas(live: Live, scaling: dict[str, Any] | None) -> None:
    positions, distances, length = [0, 1, 7, 100_000], [0, 1, 5, 77, 4000], 500
    body = {"rope_scaling": scaling, "positions": positions, "distances": distances, "length": length}
    shown = live.post(CURVES, body).json()
    base = ROTARY[0].base
    w, _ = by_formula(scaling or {"rope_type": "default"}, length, base)
    for row, position in enumerate(positions):
        assert shown["cos"][row] == pytest.approx([math.cos(position * x) for x in w], abs=1e-9)
        assert shown["sin"][row] == pytest.approx([math.sin(position * x) for x in w], abs=1e-9)
    pairs = len(w)
    for place, distance in enumerate(distances):
        partial = [
            abs(sum(complex(math.cos(distance * x), math.sin(distance * x)) for x in w[:j]))
            for j in range(1, pairs + 1)
        ]
        assert shown["decay_bound"][place] == pytest.approx(sum(partial) / pairs / ((pairs + 1) / 2), abs=1e-12)
        assert shown["mean_cosine"][place] == pytest.approx(sum(math.cos(distance * x) for x in w) / pairs, abs=1e-12)
    assert shown["slow_pairs"] == sum(2 * math.pi / x > base.trained_len for x in w)
    assert (shown["trained_length"], shown["rotary_dim"]) == (128, 16)
    assert (
        shown["fingerprint"]
        == live.post("/v1/rotary/inspect", {"rope_scaling": scaling, "length": length}).json()["fingerprint"]
    )


def test_a_group_is_chosen_by_name() -> None:
    groups = (ROTARY[0], RotaryGroup("sliding_attention", RotaryBase(100.0, 16, 16, 128), RopeScaling()))
    with live_server(ScriptedEngine(info=model_info(rotary_groups=groups, model_rotary_groups=groups))) as live:
        shown = live.post(CURVES, {"group": "sliding_attention", "positions": [1]}).json()
        assert shown["cos"][0] == pytest.approx([math.cos(100.0 ** (-2 * j / 16)) for j in range(8)])
        assert live.refuse(CURVES, {"group": "other"})["param"] == "group"
        assert live.refuse(CURVES, {"positions": [0] * 129})["param"] == "positions"
        assert live.refuse(CURVES, {"distances": [-1]})["param"].startswith("distances")


def test_the_text_of_single_tokens(live: Live) -> None:
    ids = live.tokenizer.encode("hello wörld", add_special_tokens=False)
    shown = live.post("/detokenize", {"tokens": ids, "return_token_strs": True}).json()
    assert shown["token_strs"] == [live.tokenizer.token_text(token) for token in ids]
