"""Rotary conformance checks of any server over HTTP, with verdicts and reports.

Each check requests the same thing in two ways that must agree and reports how far the answers differ, in nats.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from statistics import median
from threading import Event
from typing import Any

from windlass.clients.terminal.errors import CommandError
from windlass.lab.conformance_client import (
    MAX_TIE_SHARE,
    Agreement,
    Answer,
    CheckUnavailableError,
    ConformanceClient,
    overlap,
)

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


CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)

REQUESTS_PER_PHASE = (
    6  # requests beside one neighbour, at most: while it reads its prompt, and as many while it answers
)

FILLER = " the"

NUM_TAILS, TAIL_WORDS = 5, 40  # texts behind it, and words of each

SHIFT_ALLOWANCE = 5  # times the bound: more than the first token's moving away does to a median

NO_HIT = "the server tells of no prefix hit, so no kept key is known to have been used"


def continued(suite: ConformanceSuite) -> CheckOutcome:
    tally = Agreement()
    prompt, answer = suite.begin(lambda: suite.prompt(suite.short()), 32)
    compared = suite.compare_with_fresh(prompt, answer, range(1, 32, 3), tally)
    return CheckOutcome(tally, f"{answer.prompt_tokens} tokens and 32 of answer, against {compared} fresh requests")


def neighbour(suite: ConformanceSuite) -> CheckOutcome:
    past, tally, shown, num_requests = suite.past(), Agreement(), 0, 0
    prompt = suite.prompt(past // 4)
    alone = suite.asker.ask(prompt, 24, fresh=True)
    for _ in range(REPEATS):
        long, mine, began = suite.prompt(past + past // 4), [], Event()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(suite.asker.ask, long, 64, fresh=True, began=began)
            other.add_done_callback(partial(_set, began))
            for answering in (False, True):
                for _ in range(REQUESTS_PER_PHASE):
                    if other.done() or began.is_set() is not answering:
                        break
                    mine.append(suite.asker.ask(prompt, 24, fresh=True))
                began.wait()
            neighbours = other.result()
        num_requests += len(mine)
        shown += sum(overlap(one, neighbours) for one in mine)
        for one in mine:
            tally.answers(alone, one)
    asked = f"{alone.prompt_tokens} tokens alone, against {num_requests} times beside {past + past // 4}"
    if not shown:
        return CheckOutcome(
            tally, asked, "the two were never seen to be answered at the same time: their parts never interleaved"
        )
    return CheckOutcome(tally, f"{asked}, {shown} of them seen to be answered at the same time")


def _set(event: Event, done: Future[Answer]) -> None:
    event.set()


def together(suite: ConformanceSuite) -> CheckOutcome:
    prompts, tally = [suite.prompt(length) for length in (24, 40, suite.short(), suite.short() // 2)], Agreement()
    alone = [suite.asker.ask(text, 32, fresh=True) for text in prompts]
    # Short answers may miss each other on a busy machine: then they are asked for once more.
    for _ in range(REPEATS):
        with ThreadPoolExecutor(len(prompts)) as pool:
            at_once = list(pool.map(lambda text: suite.asker.ask(text, 32, fresh=True), prompts))
        for one, other in zip(alone, at_once, strict=True):
            tally.answers(one, other)
        pairs = list(combinations(at_once, 2))
        shown = sum(overlap(one, other) for one, other in pairs)
        if shown:
            break
    asked = f"{len(prompts)} requests alone, then at once; {shown} of {len(pairs)} pairs seen at the same time"
    return CheckOutcome(tally, asked, None if shown else "no two were seen to be answered at the same time")


def prefix(suite: ConformanceSuite) -> CheckOutcome:
    tally = Agreement()
    hits: dict[int, int] = {}  # by length: tokens of the longest hit
    lengths = [suite.short()] + ([suite.trained + suite.trained // 4] if suite.trained else [])
    for length in lengths:
        try:
            suite.fits(length + suite.short())
        except CheckUnavailableError:
            continue
        begin = suite.prompt(min(length, suite.short()))
        long = begin + " " + suite.prompt(length)
        cold = [suite.asker.ask(text, 12, fresh=True) for text in (begin, long)]
        # The beginning first, then what extends it; then the beginning after the longer text was kept.
        for text, reference in ((begin, cold[0]), (long, cold[1]), (begin, cold[0]), (long, cold[1])):
            warm = suite.asker.ask(text, 12)
            hits[length] = max(hits.get(length, 0), warm.cached or 0)
            tally.answers(reference, warm)
    if not hits:
        raise CheckUnavailableError(
            f"context {suite.context}: it needs more for two texts of which one begins the other"
        )
    hits_text = ", ".join(f"hits of up to {hit} tokens at about {length}" for length, hit in hits.items())
    asked = f"texts asked cold, then after their beginning and after a longer text: {hits_text}"
    return CheckOutcome(tally, asked, None if any(hits.values()) else NO_HIT)


def switch(suite: ConformanceSuite) -> CheckOutcome:
    past, tally = suite.past(), Agreement()
    # A quarter past it: the frequencies of dynamic NTK change little by little.
    length = min(max(past // 4, 36), 256)
    suite.fits(past, length)
    prompt, answer = suite.begin(lambda: suite.just_below(past - 6), length)
    first = max(past - answer.prompt_tokens, 0)
    if first + 2 >= len(answer.steps):
        raise CheckUnavailableError(f"the answer ended before position {past}")
    compared = suite.compare_with_fresh(
        prompt, answer, range(first + 1, len(answer.steps), max(length // 16, 3)), tally
    )
    asked = f"an answer from {answer.prompt_tokens} tokens across {past} to {answer.prompt_tokens + len(answer.steps)}"
    return CheckOutcome(tally, f"{asked}, against {compared} fresh requests")


def stale(suite: ConformanceSuite) -> CheckOutcome:
    past, tally = suite.past(), Agreement()
    prompt = suite.prompt(past - past // 8)
    answer = suite.asker.ask(prompt, 16)
    turn = prompt + answer.text + " " + suite.prompt(max(past // 4, 24))
    # The kept keys first: a server that keeps one text a slot would afterwards have those of the fresh request.
    warm = suite.asker.ask(turn, 12)
    tally.answers(suite.asker.ask(turn, 12, fresh=True), warm)
    kept, first = warm.cached or 0, answer.prompt_tokens + len(answer.steps)
    inconclusive = None if kept else NO_HIT
    if kept > first:
        inconclusive = "more was kept than the first turn had, so it is of an earlier run: give another --seed"
    asked = f"{answer.prompt_tokens} tokens, then a turn to {warm.prompt_tokens} past {past}"
    return CheckOutcome(tally, f"{asked}: {kept} kept against fresh ones", inconclusive)


def chunking(suite: ConformanceSuite) -> CheckOutcome:
    tally, compared, taken = Agreement(), 0, []
    top = min(suite.trained or 2048, suite.context or 2048)
    for chunk in CHUNKS:
        if chunk + 40 > top:
            break
        # An answer that begins just below the boundary: its fresh requests are read in one chunk more.
        try:
            prompt, answer = suite.begin(partial(suite.just_below, chunk - 3), 14)
            compared += suite.compare_with_fresh(prompt, answer, range(1, 14, 2), tally)
        except CheckUnavailableError:
            continue
        taken.append(chunk)
    if not taken:
        raise CheckUnavailableError("no length near a usual chunk fits: the context is too short")
    return CheckOutcome(tally, f"lengths around {', '.join(map(str, taken))} ({compared} requests)")


def far(suite: ConformanceSuite) -> CheckOutcome:
    """Texts behind n and behind n + 1, n + 2, … times the same word: rotation must not see the shift.

    Attention to the first token, then one or more further away, does see it a little. So the verdict goes by the median
    of several texts, and what is above the bound differs only when it is far above. Whether those texts' answers depend
    on the order of words at all goes by their median too.
    """
    suite.fits(suite.far_len)
    if suite.asker.by_text:
        raise CheckUnavailableError("it needs log-probabilities: a text does not tell angles that are slightly wrong")
    few, many = (suite.asker.ask(FILLER * count, 1).prompt_tokens for count in (32, 64))
    each = max((many - few) / 32, 0.1)
    tails = [suite.words(TAIL_WORDS).split() for _ in range(NUM_TAILS)]
    count = round(suite.far_len / each) - 2 * TAIL_WORDS

    def ask(more: int, words: list[str]) -> Answer:
        return suite.asker.ask(FILLER * (count + more) + " " + " ".join(words), 1)

    # Those behind as many words one after another: a server that keeps prefixes reads the long part once.
    first, apart, compared = [ask(0, tail) for tail in tails], [], Agreement()
    swapped = [
        Agreement.between(answer, ask(0, tail[:-4] + tail[:-5:-1])).far
        for answer, tail in zip(first, tails, strict=True)
    ]
    for more, (answer, tail) in enumerate(zip(first, tails, strict=True), 1):
        one = Agreement.between(answer, ask(more, tail))
        apart.append(one.far)
        compared.compared, compared.parted = compared.compared + one.compared, compared.parted + one.parted
    compared.far = median(apart)
    asked = (
        f"{NUM_TAILS} texts of {first[0].prompt_tokens} tokens, all but the end one word, then 1 to {NUM_TAILS} words more: the "
        f"median; the greatest {max(apart):.4f} nats, with the last words swapped {median(swapped):.4f}"
    )
    allowed = SHIFT_ALLOWANCE * suite.bound()
    blind = "the answer there hardly depends on the order of words, so wrong angles would not show"
    return CheckOutcome(compared, asked, blind if median(swapped) <= allowed else None, allowed)


CHECKS: tuple[tuple[str, str, Callable[[ConformanceSuite], CheckOutcome]], ...] = (
    ("continued", "Does a long answer equal a fresh one at that length?", continued),
    ("neighbour", "Does a neighbour's length leave mine alone?", neighbour),
    ("together", "Does a batch leave the answer alone?", together),
    ("prefix", "Does a prefix hit leave the answer alone?", prefix),
    ("switch", "Is a scaling's change in mid-generation right?", switch),
    ("stale", "Are kept keys those of the new length?", stale),
    ("chunking", "Do chunks leave the answer alone?", chunking),
    ("far", "Are angles precise at far positions?", far),
)


def to_json(server: str, model: str, results: Sequence[CheckResult], seed: int) -> dict[str, Any]:
    return {"server": server, "model": model, "seed": seed, "checks": [asdict(result) for result in results]}


def to_lines(results: Sequence[CheckResult]) -> list[str]:
    """One or two lines a check: the verdict with its figures, then what was asked or why nothing was."""
    lines = []
    for result in results:
        lines.append(f"{result.name:<10} {result.verdict:<12} {_figures(result)}".rstrip())
        lines.append(f"{'':<10} {result.question} {result.detail}")
    return lines


def to_markdown(server: str, model: str, results: Sequence[CheckResult]) -> str:
    lines = [
        f"# Rotary positions of `{model}` at {server}",
        "",
        "Distances are the largest change of a token's log-probability, in nats.",
        "",
        "| check | verdict | distance | repeated request | allowed | what was asked |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        figures = " | ".join("–" if value is None else f"{value:.4f}" for value in (one.effect, one.noise, one.bound))
        detail = " ".join(f"{one.question} {one.detail}".replace("|", "\\|").split())
        lines.append(f"| {one.name} | {one.verdict} | {figures} | {detail} |")
    return "\n".join(lines) + "\n"


def exit_status(results: Sequence[CheckResult]) -> int:
    """0: something holds and nothing differs; 1: something differs; 2: nothing was shown."""
    if any(result.verdict == "differs" for result in results):
        return 1
    return 0 if any(result.verdict == "holds" for result in results) else 2


def _figures(result: CheckResult) -> str:
    if result.effect is None or result.noise is None or result.bound is None:
        return ""
    return f"{result.effect:.4f} nats (repeated request {result.noise:.4f}, allowed {result.bound:.4f})"
