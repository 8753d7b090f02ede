"""Use of the draft model by simulated step times."""

from __future__ import annotations

from itertools import pairwise

from windlass.engine.scheduling.speculation import DraftPayoff


def play(
    payoff: DraftPayoff, steps: int, *, plain: float, drafted: float, accepted: int, streams: int = 1
) -> list[bool]:
    """Run `steps` steps. Those that draft take `drafted` seconds and give `accepted` more tokens per stream."""
    asked = []
    for _ in range(steps):
        drafts = payoff.allows(streams)
        asked.append(drafts)
        payoff.finish_step()
        payoff.observe(streams, drafted if drafts else plain, drafted=drafts)
        for _ in range(streams if drafts else 0):
            payoff.add_accepted(accepted)
    return asked


def test_useful_draft_model_is_measured_once_in_65_steps() -> None:
    asked = play(DraftPayoff(), 650, plain=1.0, drafted=2.0, accepted=2)
    assert not any(asked[:14]) and asked[14]  # measured for comparison
    assert asked[14:].count(False) == (650 - 14) // 65


def test_useless_draft_model_is_tried_less_often() -> None:
    asked = play(DraftPayoff(), 4000, plain=1.0, drafted=2.0, accepted=0)
    assert asked.count(True) < 200
    last = asked[-1000:]
    assert 14 <= last.count(True) <= 35 and sum(a and not b for a, b in pairwise(last)) >= 2


def test_draft_model_is_used_again_when_useful() -> None:
    payoff = DraftPayoff()
    play(payoff, 1000, plain=1.0, drafted=2.0, accepted=0)
    asked = play(payoff, 4000, plain=1.0, drafted=2.0, accepted=4)
    assert asked[-500:].count(True) > 480


def test_tie_is_decided_by_tokens_per_second_of_equal_streams() -> None:
    payoff = DraftPayoff()
    for _ in range(3):
        one = play(payoff, 300, plain=1.0, drafted=1.5, accepted=1)
        many = play(payoff, 300, plain=1.0, drafted=2.5, accepted=1, streams=8)
    assert one[-100:].count(True) > 90 and many[-100:].count(True) < 10


def test_first_step_of_a_trial_is_not_measured() -> None:
    """The draft model computes its lag in this step, whose time would make it appear useless."""
    payoff = DraftPayoff()
    play(payoff, 200, plain=1.0, drafted=2.0, accepted=0)
    asked, without = [], 0
    for _ in range(3000):
        drafts = payoff.allows(1)
        asked.append(drafts)
        payoff.finish_step()
        payoff.observe(1, 100.0 if drafts and without >= 8 else 1.2 if drafts else 1.0, drafted=drafts)
        if drafts:
            payoff.add_accepted(3)
        without = 0 if drafts else without + 1
    assert asked[-500:].count(True) > 480
