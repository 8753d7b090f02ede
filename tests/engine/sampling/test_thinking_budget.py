"""A thinking budget ends thinking at the exact token, against a walk through the output, also with speculation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from windlass.engine.errors import RequestError
from windlass.engine.interface.request import EngineRequest, SamplingParams, ThinkingBudget
from windlass.engine.interface.validation import validate_request
from windlass.engine.sampling.acceptance import SamplingRequest, sample_and_accept
from windlass.engine.sampling.logits_processor import forced_token
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.sampling.sampler import Sampler
from windlass.kernels import select_backend

OPEN, CLOSE, TEXT = 1, 2, 3


def outputs(budget: ThinkingBudget, length: int) -> Iterator[tuple[list[int], set[int]]]:
    """Return the outputs of this length that the budget permits, and the positions of forced tokens."""

    def longer(output: list[int], forced: set[int]) -> Iterator[tuple[list[int], set[int]]]:
        if len(output) == length:
            yield output, forced
            return
        token = forced_token(budget, [OPEN, TEXT, *output], 2)  # the prompt does not matter
        if token is not None:
            yield from longer([*output, token], {*forced, len(output)})
            return
        for free in (OPEN, CLOSE, TEXT):
            yield from longer([*output, free], forced)

    return longer([], set())


def text(tokens: Iterable[int]) -> str:
    return "".join(map(str, tokens))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("close", [(CLOSE,), (CLOSE, TEXT), (CLOSE, CLOSE, TEXT), (TEXT, CLOSE, TEXT)])
@pytest.mark.parametrize("opens", [(), ((OPEN,),), ((OPEN, TEXT), (OPEN, OPEN))])
@pytest.mark.parametrize("closes", [(), ((OPEN, CLOSE),)])
def test_forced_tokens(
    close: tuple[int, ...], opens: tuple[tuple[int, ...], ...], closes: tuple[tuple[int, ...], ...]
) -> None:
    """The rest of the marker is forced where the budget is used up, and nowhere else, in every output of eight tokens."""
    met = 0
    for tokens in range(4):
        for output, forced in outputs(ThinkingBudget(tokens, close, opens, closes), 8):
            said = text(output)
            begins = [lead + len(o) for lead in range(3) for o in opens if said.startswith(text(o), lead)]
            begin = begins[0] if opens and begins else 0
            spent = begin + tokens
            thought = said[begin:spent]
            if (opens and not begins) or any(text(one) in thought for one in (close, *closes)) or spent >= len(said):
                assert not forced, (tokens, output)
                continue
            met += 1
            behind = spent + len(forced)
            assert forced == set(range(spent, behind)) and 1 <= len(forced) <= len(close), (tokens, output)
            if behind < len(said):
                assert said[begin:behind].endswith(text(close))
                # A shorter rest would not complete the marker.
                assert not any((thought + text(close[-n:])).endswith(text(close)) for n in range(1, len(forced)))
            else:
                assert any((thought + text(close[n:])).endswith(text(close)) for n in range(len(close)))
                assert text(close).find(said[spent:]) >= 0
    assert met > 10


def test_a_marker_of_several_tokens() -> None:
    budget = ThinkingBudget(2, (9,), ((5, 6, 7), (5, 8)))
    assert forced_token(budget, [0, 5, 6, 7, 1, 1], 1) == 9
    assert forced_token(budget, [0, 5, 8, 1, 1], 1) == 9
    assert forced_token(budget, [0, 5, 6, 8, 1, 1], 1) is None
    budget = ThinkingBudget(2, (7, 8, 9), closes=((4, 5),))
    assert [forced_token(budget, [0, 1, 1, *(7, 8, 9)[:n]], 1) for n in range(4)] == [7, 8, 9, None]
    assert [forced_token(budget, [0, 1, 7, *(8, 9)[:n]], 1) for n in range(3)] == [8, 9, None]  # it had begun to close
    assert forced_token(budget, [0, 4, 5], 1) is None  # closed in other words


def test_other_tokens_may_delay_the_marker() -> None:
    budget = ThinkingBudget(2, (7, 8))
    assert [forced_token(budget, [0, 1, 1, *(5, 5, 5, 5)[:n]], 1) for n in range(5)] == [7, 7, 7, 7, None]
    assert [forced_token(budget, [0, 1, 1, 5, *(7, 8)[:n]], 1) for n in range(3)] == [7, 8, None]


def run(sampling: SamplingParams, draft: tuple[int, ...]) -> list[int]:
    """Return the greedy output of a model that always prefers TEXT. Each step proposes `draft`."""
    sampler = Sampler(8, select_backend("cpu", "float32"))
    logits = torch.zeros(1 + len(draft), 8)
    logits[:, TEXT] = 5.0
    tokens = [0]
    while len(tokens) < 12:
        slot = SampleSlot(1, 0, sampling, 0, 1, tokens)
        (result,) = sample_and_accept(sampler, logits, [SamplingRequest(0, (slot,), draft)])
        assert result.error is None
        tokens = [*tokens, *result.token_ids]
    return tokens[1:12]


@pytest.mark.parametrize("draft", [(), (TEXT,), (TEXT, TEXT, TEXT), (CLOSE, TEXT), (CLOSE, 4, 5)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize("close", [(CLOSE,), (CLOSE, 4, 5)])
def test_the_marker_is_forced_once(
    tokens: int, temperature: float, draft: tuple[int, ...], close: tuple[int, ...]
) -> None:
    """Also with other restrictions of the request, and with and without proposals."""
    budget = ThinkingBudget(tokens, close)
    sampling = SamplingParams(temperature=temperature, top_k=1, thinking=budget, bad_words=((CLOSE,), (4,)))
    assert run(sampling, draft) == ([TEXT] * tokens + [*close] + [TEXT] * 11)[:11]


def test_a_call_in_the_thinking_is_finished_first() -> None:
    """Otherwise the closing marker would become a part of its arguments."""
    budget = ThinkingBudget(3, (CLOSE,), call_opens=((5, 6), (4,)), call_closes=((7, 8),))

    def forced(*output: int) -> int | None:
        return forced_token(budget, [OPEN, *output], 1)

    inside = [TEXT] * 100
    for call in ((TEXT, 5, 6), (5, 6, TEXT), (4, TEXT, TEXT), (TEXT, TEXT, 4)):
        assert [forced(*call, *inside[:count]) for count in range(100)] == [None] * 100
        assert [forced(*call, *inside, *rest) for rest in ((7,), (7, 8), (7, 8, CLOSE))] == [None, CLOSE, None]
    assert forced(TEXT, TEXT, TEXT) == forced(5, TEXT, 6) == CLOSE  # no call
    assert forced(TEXT, TEXT, 5) == CLOSE  # not open yet
    assert forced(TEXT, 4, CLOSE) is None
    closed = ThinkingBudget(5, (CLOSE,), call_opens=((4,),), call_closes=((8,),))
    assert forced_token(closed, [4, TEXT, 8, TEXT, TEXT], 0) == CLOSE
    assert forced_token(closed, [4, TEXT, 8, TEXT, 4, TEXT], 0) is None  # another one


def test_a_call_that_is_never_closed_delays_the_end_of_the_thinking_to_a_limit() -> None:
    budget = ThinkingBudget(2, (CLOSE,), call_opens=((4,),), call_closes=((8,),))
    output = [TEXT, 4, *[TEXT] * 20_000]
    found = [count for count in range(len(output)) if forced_token(budget, output[:count], 0) is not None]
    assert found and found[0] > 1000 and len(found) < 8


def test_a_forced_token_uses_no_draw() -> None:
    """Tokens before and after the marker are those of the same positions without it."""
    vocab = 64
    torch.manual_seed(3)
    logits = torch.randn(1, vocab)
    sampler = Sampler(vocab, select_backend("cpu", "float32"))

    def drawn(seq_id: int, budget: ThinkingBudget | None) -> list[int]:
        tokens, sampling = [0], SamplingParams(temperature=1.0, thinking=budget)
        while len(tokens) < 20:
            slot = SampleSlot(seq_id, 0, sampling, 77, 1, tokens)
            (result,) = sample_and_accept(sampler, logits, [SamplingRequest(0, (slot,), ())])
            tokens = [*tokens, *result.token_ids]
        return tokens[1:]

    free, held = drawn(1, None), drawn(2, ThinkingBudget(5, (1, 2, 3), closes=((60, 61, 62, 63),)))
    assert held == [*free[:5], 1, 2, 3, *free[8:]]


def test_invalid_budgets_are_refused() -> None:
    bad = [
        ThinkingBudget(-1, (CLOSE,)),
        ThinkingBudget(1, (CLOSE, 8)),
        ThinkingBudget(1, (CLOSE,), ((8,),)),
        ThinkingBudget(1, (CLOSE,), (), ((8,),)),
        ThinkingBudget(1, ()),
        ThinkingBudget(1, (CLOSE,), ((),)),
        ThinkingBudget(1, (CLOSE,) * 65),
        ThinkingBudget(1, (CLOSE,), call_opens=((8,),)),
        ThinkingBudget(1, (CLOSE,), call_closes=((),)),
        ThinkingBudget(1, (CLOSE,), ((OPEN,),) * 128),
    ]
    for budget in bad:
        with pytest.raises(RequestError, match="thinking_budget"):
            validate_request(EngineRequest("r", [1], SamplingParams(thinking=budget)), vocab_size=8)
