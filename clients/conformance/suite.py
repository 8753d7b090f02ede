"""What checks are made of: texts of a wanted length, comparisons with fresh requests, and verdicts. Knows no check."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from windlass.clients.conformance.answers import MAX_TIE_SHARE, Agreement, Answer, CheckUnavailableError
from windlass.clients.conformance.asking import ConformanceClient
from windlass.clients.terminal.errors import CommandError

WORDS = (
    "the river ran past old stone houses and a boat came in from sea with salt bread wool lamp oil letters for every "
    "child who waited on cold steps while bells rang above narrow streets where traders sold apples glass rope iron"
).split()
REPEATS = 3
ANSWER_RESERVE = 72  # tokens of an answer and of a beginning of sequence, at most
MIN_DIFFERING_TOKENS = 3  # where only texts can be compared: fewer differing tokens may all be near ties


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What a check found.

    asked: what was asked, for a reader. unshown: why equality would show nothing here, None where it does.
    allowed: nats that something harmless may come to; what is above the bound and not above this is not shown.
    """

    tally: Agreement
    asked: str
    inconclusive: str | None = None
    allowed: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check's verdict.

    verdict: "holds"; "differs"; "not shown": nothing differs, but the case was not seen to come about, or only texts
    could be compared and a few differ; "not askable".
    effect, noise and bound: nats; None where nothing was measured. compared and parted: steps, and how many of them
    chose another token.
    """

    name: str
    question: str
    verdict: str
    detail: str
    effect: float | None = None
    noise: float | None = None
    bound: float | None = None
    compared: int = 0
    parted: int = 0


class ConformanceSuite:
    """The checks against one server.

    trained: positions the model was trained on, None where unknown. context: the longest the server takes, None where
    it does not say. tolerance: nats below which a difference is rounding. far_len: tokens of the long texts with which
    the precision of angles is asked. lost: how a check ended before its time, None where none did.
    """

    def __init__(
        self,
        asker: ConformanceClient,
        trained: int | None,
        context: int | None,
        tolerance: float,
        seed: int = 0,
        far_len: int = 100_000,
    ) -> None:
        self.asker, self.trained, self.context, self.tolerance = asker, trained, context, tolerance
        self.far_len = far_len
        self.lost: str | None = None
        self._random = random.Random(seed)
        self.noise = Agreement()
        once, twice = len(WORDS), 2 * len(WORDS)
        few, many = (self.asker.ask(self.words(n), 1, fresh=True).prompt_tokens for n in (once, twice))
        self._per_word = max((many - few) / once, 0.1)
        self._extra = few - once * self._per_word

    def run(
        self,
        checks: Sequence[tuple[str, str, Callable[[ConformanceSuite], CheckOutcome]]],
        say: Callable[[str], None] = lambda line: None,
    ) -> list[CheckResult]:
        """Every check, one after another; `say` is told each check's name before it runs.

        What a server that falls silent leaves is "not askable", so that what was found before is not lost.
        """
        say("noise")
        self.noise = self._measure_noise()
        results = []
        for name, question, check in checks:
            say(name)
            try:
                results.append(self._judge(name, question, check(self)))
            except CheckUnavailableError as reason:
                results.append(CheckResult(name, question, "not askable", str(reason)))
            except CommandError as error:
                self.lost = str(error)
                results.append(CheckResult(name, question, "not askable", self.lost))
        return results

    def _judge(self, name: str, question: str, found: CheckOutcome) -> CheckResult:
        tally, detail = found.tally, found.asked
        if self.asker.by_text:
            share = tally.parted / max(tally.compared, 1)
            usual = self.noise.parted / max(self.noise.compared, 1)
            detail += f"; by text alone: {tally.parted} of {tally.compared} tokens differ"
            differs = tally.parted >= MIN_DIFFERING_TOKENS and share > max(MAX_TIE_SHARE, 3 * usual)
            effect = noise = bound = None
        else:
            effect, noise, bound = tally.far, self.noise.far, self.bound()
            differs = effect > max(bound, found.allowed)
        inconclusive = None if differs else found.inconclusive
        if effect is not None and bound is not None and bound < effect <= found.allowed:
            inconclusive = inconclusive or f"up to {found.allowed:.4f} nats may come of something harmless"
        if not differs and self.asker.by_text and tally.parted:
            inconclusive = inconclusive or "so few may be near ties"
        verdict = "differs" if differs else "not shown" if inconclusive else "holds"
        if inconclusive:
            detail += f"; {inconclusive}"
        return CheckResult(name, question, verdict, detail, effect, noise, bound, tally.compared, tally.parted)

    def bound(self) -> float:
        """Nats that are still rounding."""
        return max(self.tolerance, 3 * self.noise.far)

    def words(self, count: int) -> str:
        """Each word about as often as every other, so that the length in tokens follows from the number of words."""
        sampled: list[str] = []
        while len(sampled) < count:
            sampled += self._random.sample(WORDS, len(WORDS))
        return " ".join(sampled[:count])

    def prompt(self, tokens: int) -> str:
        """A text of about `tokens` tokens that no earlier request began with."""
        self.fits(tokens)
        return self.words(max(round((tokens - self._extra) / self._per_word), 4))

    def fits(self, tokens: int, reserve: int = ANSWER_RESERVE) -> None:
        """Raises CheckUnavailableError where the server takes no text of `tokens` tokens and an answer of `reserve`."""
        if self.context is not None and tokens + reserve > self.context:
            raise CheckUnavailableError(f"context {self.context}: it needs {tokens + reserve} tokens")

    def just_below(self, tokens: int) -> str:
        """A text of `tokens` tokens or a few less, measured by asking; at most four requests."""
        words = self.prompt(tokens).split()
        for _ in range(4):
            over = self.asker.ask(" ".join(words), 1, fresh=True).prompt_tokens - tokens
            if -8 < over <= 0:
                return " ".join(words)
            count = max(round(abs(over) / self._per_word), 1)
            words = words[:-count] if over > 0 else words + self.words(count).split()
        raise CheckUnavailableError(f"no text of {tokens} tokens was found: the tokenizer does not go by words")

    def begin(self, make: Callable[[], str], length: int) -> tuple[str, Answer]:
        """A prompt of `make` and its answer of `length` tokens, to be read back: where four tries find one, an answer that does
        not go on with the prompt's last word. That word could be read back as other tokens, even as many."""
        for _ in range(4):
            prompt = make()
            answer = self.asker.ask(prompt, length, fresh=True)
            if not (prompt[-1:].isalnum() and answer.text[:1].isalnum()):
                break
        return prompt, answer

    def past(self) -> int:
        """The trained length. Raises CheckUnavailableError where it is not known."""
        if self.trained is None:
            raise CheckUnavailableError("the trained length is not known: give --trained-len")
        return self.trained

    def short(self) -> int:
        """Tokens of a text well within the trained length."""
        return min((self.trained or 512) // 2, 256)

    def _measure_noise(self) -> Agreement:
        prompt, tally = self.prompt(self.short()), Agreement()
        answers = [self.asker.ask(prompt, 12, fresh=True) for _ in range(REPEATS)]
        for other in answers[1:]:
            tally.answers(answers[0], other)
        return tally

    def compare_with_fresh(self, prompt: str, answer: Answer, cuts: Iterable[int], tally: Agreement) -> int:
        """Compares the answer's steps with fresh requests of prompt + the answer so far; how many there were.

        A cut where the text is not read back as the same number of tokens is passed over.
        """
        compared = 0
        for cut in cuts:
            if cut >= len(answer.steps):
                continue
            text = "".join(step.token for step in answer.steps[:cut])
            if not answer.text.startswith(text):
                continue
            again = self.asker.ask(prompt + text, 1, fresh=True)
            if again.prompt_tokens != answer.prompt_tokens + cut:
                continue
            compared += 1
            tally.step(answer.steps[cut], again.steps[0])
        if not compared:
            raise CheckUnavailableError(
                "no cut of the answer is read back as the same tokens: the answer is no plain text"
            )
        return compared
