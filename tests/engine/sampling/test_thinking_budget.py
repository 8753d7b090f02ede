"""A budget ends thinking at its very token: against a walk through the output, and under speculation."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from windlass.engine.api.request import EngineRequest, SamplingParams, ThinkingBudget
from windlass.engine.api.validation import validate_request
from windlass.engine.errors import RequestError
from windlass.engine.sampling.accept import Draws, draw_tokens
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.sampling.slot import SampleSlot
from windlass.engine.sampling.thinking import forced_token
from windlass.kernels import bind

OPEN, CLOSE, TEXT = 1, 2, 3


def expected(budget: ThinkingBudget, output: list[int]) -> int | None:
    """The same by walking: where thinking begins, how much has come, whether it is over."""
    begins = [at for at in range(3) if output[at : at + 1] == [OPEN]] if budget.open else [0]
    for begin in begins:
        thought = output[begin + len(budget.open) :]
        if len(thought) == budget.tokens and CLOSE not in thought:
            return CLOSE
    return None


@pytest.mark.parametrize("opening", [(), (OPEN,)])
def test_what_is_forced(opening: tuple[int, ...]) -> None:
    """Every output of up to six tokens, for every budget."""
    met = 0
    for tokens in range(4):
        budget = ThinkingBudget(tokens, CLOSE, opening)
        for length in range(7):
            for output in product((OPEN, CLOSE, TEXT), repeat=length):
                prompt = [OPEN, TEXT]  # of no concern
                found = forced_token(budget, [*prompt, *output], len(prompt))
                assert found == expected(budget, list(output)), (budget, output)
                met += found is not None
    assert met > 10


def test_a_marker_of_several_tokens() -> None:
    budget = ThinkingBudget(2, 9, (5, 6, 7))
    assert forced_token(budget, [0, 5, 6, 7, 1, 1], 1) == 9
    assert forced_token(budget, [0, 5, 6, 8, 1, 1], 1) is None


def run(sampling: SamplingParams, draft: tuple[int, ...]) -> list[int]:
    """Greedy output of a model that wants TEXT always; each step proposes `draft`."""
    sampler = Sampler(8, bind("cpu", "float32"))
    logits = torch.zeros(1 + len(draft), 8)
    logits[:, TEXT] = 5.0
    tokens = [0]
    while len(tokens) < 12:
        slot = SampleSlot(1, 0, sampling, 0, 1, tokens)
        (result,) = draw_tokens(sampler, logits, [Draws(0, (slot,), draft)])
        assert result.error is None
        tokens = [*tokens, *result.token_ids]
    return tokens[1:12]


@pytest.mark.parametrize("draft", [(), (TEXT,), (TEXT, TEXT, TEXT), (CLOSE, TEXT)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_it_is_forced_once(tokens: int, temperature: float, draft: tuple[int, ...]) -> None:
    """Whatever else the request forbids, and with proposals or without."""
    sampling = SamplingParams(
        temperature=temperature, top_k=1, thinking=ThinkingBudget(tokens, CLOSE), bad_words=((CLOSE,),)
    )
    assert run(sampling, draft) == [TEXT] * tokens + [CLOSE] + [TEXT] * (10 - tokens)


def test_budgets_that_are_refused() -> None:
    for budget in (ThinkingBudget(-1, CLOSE), ThinkingBudget(1, 8), ThinkingBudget(1, CLOSE, (8,))):
        with pytest.raises(RequestError, match="thinking_budget"):
            validate_request(EngineRequest("r", [1], SamplingParams(thinking=budget)), vocab_size=8)
