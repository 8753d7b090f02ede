"""Compiled draws and log-probabilities against kernels/torch/torch_sampler.py, token for token, on difficult rows."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import at_the_end_of_memory
from helpers.marks import slow_but

from windlass.kernels import Filters, SamplingStatus, cpu
from windlass.kernels.cpu.elementwise_bindings import LOWEST
from windlass.kernels.cpu.library import Library
from windlass.kernels.torch.torch_sampler import candidates, exact_weights, sample

SIZES = (1, 2, 15, 16, 17, 127, 128, 129, 500, 2309)
FILTERS = (
    Filters(),
    Filters(temperature=0.4),
    Filters(top_k=1),
    Filters(top_k=3, temperature=2.0),
    Filters(top_k=40),
    Filters(top_p=0.0),
    Filters(top_p=0.3),
    Filters(top_p=0.95, temperature=0.7),
    Filters(top_p=1 - 2**-53),
    Filters(min_p=0.05),
    Filters(min_p=1.0),
    Filters(typical_p=0.0),
    Filters(typical_p=0.8),
    Filters(top_k=50, top_p=0.9, min_p=0.001, typical_p=0.9, temperature=1.3),
    Filters(top_k=2300, top_p=0.5),
    Filters(exclude_from=0.0),
    Filters(exclude_from=0.02),
    Filters(exclude_from=0.3, temperature=0.5),
    Filters(top_k=50, top_p=0.9, min_p=0.001, typical_p=0.9, temperature=1.3, exclude_from=0.04),
)


def described(filters: Filters, row: int, uniform: float, vocab: int) -> cpu.CompiledSamplingRow:
    return cpu.CompiledSamplingRow(
        row=row,
        repetition=1.0,
        temperature=max(filters.temperature, 1e-30),
        floor=math.log(filters.min_p) if filters.min_p > 0 else LOWEST,
        top_k=filters.top_k if filters.top_k < vocab else 0,
        top_p=filters.top_p,
        typical_p=filters.typical_p,
        exclude_from=filters.exclude_from,
        uniform=uniform,
    )


def rows_of(kind: str, vocab: int) -> torch.Tensor:
    """Return [3, vocab] logits that are difficult in one way."""
    x = torch.randn(3, vocab)
    if kind == "flat":
        return x * 1e-3
    if kind == "steep":
        return x * 40
    if kind == "ties":
        return (x * 2).round()
    if kind == "equal":
        return torch.full((3, vocab), -7.25)
    if kind == "masked":
        x[torch.rand(3, vocab) < 0.9] = -math.inf
        x[:, vocab // 2] = 0.5
    if kind == "one":
        x.fill_(-math.inf)
        x[:, [vocab - 1]] = 3.0
    if kind == "huge":
        return x * 1e37
    if kind == "outlier":  # nearly all tokens are in one bin
        x = x * 1e-4
        x[:, 0] = 20.0
    return x * 3


def compiled(form: Library, logits: torch.Tensor, draws: list[cpu.CompiledSamplingRow]) -> list[int]:
    cpu.sample_tokens(form, logits, draws, cpu.sampling_workspace(logits.shape[1], 2))
    assert [d.status for d in draws] == [SamplingStatus.OK] * len(draws)
    return [d.token for d in draws]


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("vocab", slow_but(SIZES, 1, 17, 128, 2309))
@pytest.mark.parametrize("kind", ["plain", "flat", "steep", "ties", "equal", "masked", "one", "huge", "outlier"])
def test_draws_equal_the_reference(form: Library, kind: str, vocab: int) -> None:
    logits = at_the_end_of_memory(rows_of(kind, vocab))
    before = logits.clone()
    generator = random.Random(vocab)
    uniforms = [0.0, 1 - 2**-53, generator.random()]
    cases = [(f, i % 3, u) for i, (f, u) in enumerate((f, u) for f in FILTERS for u in uniforms)]
    draws = [described(f, row, u, vocab) for f, row, u in cases]
    got = compiled(form, logits, draws)
    filters = [
        Filters(f.temperature, f.min_p, d.top_k, f.top_p, f.typical_p, f.exclude_from)
        for (f, _, _), d in zip(cases, draws, strict=True)
    ]
    want = sample(logits[[row for _, row, _ in cases]], filters, [u for _, _, u in cases])
    assert got == want
    assert torch.equal(logits, before)


def test_large_vocabularies_with_few_candidates(form: Library) -> None:
    """Spans are skipped. Sampled tokens are those of the reference, including the first and the last."""
    vocab = 30_001
    logits = torch.randn(2, vocab) * 4
    for filters in (Filters(top_k=20), Filters(top_p=0.6), Filters(min_p=0.1), Filters(top_k=200, top_p=0.99)):
        scaled = logits - logits.amax(-1, keepdim=True)
        kept = candidates(scaled, [filters] * 2)
        for row in range(2):
            real = kept.token_ids[row][kept.weights[row] > 0].tolist()
            weights = kept.weights[row][kept.weights[row] > 0]
            edges = (weights.cumsum(0) / weights.sum()).tolist()
            middles = [(a + b) / 2 for a, b in zip([0.0, *edges], edges, strict=False)]
            assert compiled(form, logits, [described(filters, row, u, vocab) for u in middles]) == real


def test_exact_weights_are_multiples_of_a_unit_and_near_the_exponential() -> None:
    x = torch.cat((-torch.rand(20_000) * 26, -torch.rand(1000) * 1e-6, torch.tensor([0.0, -math.inf, -1e30, -24.4])))
    weights = exact_weights(x).double()
    assert torch.equal((weights * 2**34).round(), weights * 2**34)
    exact = x.double().exp()
    assert ((weights - exact).abs() <= 2**-35 + exact * 2**-22).all()
    assert weights[-4:].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_sums_of_exact_weights_do_not_depend_on_order() -> None:
    weights = exact_weights(-torch.rand(1 << 18) * 20)
    total = weights.double().sum()
    assert total == weights.flip(0).double().cumsum(0)[-1] == weights[torch.randperm(1 << 18)].double().sum()


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def changed(**fields: Any) -> tuple[cpu.CompiledSamplingRow, list[torch.Tensor]]:
    """Return a draw with lists of ids given as tensors, and the tensors that must stay alive for it."""
    names = ("allowed", "forbidden", "biased", "counted", "decreased")
    values: dict[str, Any] = {"repetition": 1.0, "floor": LOWEST, "top_p": 1.0, "typical_p": 1.0, "exclude_from": 1.0}
    for name, value in fields.items():
        values[name] = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if name in names:
            values[f"num_{name}"] = len(value)
    return cpu.CompiledSamplingRow(**values), [v for v in fields.values() if isinstance(v, torch.Tensor)]


def test_order_of_logit_changes(form: Library) -> None:
    logits = torch.tensor([[1.0, 8.0, 6.0, 5.0, -2.0, 7.0]])

    def best(**fields: Any) -> int:
        one, kept = changed(**fields)
        (token,) = compiled(form, logits, [one])
        assert kept is not None
        return token

    assert best() == 1
    assert best(forbidden=ids(1, 5)) == 2
    assert best(allowed=ids(0, 3)) == 3
    assert best(allowed=ids(0, 3), biased=ids(1), bias=torch.tensor([100.0])) == 3
    assert best(forbidden=ids(1), biased=ids(1, 4), bias=torch.tensor([100.0, 9.5])) == 4
    assert best(counted=ids(1, 4), in_output=torch.tensor([0.0, 1.0]), repetition=1.2) == 5  # 8 / 1.2 < 7
    assert best(counted=ids(1), in_output=torch.tensor([3.0]), frequency=0.5) == 5  # 8 - 1.5 < 7
    assert best(counted=ids(1), in_output=torch.tensor([3.0]), presence=1.5) == 5
    assert best(counted=ids(1), in_output=torch.tensor([0.0]), presence=1.5, frequency=2.0) == 1  # not in the output
    assert best(decreased=ids(1, 5), decrease=torch.tensor([3.0, 0.5])) == 5
    late: dict[str, Any] = {"decreased": ids(1), "decrease": torch.tensor([2.0])}
    assert (
        best(counted=ids(1), in_output=torch.tensor([0.0]), repetition=1.2, biased=ids(5), bias=-ids(1) * 2.0, **late)
        == 2
    )
    assert best(forbidden=ids(5), counted=ids(1, 2), in_output=torch.zeros(2), repetition=1.25, **late) == 3


def test_a_failing_row_does_not_affect_others(form: Library) -> None:
    logits = torch.randn(5, 300)
    logits[1, 299], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    everything = torch.arange(300)
    draws = [described(Filters(), row, 0.5, 300) for row in range(5)]
    nothing, kept = changed(row=4, temperature=1.0, forbidden=everything)
    outside, also = changed(row=4, temperature=1.0, biased=ids(300), bias=torch.ones(1))
    draws += [nothing, outside]
    cpu.sample_tokens(form, logits, draws, cpu.sampling_workspace(300, 1))
    bad = SamplingStatus.BAD_LOGITS
    statuses = [0, bad, bad, bad, 0, SamplingStatus.NOTHING_LEFT, SamplingStatus.NO_SUCH_ID]
    assert [d.status for d in draws] == statuses
    assert [d.token == -1 for d in draws] == [status != 0 for status in statuses]
    assert kept and also


def test_greedy_draws_the_first_of_the_largest(form: Library) -> None:
    for vocab in SIZES:
        logits = torch.zeros(1, vocab)
        for first in {0, vocab // 2, vocab - 1}:
            logits[0, first:] = 4.0
            assert compiled(form, logits, [described(Filters(temperature=-1), 0, 0.9, vocab)]) != [-1]
            greedy, _ = changed(temperature=0.0)
            assert compiled(form, logits, [greedy]) == [first]
            logits[0, first:] = 0.0


def test_unsuitable_operands_are_refused(form: Library) -> None:
    logits, memory = torch.zeros(2, 40), cpu.sampling_workspace(40, 1)
    one = described(Filters(), 0, 0.0, 40)
    with pytest.raises(ValueError, match="float32"):
        cpu.sample_tokens(form, logits.double(), [one], memory)
    with pytest.raises(ValueError, match="adjacent"):
        cpu.sample_tokens(form, logits.t(), [one], memory)
    with pytest.raises(MemoryError, match="too few"):
        cpu.sample_tokens(form, torch.zeros(1, 9000), [one], memory)
    with pytest.raises(IndexError, match="row"):
        cpu.sample_tokens(form, logits, [one, described(Filters(), 2, 0.0, 40)], memory)
    cpu.sample_tokens(form, logits, [], memory)


@pytest.mark.parametrize("vocab", slow_but([1, 5, 16, 129, 700, 20_003], 1, 16, 700))
@pytest.mark.parametrize("kind", ["plain", "ties", "masked", "steep", "equal"])
def test_token_logprobs(form: Library, kind: str, vocab: int) -> None:
    logits = at_the_end_of_memory(rows_of(kind, vocab))
    rows, targets = torch.arange(9) % 3, (torch.arange(9) * 7919) % vocab
    targets[0] = logits[0].argmax()
    exact = torch.log_softmax(logits.double(), -1)
    for k in {0, 1, min(3, vocab), min(40, vocab), vocab}:
        found = cpu.token_logprobs(form, logits, rows, targets, k)
        want = exact[rows, targets]
        finite = want.isfinite()
        chosen = torch.from_numpy(found.chosen)
        assert (chosen[finite].double() - want[finite]).abs().max() < 1e-6 * want[finite].abs().max() + 1e-6
        assert torch.equal(chosen.isfinite(), finite)
        larger = (logits[rows] > logits[rows, targets].unsqueeze(1)).sum(-1)
        assert found.ranks.tolist() == (larger + 1).tolist()
        order = logits[rows].sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert found.top_ids.tolist() == order.tolist()
        torch.testing.assert_close(
            torch.from_numpy(found.top).double(), exact[rows].gather(1, order), rtol=1e-6, atol=1e-6
        )


def test_signed_zeros_are_equal(form: Library) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0]])
    found = cpu.token_logprobs(form, logits, ids(0), ids(1), 2)
    assert found.top_ids.tolist() == [[0, 1]] and found.ranks.tolist() == [1]


def test_rows_without_probabilities_have_no_rank(form: Library) -> None:
    logits = torch.randn(4, 50)
    logits[0, 49], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    found = cpu.token_logprobs(form, logits, torch.arange(4), torch.zeros(4, dtype=torch.int64), 3)
    assert (found.ranks > 0).tolist() == [False, False, False, True]
    for rows, targets in ((ids(4), ids(0)), (ids(0), ids(50)), (ids(-1), ids(0))):
        with pytest.raises(IndexError, match="outside"):
            cpu.token_logprobs(form, logits, rows, targets, 0)
    with pytest.raises(ValueError, match="k must be 0 to 50"):
        cpu.token_logprobs(form, logits, ids(0), ids(0), 51)


@pytest.mark.parametrize("top_p", [1 - 2**-53, 1 - 1e-15, 1 - 1e-13])
def test_torch_draws_with_top_p_just_below_one(top_p: float) -> None:
    # The mass of a row is summed in another order than its bins, so that the target of many rows is beyond the last bin.
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 10.0):
        for _ in range(40):
            logits = torch.randn(2, 1000, generator=generator) * scale
            likely = logits.argmax(-1).tolist()
            assert sample(logits.clone(), [Filters(top_p=top_p), Filters(temperature=1e-3, top_p=top_p)], [0.5, 0.5])[
                1
            ] in (
                likely[1],
                *logits[1].topk(5).indices.tolist(),
            )
