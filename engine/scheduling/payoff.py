"""Whether a draft model saves time at all, learnt from how long steps take with it and without.

A per-sequence pace knows what share of the proposed tokens is accepted, not what they cost: that depends on both models,
on the machine and on how many streams share a step. Knows no clock: it is told the seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.1  # of the newest step in the averages
_PLAIN_EVERY = 64  # steps, after which one goes without the draft model, to compare with
_TRIAL = 4  # steps
_LONGEST_PAUSE = 256  # steps


@dataclass(slots=True)
class _Average:
    """Tokens and seconds of a step, each averaged by itself, so that their quotient is tokens per second."""

    tokens: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.num_steps += 1
        weight = max(_WEIGHT, 1 / self.num_steps)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


@dataclass(slots=True)
class _Streams:
    """What is known of steps of about as many streams. wait: steps left of a pause; trial: steps left of a trial."""

    plain: _Average
    drafted: _Average
    since_plain: int = _PLAIN_EVERY
    pause: int = 0
    wait: int = 0
    trial: int = 0

    @property
    def loses(self) -> bool:
        """Whether tokens come slower with the draft model, as far as both are known."""
        plain, drafted = self.plain, self.drafted
        return (
            drafted.seconds > 0
            and plain.seconds > 0
            and drafted.tokens * plain.seconds < plain.tokens * drafted.seconds
        )


class Payoff:
    """Where drafting loses it pauses, 8, 16, … up to 256 steps, between trials of a few. Numbers of streams are told apart by
    powers of two."""

    def __init__(self) -> None:
        self._known: dict[int, _Streams] = {}
        self._last: tuple[_Average, int, float] | None = None  # a step whose accepted tokens are still coming
        self._skip = False

    def allows(self, num_streams: int) -> bool:
        """Whether the next step, of so many streams, may draft; call it once per step that could."""
        found = self._of(num_streams)
        if found.wait > 0:
            found.wait -= 1
            return False
        if found.trial > 0:
            found.trial -= 1
            return True
        self.settle()
        if found.loses:
            found.pause = found.wait = min(_LONGEST_PAUSE, max(8, 2 * found.pause))
            found.trial = _TRIAL
            self._skip = True  # the first step of a trial computes what the draft model has missed meanwhile
            return False
        found.pause = 0
        found.since_plain += 1
        if found.since_plain >= _PLAIN_EVERY:
            found.since_plain = 0
            return False
        return True

    def observe(self, num_streams: int, seconds: float, *, drafted: bool) -> None:
        """Learn from a step in which every stream had its next token computed, and nothing else was, how long it took."""
        if drafted and self._skip:
            self._skip = False
            return
        found = self._of(num_streams)
        self._last = (found.drafted if drafted else found.plain), num_streams, seconds

    def accept(self, num_tokens: int) -> None:
        """Add accepted tokens to the step that was observed last."""
        if self._last is not None:
            average, tokens, seconds = self._last
            self._last = average, tokens + num_tokens, seconds

    def settle(self) -> None:
        """Nothing more was accepted of the step that was observed last."""
        if self._last is not None:
            average, tokens, seconds = self._last
            self._last = None
            average.add(tokens, seconds)

    def _of(self, num_streams: int) -> _Streams:
        return self._known.setdefault(num_streams.bit_length(), _Streams(_Average(), _Average()))
