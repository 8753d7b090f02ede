"""Whether a draft model saves time at all, learnt from how long steps take with it and without.

A per-sequence pace knows what share of the proposed tokens is accepted, not what they cost: that depends on both models,
on the machine and on how many streams share a step. Knows no clock: it is told the seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.1  # of the newest step in the averages
_PLAIN_EVERY = 64  # steps, after which one goes without the draft model, to compare with
_ENOUGH = 6  # measured steps, before anything is concluded
_UNSETTLED = 8  # first steps, which are slower: shapes that come for the first time are not repeated yet
_TRIAL = 7  # steps, the first of which is not measured
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 256  # steps


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
class _BatchSizeStats:
    """What is known of steps of about as many streams.

    skip_plain, skip_drafted: steps that are still not measured. wait: steps left of a pause; trial: steps left of a trial.
    """

    plain: _Average
    drafted: _Average
    skip_plain: int = _UNSETTLED
    skip_drafted: int = _UNSETTLED
    since_plain: int = 0
    pause: int = 0
    wait: int = 0
    trial: int = 0

    @property
    def is_slower(self) -> bool:
        """Whether tokens come slower with the draft model, once enough is known to tell."""
        plain, drafted = self.plain, self.drafted
        if plain.num_steps < _ENOUGH or drafted.num_steps < _ENOUGH:
            return False
        return drafted.tokens * plain.seconds < plain.tokens * drafted.seconds


class DraftPayoff:
    """Where drafting loses it pauses, 8, 16, … up to 256 steps, between trials of a few. Numbers of streams are told apart by
    powers of two."""

    def __init__(self) -> None:
        self._known: dict[int, _BatchSizeStats] = {}
        self._last: tuple[_Average, int, float] | None = None  # a step whose accepted tokens are still coming

    def allows(self, num_streams: int) -> bool:
        """Whether the next step, of so many streams, may draft; call it once per step that could."""
        found = self._of(num_streams)
        if found.wait > 0:
            found.wait -= 1
            return False
        if found.trial > 0:
            found.trial -= 1
            return True
        self.finish_step()
        if found.plain.num_steps < _ENOUGH:
            return False  # something to compare with
        if found.is_slower:
            found.pause = found.wait = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, 2 * found.pause))
            # A trial is judged by itself; in its first step the draft model computes what it has missed meanwhile.
            found.trial, found.drafted, found.skip_drafted = _TRIAL, _Average(), 1
            return False
        if found.drafted.num_steps >= _ENOUGH:
            found.pause = 0
        found.since_plain += 1
        if found.since_plain > _PLAIN_EVERY:
            found.since_plain = 0
            return False
        return True

    def observe(self, num_streams: int, seconds: float, *, drafted: bool) -> None:
        """Learn from a step in which every stream had its next token computed, and nothing else was, how long it took."""
        found = self._of(num_streams)
        if drafted and found.skip_drafted > 0:
            found.skip_drafted -= 1
        elif not drafted and found.skip_plain > 0:
            found.skip_plain -= 1
        else:
            self._last = (found.drafted if drafted else found.plain), num_streams, seconds

    def add_accepted(self, num_tokens: int) -> None:
        """Add accepted tokens to the step that was observed last."""
        if self._last is not None:
            average, tokens, seconds = self._last
            self._last = average, tokens + num_tokens, seconds

    def finish_step(self) -> None:
        """Nothing more was accepted of the step that was observed last."""
        if self._last is not None:
            average, tokens, seconds = self._last
            self._last = None
            average.add(tokens, seconds)

    def _of(self, num_streams: int) -> _BatchSizeStats:
        return self._known.setdefault(num_streams.bit_length(), _BatchSizeStats(_Average(), _Average()))
