"""One request's odd numbers, a checkpoint's odd files and a long life must not harm the engine."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file

from windlass import kernels
from windlass.engine.api.request import RequestOutput
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import EngineError, LoadError
from windlass.kernels import Filters
from windlass.kernels.torch.draw import draw


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "model")


def edit_config(model: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    path = model / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))


@pytest.mark.parametrize("top_p", [1 - 2**-53, 1 - 1e-15, 1 - 1e-13])
def test_top_p_a_hair_below_one_draws(top_p: float) -> None:
    # The row's mass is summed in another order than its bins: for many rows the wanted share lies beyond the last bin.
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 10.0):
        for _ in range(40):
            logits = torch.randn(2, 1000, generator=generator) * scale
            likely = logits.argmax(-1).tolist()
            assert draw(logits.clone(), [Filters(top_p=top_p), Filters(temperature=1e-3, top_p=top_p)], [0.5, 0.5])[
                1
            ] in (
                likely[1],
                *logits[1].topk(5).indices.tolist(),
            )


def drain(core: EngineCore) -> list[RequestOutput]:
    outputs = []
    for _ in range(200):
        if not core.has_work():
            return outputs
        outputs += core.step()
    raise AssertionError("not idle")


@pytest.mark.parametrize("n", [1, 3])
def test_bad_logits_fail_only_the_request_that_asks_for_prompt_logprobs(model: Path, n: int) -> None:
    core = make_core(model, max_num_batched_tokens=12)
    expected = run(core, [greedy("fine", range(10, 40), 6)])["fine", 0].token_ids
    core.runner.decoder.embedding[5] = math.nan
    core.add(greedy("bad", [7, 8, 5, *range(9, 30)], 4, prompt_logprobs=2, n=n))
    core.add(greedy("fine", range(10, 40), 6))
    outputs = drain(core)
    failed = [output for output in outputs if output.request_id == "bad"]
    assert [type(output.error) for output in failed] == [EngineError]
    fine = [output for output in outputs if output.request_id == "fine"]
    assert [token for output in fine for token in output.token_ids] == expected
    core.blocks.assert_balanced()


def test_nothing_grows_with_the_number_of_requests(model: Path) -> None:
    core = make_core(model)
    for i in range(1000):
        core.add(greedy(str(i), [5, 6, 7], 1, deadline=1e12, repetition_penalty=1.1))
        core.abort(str(i)) if i % 10 else drain(core)
    scheduler = core.scheduler
    requests, places = scheduler._requests, scheduler._places
    held = (requests._deadlines, requests._samples, requests._sequences, places.waiting, places.running)
    assert max(map(len, held)) < 100
    assert core.runner.sampler.num_tracked <= 1 and core.runner.tables.num_live == 0


@pytest.mark.parametrize("how", ["finished", "abort", "end_sample", "deadline"])
def test_an_idle_engine_remembers_no_request(model: Path, how: str) -> None:
    core = make_core(model)
    core.add(greedy("a", range(3, 40), 3, n=2, deadline=time.monotonic() + 3600, repetition_penalty=1.1))
    core.step()
    assert len(core.runner.sequences) == core.runner.sampler.num_tracked == 2
    if how == "abort":
        core.abort("a")
    elif how == "end_sample":
        core.end_sample("a", 1)
        core.end_sample("a", 0)
    elif how == "deadline":
        core.scheduler.expire(math.inf)
        core.step()
    else:
        drain(core)
    assert not core.has_work()
    assert len(core.runner.sequences) == core.runner.sampler.num_tracked == 0
    assert len(run(core, [greedy("b", range(3, 40), 3)])["b", 0].token_ids) == 3


def test_an_early_deadline_survives_among_many_ended_requests(model: Path) -> None:
    core = make_core(model)
    core.add(greedy("late", range(3, 20), 50, deadline=0.0))
    for i in range(200):
        core.add(greedy(str(i), [5, 6, 7], 1, deadline=1e12))
        core.abort(str(i))
    assert [(output.request_id, output.finish_reason) for output in core.step()] == [("late", "timeout")]


@ON_A_CPU
@pytest.mark.skipif(not kernels.reads_narrow_weights("cpu"), reason="weights are always widened here")
@pytest.mark.parametrize(("stored", "named"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", None)])
def test_matrices_are_kept_as_the_files_store_them(model: Path, stored: str, named: str | None) -> None:
    tensors = {name: t.to(getattr(torch, stored)) for name, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    edit_config(model, drop=("dtype",), torch_dtype=named)
    core = make_core(model)
    assert core.info.weight_dtype == stored and core.info.dtype == "float32"
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(core.runner.decoder.embedding.float(), embedding.float())


def test_a_head_that_differs_from_the_embedding_is_not_dropped(model: Path) -> None:
    edit_config(model, tie_word_embeddings=True)
    with pytest.raises(LoadError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        make_core(model)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert run(make_core(model), [greedy("a", [5, 6], 2)])["a", 0].finish_reason == "length"


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "rms_norm_eps", "small"),
        ("llama", "hidden_act", ["silu"]),
        ("llama", "eos_token_id", "</s>"),
        ("qwen2", "max_window_layers", "two"),
        ("gemma3", "query_pre_attn_scalar", "x"),
        ("gemma3", "attn_logit_softcapping", "x"),
        ("gemma3", "final_logit_softcapping", -1),
    ],
)
def test_config_values_of_the_wrong_kind_are_named(tmp_path: Path, family: str, key: str, value: Any) -> None:
    model = make_model(family, tmp_path / "model")
    (model / "generation_config.json").unlink(missing_ok=True)
    edit_config(model, drop=("layer_types",), **{key: value})
    with pytest.raises(LoadError, match=key if key != "hidden_act" else "activation"):
        make_core(model)


def test_gemma3_without_layer_types_reads_one_pattern_everywhere(tmp_path: Path) -> None:
    # `_sliding_window_pattern` is bookkeeping of transformers, which reads only `sliding_window_pattern`.
    model = make_model("gemma3", tmp_path / "model")
    edit_config(model, drop=("layer_types", "rope_parameters"), _sliding_window_pattern=2, rope_local_base_freq=10_000)
    spec = make_core(model).runner.decoder.spec
    assert [layer.mixer.window for layer in spec.layers] == [8, 8, 8, 8]
    assert [group.name for group in spec.rotary_groups] == ["sliding_attention"]


def test_rotary_groups_of_different_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gemma3", tmp_path / "model")
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    edit_config(model, rope_parameters=parameters)

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
        return torch.cat((turned * cos[:, None] + half * sin[:, None], rest), dim=-1)

    monkeypatch.setattr(
        "transformers.models.gemma3.modeling_gemma3.apply_rotary_pos_emb",
        lambda q, k, cos, sin, *_, **__: (rotate(q, cos, sin), rotate(k, cos, sin)),
    )
    core = make_core(model)
    assert [group.base.rotary_dim for group in core.runner.decoder.spec.rotary_groups] == [16, 8]
    request = greedy("a", range(3, 40), 6)
    result = run(core, [request])["a", 0]
    reference = Reference(model, specs_of(core, request), ["full_attention", "sliding_attention"])
    expected = reference.logits(request.prompt_token_ids + result.token_ids)[36:-1]
    assert (torch.stack(result.logits) - expected).abs().max() / expected.abs().max() < 1e-5
