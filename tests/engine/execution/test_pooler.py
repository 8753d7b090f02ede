"""Pooled prompts against transformers: alone, chunked, next to generation, with scalings, preempted, from the cache."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.engines import greedy, make_core, run, specs_of
from helpers.marks import slow_after, slow_but
from helpers.tiny_models import Reference, make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import EngineError, LoadError, NotFiniteError, RequestError
from windlass.engine.execution.pooler import Pooler
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import EngineRequest, PoolingRule, SamplingParams
from windlass.engine.model.config_json.classifier_head import read_classifier
from windlass.engine.model.loading.sentence_transformers_files import read_pooling
from windlass.engine.rotary.rope_scaling import RopeScaling

PROMPTS = [[(7 * i + 3 * n) % 120 + 5 for i in range(length)] for n, length in enumerate((1, 2, 16, 33, 70))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def pooled(name: str, prompt: list[int], kind: Any = "last", **fields: Any) -> EngineRequest:
    rule = PoolingRule(kind, fields.pop("dimensions", None), fields.pop("normalize", False))
    return EngineRequest(name, prompt, SamplingParams(max_tokens=0, temperature=0.0), pooling=rule, **fields)


def assert_rows(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def tensor(rows: PooledRows | None) -> torch.Tensor:
    flat = struct.unpack(f"<{len(rows.values) // 4}f", rows.values)
    return torch.tensor(flat).reshape(rows.num_rows, rows.width)


def results(core: EngineCore, requests: list[EngineRequest]) -> dict[str, torch.Tensor]:
    found = {}
    for (name, _), done in run(core, requests).items():
        for output in done.outputs:
            assert output.error is None, output.error
            if output.pooled is not None:
                found[name] = tensor(output.pooled)
    return found


def states(core: EngineCore, directory: Path, request: EngineRequest) -> torch.Tensor:
    """Hidden states [T, hidden] of transformers after the final norm."""
    reference = Reference(directory, specs_of(core, request), [group.name for group in core.info.rotary_groups])
    ids = torch.tensor([request.prompt_token_ids])
    with torch.no_grad():
        return reference.model.model(ids, use_cache=False).last_hidden_state[0]


def expected(core: EngineCore, directory: Path, request: EngineRequest, kind: str) -> torch.Tensor:
    """Rows of transformers."""
    hidden = states(core, directory, request)
    made = {"last": hidden[-1:], "mean": hidden.mean(0, keepdim=True), "first": hidden[:1], "all": hidden}
    return made[kind]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", ["last", "mean", "first", "all"])
@pytest.mark.parametrize("budget", slow_after(1, [7, 2048]))
def test_pooled_rows_equal_transformers_in_any_chunks(directory: Path, kind: str, budget: int) -> None:
    core = make_core(directory, max_num_batched_tokens=budget)
    requests = [pooled(f"p{n}", prompt, kind) for n, prompt in enumerate(PROMPTS)]
    others = [greedy("g0", PROMPTS[3], 12), greedy("g1", PROMPTS[4], 5)]
    alone = {name: done.token_ids for (name, _), done in run(make_core(directory), others).items()}
    done = run(core, [others[0], *requests, others[1]])
    assert {name: done[name, 0].token_ids for name in ("g0", "g1")} == alone
    for request in requests:
        (output,) = done[request.request_id, 0].outputs
        assert output.token_ids == () and output.finish_reason == "length"
        wanted = expected(core, directory, request, kind)
        assert_rows(tensor(output.pooled), wanted)
    assert not core.runner._pooler._partial and not core.runner.input_batch.pooled


@pytest.mark.parametrize(
    "family", slow_but(["llama", "gemma2", "cohere"], "gemma2")
)  # plain logits, soft-capped ones, scaled ones
@pytest.mark.parametrize("budget", slow_after(1, [7, 2048]))
def test_answer_scores_equal_transformers(family: str, budget: int, tmp_path: Path) -> None:
    directory = make_model(family, tmp_path)
    core = make_core(directory, max_num_batched_tokens=budget)
    requests, wanted = [], {}
    for n, prompt in enumerate(PROMPTS):
        for answers in ((5 + n,), (5 + n, 90)):
            rule = PoolingRule("answer", answers=answers)
            sampling = SamplingParams(max_tokens=0, temperature=0.0)
            request = EngineRequest(f"{n}{answers}", prompt, sampling, pooling=rule)
            reference = Reference(directory, specs_of(core, request), [group.name for group in core.info.rotary_groups])
            logits = reference.logits(prompt)[-1, list(answers)]
            wanted[request.request_id] = (logits[:1] - logits[1:].sum())[None]
            requests.append(request)
    done = run(core, [greedy("g", PROMPTS[3], 12), *requests])
    assert done["g", 0].token_ids == run(make_core(directory), [greedy("g", PROMPTS[3], 12)])["g", 0].token_ids
    for request in requests:
        found = tensor(done[request.request_id, 0].outputs[0].pooled)
        assert_rows(found, wanted[request.request_id])


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_pooled_requests_of_one_batch_have_their_own_scalings(directory: Path, kind: str) -> None:
    core = make_core(directory, max_num_batched_tokens=32)
    scalings = [None, RopeScaling.from_dict({"rope_type": "linear", "factor": 4.0})]
    scalings.append(RopeScaling.from_dict({"rope_type": "yarn", "factor": 8.0}))
    requests = [pooled(f"p{n}", PROMPTS[4], kind, rope_scaling=scaling) for n, scaling in enumerate(scalings)]
    found = results(core, requests)
    for request in requests:
        wanted = expected(core, directory, request, kind)
        assert_rows(found[request.request_id], wanted)
    assert not torch.allclose(found["p0"], found["p1"], atol=1e-2)


def test_only_last_token_pooling_uses_cached_prefixes(directory: Path) -> None:
    core = make_core(directory)
    first = results(core, [pooled(f"{kind}0", PROMPTS[4], kind) for kind in ("last", "mean", "all")])
    before = core.runner.positions_computed
    again = results(core, [pooled("last1", PROMPTS[4])])
    assert core.runner.positions_computed - before < 20  # the tokens after the cached blocks
    before = core.runner.positions_computed
    again |= results(core, [pooled("mean1", PROMPTS[4], "mean"), pooled("all1", PROMPTS[4], "all")])
    assert core.runner.positions_computed - before == 2 * len(PROMPTS[4])
    for kind in ("last", "mean", "all"):
        assert_rows(again[f"{kind}1"], first[f"{kind}0"])


def test_a_preempted_mean_restarts(directory: Path) -> None:
    small = 16 * 4 * 2 * 2 * 16 * 4 * 7  # seven blocks of four layers
    core = make_core(directory, kv_cache_memory=small, max_num_batched_tokens=4, max_model_len=96)
    requests = [greedy("g", PROMPTS[2][:15], 30), pooled("p", (PROMPTS[4] * 2)[:90], "mean", priority=1)]
    core.add(requests[1])
    for _ in range(4):
        core.step()
    core.add(requests[0])
    found = results(core, [])
    assert core.stats().num_preemptions > 0
    wanted = expected(core, directory, requests[1], "mean")
    assert_rows(found["p"], wanted)


def test_dimensions_are_cut_before_normalization(directory: Path) -> None:
    core = make_core(directory)
    request = pooled("p", PROMPTS[3], "mean", dimensions=10, normalize=True)
    row = results(core, [request])["p"]
    wanted = expected(core, directory, request, "mean")[:, :10]
    assert_rows(row, torch.nn.functional.normalize(wanted))
    assert row.shape == (1, 10) and abs(float(row.norm()) - 1) < 1e-6


def test_an_aborted_pooled_prompt_leaves_nothing(directory: Path) -> None:
    core = make_core(directory, max_num_batched_tokens=8)
    core.add(pooled("p", PROMPTS[4], "mean"))
    core.step()
    assert core.runner._pooler._partial
    core.abort("p")
    assert not core.runner._pooler._partial and not core.has_work()


def test_non_finite_states_fail_only_their_own_request(directory: Path) -> None:
    core = make_core(directory)
    real = core.runner.decoder.forward

    def invalid(*args: Any) -> torch.Tensor:
        hidden = real(*args)
        hidden[0] = float("nan")
        return hidden

    core.runner.decoder.forward = invalid
    core.add(pooled("bad", PROMPTS[3], "mean"))
    core.add(pooled("good", PROMPTS[4], "last"))
    outputs = {output.request_id: output for output in core.step()}
    assert isinstance(outputs["bad"].error, NotFiniteError) and "not finite" in str(outputs["bad"].error)
    assert outputs["good"].error is None and outputs["good"].pooled is not None
    assert not core.has_work()


def test_chunks_without_their_beginning_are_refused(directory: Path) -> None:
    pooler = Pooler(make_core(directory).runner.decoder)
    rows = torch.ones(3, 64)
    assert pooler.add(0, PoolingRule("mean"), rows, 0, 6) is None
    pooler.forget(0)
    with pytest.raises(EngineError, match="send it again"):
        pooler.add(0, PoolingRule("mean"), rows, 3, 6)


@pytest.mark.parametrize(
    ("rule", "sampling", "param"),
    [
        (PoolingRule("best"), {}, "pooling"),
        (PoolingRule(dimensions=0), {}, "dimensions"),
        (PoolingRule(), {"max_tokens": 1}, "pooling"),
        (PoolingRule(), {"n": 2}, "pooling"),
        (PoolingRule(), {"prompt_logprobs": 1}, "pooling"),
        (PoolingRule("classify"), {}, "pooling"),
        (PoolingRule("answer"), {}, "pooling"),
        (PoolingRule("answer", answers=(5, 6, 7)), {}, "pooling"),
        (PoolingRule("answer", answers=(5, 128)), {}, "pooling"),
        (PoolingRule("last", answers=(5,)), {}, "pooling"),
    ],
)
def test_invalid_pooling_is_refused(directory: Path, rule: PoolingRule, sampling: dict[str, Any], param: str) -> None:
    core = make_core(directory)
    params = SamplingParams(**{"max_tokens": 0, **sampling})
    with pytest.raises(RequestError) as caught:
        core.add(EngineRequest("p", [5, 6], params, pooling=rule))
    assert caught.value.param == param


def test_pooled_rows_next_to_a_draft_model_equal_transformers(directory: Path) -> None:
    core = make_core(directory, speculative_model=str(directory), speculative_adaptive=False, max_num_batched_tokens=24)
    requests = [pooled(f"{kind}", PROMPTS[4], kind) for kind in ("last", "mean")]
    done = run(core, [greedy("g", PROMPTS[3], 20), *requests])
    alone = run(make_core(directory), [greedy("g", PROMPTS[3], 20)])
    assert done["g", 0].token_ids == alone["g", 0].token_ids
    for request in requests:
        wanted = expected(core, directory, request, request.request_id)
        found = tensor(done[request.request_id, 0].outputs[0].pooled)
        assert_rows(found, wanted)


MEAN = {"pooling_mode_mean_tokens": True}
CLASSIFIERS = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "glm", "smollm3"]


def make_classifier(family: str, directory: Path, **config: Any) -> Path:
    """A random model of the family with a classification head, as transformers saves it."""
    make_model(family, directory / "plain")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(directory / "plain", **config)
    torch.manual_seed(1)
    with torch.no_grad():
        loaded.score.weight.normal_(0.0, 0.5)
    loaded.save_pretrained(directory / "classifier")
    return directory / "classifier"


@pytest.mark.parametrize("family", slow_but(CLASSIFIERS, "llama", "gemma3"))
def test_class_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    directory = make_classifier(family, tmp_path, num_labels=3)
    core = make_core(directory, max_num_batched_tokens=24)
    assert core.info.classifier.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert core.info.classifier.activation == "softmax"
    found = results(core, [pooled(f"p{n}", prompt, "classify") for n, prompt in enumerate(PROMPTS)])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for n, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits
        assert_rows(found[f"p{n}"], wanted, 2e-5)


def test_a_classifier_embeds_and_refuses_to_generate(tmp_path: Path) -> None:
    directory = make_classifier("llama", tmp_path, num_labels=1)
    core = make_core(directory)
    assert core.info.architecture == "LlamaForSequenceClassification"
    assert core.info.classifier is not None and core.info.classifier.activation == "sigmoid"
    with pytest.raises(RequestError) as caught:
        core.add(greedy("g", [5, 6, 7], 4))
    assert caught.value.code == "no_generation"
    with pytest.raises(RequestError, match="does not generate text") as caught:
        rule = PoolingRule("answer", answers=(5,))
        core.add(EngineRequest("a", [5, 6], SamplingParams(max_tokens=0, temperature=0.0), pooling=rule))
    assert caught.value.code == "no_generation"
    assert results(core, [pooled("p", PROMPTS[2], "mean")])["p"].shape == (1, 64)
    plain = make_model("llama", tmp_path / "other")
    for model, draft, of in ((directory, plain, "model"), (plain, directory, "draft model")):
        with pytest.raises(LoadError, match=f"the {of} is a LlamaForSequenceClassification"):
            make_core(model, speculative_model=str(draft))


@pytest.mark.parametrize(
    ("changed", "labels", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, ("a", "b"), "sigmoid"),
        ({"problem_type": "regression"}, ("a", "b"), "none"),
        ({"id2label": None}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"id2label": None, "num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"0": "no", "2": "yes"}}, None, "id2label"),
        ({"problem_type": "guessing"}, None, "problem_type"),
    ],
)
def test_labels_and_activation_are_read_from_config_json(
    changed: dict[str, Any], labels: tuple[str, ...] | None, activation: str
) -> None:
    config = {"id2label": {"1": "b", "0": "a"}, **changed}
    if labels is None:
        with pytest.raises(LoadError, match=activation):
            read_classifier(config)
    else:
        info = read_classifier(config)
        assert (info.labels, info.activation) == (labels, activation)


@pytest.mark.parametrize(
    ("modules", "pooling", "kind", "normalize", "refused"),
    [
        (None, None, "last", True, None),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode_lasttoken": True}, "last", True, None),
        (["Transformer", "Pooling"], {**MEAN, "pooling_mode_cls_token": False}, "mean", False, None),
        (["Transformer", "Pooling"], {"pooling_mode": "cls"}, "first", False, None),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "last", False, "max_tokens"),
        (["Transformer", "Pooling", "Dense"], MEAN, "mean", False, "Dense"),
    ],
)
def test_pooling_is_read_from_sentence_transformers_files(
    tmp_path: Path, modules: list[str] | None, pooling: Any, kind: str, normalize: bool, refused: str | None
) -> None:
    if modules is not None:
        listed = [
            {"idx": i, "path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"}
            for i, name in enumerate(modules)
        ]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    found = read_pooling(tmp_path)
    assert (found.kind, found.normalize, found.declared) == (kind, normalize, modules is not None)
    assert (found.refusal is None) if refused is None else (found.refusal is not None and refused in found.refusal)
