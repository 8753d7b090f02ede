"""Length-dependent frequencies with a KV cache: each policy equals its reference, and transformers' cache equals none.

The references are in `helpers.rotary_oracles`. docs/guides/cache.md has the same comparison in detail.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from helpers.engines import greedy, make_core, run
from helpers.rotary_oracles import (
    CachedInOnePass,
    Frequencies,
    Uncached,
    UnrotatedCache,
    cached_by_transformers,
    dynamic_frequencies,
    longrope_attention_factor,
    longrope_frequencies,
)
from helpers.tiny_models import make_model
from torch import Tensor

from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.lab.scoring import Scorer

DIM, TRAINED, ORIGINAL, PROMPT, LENGTH = 32, 64, 96, 48, 150
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.02 * j for j in range(DIM // 2)],
    "long_factor": [1.0 + 0.4 * j for j in range(DIM // 2)],
}
IDS = torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
GRID = dynamic_frequencies(10_000.0, DIM, 4.0, TRAINED, grid=True)
EXACT = dynamic_frequencies(10_000.0, DIM, 4.0, TRAINED, grid=False)
LONG = longrope_frequencies(10_000.0, DIM, LONGROPE)


def make(directory: Path, scaling: dict, trained: int) -> Path:
    return make_model(
        "llama",
        directory,
        hidden_size=128,
        num_hidden_layers=2,
        head_dim=DIM,
        max_position_embeddings=trained,
        rope_parameters={"rope_theta": 10_000.0, **scaling},
    )


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("dynamic"), DYNAMIC, TRAINED)


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("longrope"), LONGROPE, 4 * ORIGINAL)


def read(directory: Path, policy: RopeUpdate, *, exact: bool = False, prompt: int = PROMPT, chunk: int = 512) -> Tensor:
    scorer = Scorer.load(directory, device="cpu")
    scorer = Scorer(scorer.decoder, torch.float32, chunk=chunk)
    return scorer.logits(IDS, scorer.plan(LENGTH, None, policy, exact=exact), prompt=prompt)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_reference_without_a_cache_is_transformers_own(name: str, request: pytest.FixtureRequest) -> None:
    """The reference computes the frequencies itself. The tolerance covers float32 angles in transformers."""
    directory = request.getfixturevalue(name)
    factor = 1.0 if name == "dynamic" else longrope_attention_factor(LONGROPE)
    frequencies: Frequencies = EXACT if name == "dynamic" else LONG
    mine = Uncached(directory, factor)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    for length in (
        50,
        64,
        65,
        96,
        97,
        140,
    ):  # ascending, since transformers retains dynamic frequencies of a longer text
        with torch.no_grad():
            logits = theirs(torch.tensor([IDS[:length]]), use_cache=False).logits[0]
        assert apart(mine.logits(IDS[:length], frequencies(length)), logits) < 2e-4, length


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_transformers_cache_goes_stale(name: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(name)
    factor = 1.0 if name == "dynamic" else longrope_attention_factor(LONGROPE)
    truth = Uncached(directory, factor).at_each_length(IDS, EXACT if name == "dynamic" else LONG)
    stale = cached_by_transformers(directory, IDS, PROMPT)
    first = TRAINED if name == "dynamic" else ORIGINAL
    assert apart(stale[:first], truth[:first]) < 2e-4
    assert apart(stale[first:], truth[first:]) > 0.1
    assert (stale[first:].argmax(-1) != truth[first:].argmax(-1)).sum() > 20


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("exact", [False, True], ids=["grid", "exact"])
def test_recompute_equals_no_cache_at_every_length(dynamic: Path, exact: bool, chunk: int) -> None:
    truth = Uncached(dynamic).at_each_length(IDS, EXACT if exact else GRID)
    assert apart(read(dynamic, "recompute", exact=exact, chunk=chunk), truth) < 1e-5


def test_grid_and_exact_are_not_the_same(dynamic: Path) -> None:
    reference = Uncached(dynamic)
    assert apart(reference.at_each_length(IDS, GRID), reference.at_each_length(IDS, EXACT)) > 1e-2


def test_frozen_equals_no_cache_under_the_frozen_frequencies(dynamic: Path) -> None:
    reference = Uncached(dynamic)
    frozen = read(dynamic, "frozen")
    assert apart(frozen, reference.logits(IDS, GRID(LENGTH))) < 1e-5
    assert apart(frozen, reference.at_each_length(IDS, GRID)) > 1e-2


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("prompt", [1, PROMPT, 80])
@pytest.mark.parametrize("chunk", [512, 7])
def test_rotate_equals_a_cache_of_unrotated_keys(dynamic: Path, prompt: int, chunk: int) -> None:
    truth = UnrotatedCache(dynamic).logits(IDS, GRID, prompt)
    rotated = read(dynamic, "rotate", prompt=prompt, chunk=chunk)
    assert apart(rotated, truth) < 1e-5
    # It differs from recompute, since keys of deeper layers depend on hidden states with the old frequencies.
    assert apart(rotated, Uncached(dynamic).at_each_length(IDS, GRID)) > 1e-2


def test_longrope_under_every_policy(longrope: Path) -> None:
    factor = longrope_attention_factor(LONGROPE)
    reference = Uncached(longrope, factor)
    truth = reference.at_each_length(IDS, LONG)
    assert apart(read(longrope, "recompute"), truth) < 1e-5
    assert apart(read(longrope, "frozen"), reference.logits(IDS, LONG(LENGTH))) < 1e-5
    rotated = read(longrope, "rotate")
    assert apart(rotated, UnrotatedCache(longrope, factor).logits(IDS, LONG, PROMPT)) < 1e-5
    assert apart(rotated, truth) > 1e-2


def served(directory: Path, prompt: int, **fields: object) -> tuple[list[int], Tensor, object]:
    """All tokens, logits per step and the rotary report of greedy decoding in the engine, across several changes."""
    core = make_core(directory, max_model_len=LENGTH, max_num_batched_tokens=24)
    others = [greedy(f"other {i}", IDS[i : i + 30], 20) for i in range(2)]  # the batch must not affect the result
    finished = run(core, [greedy("a", IDS[:prompt], LENGTH - prompt, **fields), *others])["a", 0]
    return IDS[:prompt] + finished.token_ids, torch.stack(finished.logits), finished.outputs[-1].rotary


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("policy", ["frozen", "recompute", "recompute exact", "rotate"])
def test_the_engine_generates_by_the_same_references(dynamic: Path, policy: str) -> None:
    name, _, exact = policy.partition(" ")
    ids, logits, report = served(dynamic, PROMPT, rope_update=name, rope_exact=bool(exact))
    assert len(ids) == LENGTH
    context = ids[:-1]
    if name == "frozen":
        truth = Uncached(dynamic).logits(context, GRID(LENGTH))
    elif name == "rotate":
        truth = UnrotatedCache(dynamic).logits(context, GRID, PROMPT)
    else:
        truth = Uncached(dynamic).at_each_length(context, EXACT if exact else GRID)
    assert apart(logits, truth[PROMPT - 1 :]) < 1e-5
    assert report.policy == name
    assert report.moves == (5 if name == "rotate" else 0)  # entering 76, 90, 107, 128 and 152


@pytest.mark.parametrize("policy", [None, "frozen", "recompute", "rotate"])
def test_the_engine_generates_longrope_by_the_same_references(longrope: Path, policy: RopeUpdate | None) -> None:
    """The default policy is recompute."""
    factor = longrope_attention_factor(LONGROPE)
    ids, logits, _ = served(longrope, 80, rope_update=policy)
    context, reference = ids[:-1], Uncached(longrope, factor)
    if policy == "frozen":
        truth = reference.logits(context, LONG(LENGTH))
    elif policy == "rotate":
        truth = UnrotatedCache(longrope, factor).logits(context, LONG, 80)
    else:
        truth = reference.at_each_length(context, LONG)
    assert apart(logits, truth[79:]) < 1e-5


def test_the_oracle_of_one_pass_equals_the_cache_of_transformers(tmp_path: Path) -> None:
    """With random weights, a key at other frequencies changes the first digits."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    directory = make_model("llama", tmp_path, num_hidden_layers=3, max_position_embeddings=32, rope_parameters=dynamic)
    ids = torch.randint(3, 128, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    frequencies = dynamic_frequencies(10_000.0, 16, 2.0, 32, grid=False)
    for prompt in (1, 48):
        expected = cached_by_transformers(directory, ids, prompt)
        one_pass = CachedInOnePass(directory)
        with torch.no_grad():
            found = one_pass.model.lm_head(one_pass.hidden(ids, frequencies, prompt))
        assert (found - expected).abs().max() / expected.abs().max() < 1e-5
