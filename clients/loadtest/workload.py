"""Prompts of a load test: exact lengths, shared prefixes, documents, chats, mixed rotary scalings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from windlass.clients.loadtest.load_plan import TraceEntry, WeightedScaling, WorkloadSpec
from windlass.clients.loadtest.target import ControlClient, LoadTestError, Server

WORDS = (
    "the of and to in that is was he for it with as his on be at by had not are but from or have an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said what its about than "
    "into them can only other time new some could these two may first then do any like my now over such our man me even "
    "most made after also did many before must through back years where much your way well down should because each "
    "just those people how too little state good very make world still own see men work long get here between both life "
    "being under never day same another know while last might us great old year off come since against go came right "
    "used take three house water light hand part place number name side form head under city land story word sound"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Pieces to draw prompts from.

    ids: whether the pieces are token ids, else words. exact: whether a prompt of n pieces is known to be n + `overhead`
    tokens. overhead: tokens that the server adds around a prompt (a template's, a beginning-of-text). first: the word
    every text begins with; its place at the start is counted in `overhead`. turn_overhead: tokens that a chat's template
    adds around each further answer and message; 0 where that is not known.
    """

    pieces: Sequence[bytes]
    ids: bool
    exact: bool
    overhead: int = 0
    first: bytes = b""
    turn_overhead: int = 0

    def sample(self, random: Random, count: int) -> bytes:
        """`count` pieces at random, joined."""
        return self._glue.join(random.choices(self.pieces, k=count))

    def join(self, *parts: bytes) -> bytes:
        """Parts one after the other; empty ones leave no trace."""
        return self._glue.join([part for part in parts if part])

    def prompt(self, joined: bytes) -> bytes:
        """The JSON value of a whole prompt."""
        return b"[" + joined + b"]" if self.ids else b'"' + self.opening(joined) + b'"'

    def opening(self, joined: bytes) -> bytes:
        """The text of a prompt, with its first word; nothing is to be escaped in it."""
        return self.join(self.first, joined)

    def from_ids(self, token_ids: Sequence[int]) -> bytes:
        """Known token ids as a part of a prompt."""
        return b",".join(b"%d" % token_id for token_id in token_ids)

    @property
    def _glue(self) -> bytes:
        return b"," if self.ids else b" "


async def find_vocabulary(
    control: ControlClient, server: Server, *, chat: bool, text: bool, size: int | None
) -> Vocabulary:
    """The best vocabulary for this server. text: prompts must be text, even where ids would do.

    size: number of tokens of the vocabulary, as the person knows it. Where the server tokenizes, ids are those of
    ordinary words and syllables, so no special token is among them.
    """
    if not (chat or text):
        if size is not None:
            return _middle_ids(size)
        answer = await control.tokenize(model=server.model, prompt=_sample_text(), add_special_tokens=False)
        if answer is not None:
            return Vocabulary(pieces=[b"%d" % item for item in sorted(set(answer["tokens"]))], ids=True, exact=True)
    return await _word_vocabulary(control, server, chat)


def _middle_ids(size: int) -> Vocabulary:
    """Ids from the middle half: special tokens stand at the beginning and at the end."""
    if size < 8:
        raise LoadTestError(f"--vocab-size should be the number of tokens the model knows, got {size}")
    return Vocabulary(pieces=[b"%d" % item for item in range(size // 4, 3 * size // 4)], ids=True, exact=True)


def _sample_text() -> str:
    """Words, syllables and numbers: what a tokenizer splits into many different tokens."""
    random = Random("vocabulary")
    vowels, others = "aeiou", "bcdfghjklmnprstvwz"
    syllables = [
        "".join(random.choice(others) + random.choice(vowels) + random.choice(others) for _ in range(count))
        for count in (1, 2, 3)
        for _ in range(1500)
    ]
    numbers = [str(random.randrange(10_000)) for _ in range(200)]
    return " ".join([*WORDS, *(word.capitalize() for word in WORDS), *syllables, *numbers])


async def _word_vocabulary(control: ControlClient, server: Server, chat: bool) -> Vocabulary:
    """Words that are one token each after a space, as far as the server tells."""
    first, *others = WORDS
    everything = Vocabulary(pieces=[word.encode() for word in others], ids=False, exact=False, first=first.encode())
    words: dict[str, Any] = {"model": server.model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    answer = await control.tokenize(**words)
    if answer is not None and "offsets" not in answer:
        answer = await control.tokenize(**words, return_token_strs=True)
    single = _single_tokens(answer) if answer is not None else []
    if len(single) < 8:
        return everything
    # The tokens around a prompt, measured on one of known length: the first word may be several tokens.
    probe = 8
    text = " ".join([first, *single[:probe]])
    asked: dict[str, Any] = {"prompt": text}
    if chat:
        asked = {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
    counted = await control.count(model=server.model, **asked)
    if counted is None:
        return everything
    turn = 0
    if chat:
        further = " ".join(single[:probe])
        asked["messages"] += [{"role": role, "content": further} for role in ("assistant", "user")]
        turn = max(0, (await control.count(model=server.model, **asked) or 0) - counted - 2 * probe)
    return Vocabulary(
        pieces=[word.encode() for word in single],
        ids=False,
        exact=True,
        overhead=counted - probe,
        first=first.encode(),
        turn_overhead=turn,
    )


def _single_tokens(answer: Mapping[str, Any]) -> list[str]:
    """The words of WORDS but the first that one token each covers, its space included."""
    try:
        spans = _spans(answer)
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    found, start = [], 0
    for word in WORDS:
        end = start + len(word)
        if start and (start - 1, end) in spans:
            found.append(word)
        start = end + 1
    return list(dict.fromkeys(found))


def _spans(answer: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Where each token of the joined WORDS begins and ends, by the server's offsets, else by the tokens' texts."""
    if "offsets" in answer:
        return {(int(start), int(end)) for start, end in answer["offsets"]}
    # Tokenizers write the space as one of these; some put one before the text.
    pieces = [piece.replace("Ġ", " ").replace("▁", " ") for piece in answer["token_strs"]]
    text, joined = " ".join(WORDS), "".join(pieces)
    if joined not in (text, " " + text):
        raise ValueError
    ends = list(itertools.accumulate(map(len, pieces), initial=len(text) - len(joined)))
    return set(itertools.pairwise(ends))


# WorkloadSpec too: whoever makes a workload needs both, and docs/load-testing.md imports it from here.
__all__ = ["Conversation", "PreparedRequest", "Workload", "WorkloadSpec"]

LADDER_START = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One request ready to be sent. input_tokens: as planned, 0 where unknown. output_tokens: as asked for."""

    path: str
    body: bytes
    input_tokens: int
    output_tokens: int
    label: str | None = None
    disconnect_after: int | None = None


class Conversation:
    """One or several requests, each of which waits for the answer before it. `request` is the one to send now."""

    think_s: float = 0.0

    def __init__(self, request: PreparedRequest) -> None:
        self.request = request

    def advance(
        self,
        text: str,
        token_ids: Sequence[int] | None,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> bool:
        """Go on after this answer; False when that was the last turn. Raises LoadTestError where it cannot go on.

        input_tokens, output_tokens: of the prompt and of the answer as they were counted; None for as planned.
        """
        return False


class Workload:
    """Makes conversations. vocabulary: what prompts are drawn from. limit: tokens of prompt and answer the server takes.

    Raises LoadTestError where what is asked for cannot fit the server.
    """

    def __init__(
        self, spec: WorkloadSpec, *, model: str, vocabulary: Vocabulary, limit: int | None = None, seed: int = 0
    ) -> None:
        self.spec, self.vocabulary, self.limit, self.seed = spec, vocabulary, limit, seed
        self._model = model
        random = Random(f"{seed}/shared")
        self._prefixes = [vocabulary.sample(random, spec.prefix_len) for _ in range(spec.prefix_groups)]
        lengths = [spec.document_len.sample(random) for _ in range(spec.documents)]
        self._documents = [(vocabulary.sample(random, length), length) for length in lengths]
        self._check_fit()

    @property
    def returns_token_ids(self) -> bool:
        """Whether answers have to tell their token ids, as conversations of token ids go on from them."""
        return self.spec.turns > 1 and self.vocabulary.ids

    def with_seed(self, seed: int) -> Workload:
        """The same kind of load, drawn from another seed."""
        return Workload(self.spec, model=self._model, vocabulary=self.vocabulary, limit=self.limit, seed=seed)

    def with_other_prompts(self) -> Workload:
        """The same kind of load with other prompts; those that a trace holds become drawn ones of about their lengths."""
        trace = [
            entry if entry.prompt is None else replace(entry, prompt=None, input_len=self._length_of(entry))
            for entry in self.spec.trace
        ]
        spec = replace(self.spec, trace=trace)
        return Workload(spec, model=self._model, vocabulary=self.vocabulary, limit=self.limit, seed=~self.seed)

    def conversations(self) -> Iterator[Conversation]:
        """The conversations in order, the same ones each time. Endless, but for a trace."""
        streams = {
            name: Random(f"{self.seed}/{name}") for name in ("input", "output", "tokens", "share", "scaling", "leave")
        }
        if self.spec.trace:
            for entry in self.spec.trace:
                yield Conversation(self._trace_request(entry, streams))
            return
        ladder_lengths = itertools.cycle(self.ladder_lengths()) if self.spec.ladder else None
        while True:
            output = self.spec.output_len.sample(
                streams["output"], maximum=self._remaining_tokens(0, self._min_prompt_tokens())
            )
            if ladder_lengths is not None:
                yield Conversation(self._ladder_request(next(ladder_lengths), output, streams))
                continue
            prompt, tokens = self._prompt(streams, output)
            scaling, label = self._scaling(streams["scaling"])
            if self.spec.turns == 1:
                yield Conversation(self.prepare(prompt, tokens, output, streams["leave"], scaling, label))
            else:
                yield _MultiTurnConversation(self, prompt, tokens, output, streams, scaling, label)

    def ladder_lengths(self) -> list[int]:
        """The lengths of the ladder: 1,024 doubling, then what fits the server."""
        if self.limit is None:
            raise LoadTestError("the ladder needs the server's limit, which it does not tell: use --input-len")
        longest = self.limit - self.spec.output_len.minimum
        if longest <= self.vocabulary.overhead:
            raise LoadTestError(
                f"answers of {self.spec.output_len} tokens leave no room for a prompt: the server takes {self.limit} "
                f"tokens in all"
            )
        lengths = itertools.takewhile(lambda length: length < longest, (LADDER_START << i for i in itertools.count()))
        return [*lengths, longest]

    def prepare(
        self,
        prompt: bytes,
        tokens: int,
        output: int,
        disconnect_random: Random,
        scaling: Mapping[str, Any],
        label: str | None,
    ) -> PreparedRequest:
        """The request for a prompt that is the bytes of a JSON value: a prompt, or the messages of a chat."""
        spec = self.spec
        fields: dict[str, Any] = {"model": self._model, "max_tokens": output, "stream": True}
        if spec.include_usage:
            fields["stream_options"] = {"include_usage": True}
        if spec.temperature is not None:
            fields["temperature"] = spec.temperature
        if spec.ignore_eos:
            fields["ignore_eos"] = True
        if self.returns_token_ids:
            fields["return_token_ids"] = True
        fields |= scaling
        fields |= spec.extra_body
        fields = {name: value for name, value in fields.items() if value is not None or name in scaling}
        head = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()[:-1]
        name = b"messages" if spec.chat else b"prompt"
        disconnects = spec.disconnect_share > 0 and disconnect_random.random() < spec.disconnect_share
        return PreparedRequest(
            path="/v1/chat/completions" if spec.chat else "/v1/completions",
            body=b'%b,"%b":%b}' % (head, name, prompt),
            input_tokens=tokens,
            output_tokens=output,
            label=label,
            disconnect_after=spec.disconnect_after if disconnects else None,
        )

    def pieces(self, tokens: int) -> int:
        """How many pieces make a prompt of so many tokens."""
        return max(0 if self.vocabulary.first else 1, tokens - self.vocabulary.overhead)

    def wrap(self, joined: bytes) -> bytes:
        """The prompt of a single turn as its JSON value."""
        whole = self.vocabulary.prompt(joined)
        return b'[{"role":"user","content":%b}]' % whole if self.spec.chat else whole

    # ---- the parts ---------------------------------------------------------------------------------------------------
    def _prompt(self, streams: Mapping[str, Random], output: int) -> tuple[bytes, int]:
        """Pieces of a prompt, wrapped unless there are further turns, and its length."""
        spec, tokens, share = self.spec, streams["tokens"], streams["share"]
        parts, shared = [], 0
        if self._prefixes:
            parts.append(share.choice(self._prefixes))
            shared += spec.prefix_len
        if self._documents:
            chosen = self._choose_documents(share, self._remaining_tokens(output, shared + spec.input_len.minimum))
            length = sum(length for _, length in chosen)
            offset = spec.document_offset.sample(
                share,
                minimum=0,
                maximum=self._remaining_tokens(output, shared + length + spec.input_len.minimum, minimum=0),
            )
            parts += [self.vocabulary.sample(tokens, offset), *(document for document, _ in chosen)]
            shared += offset + length
        own = spec.input_len.sample(streams["input"], maximum=self._remaining_tokens(output, shared))
        parts.append(self.vocabulary.sample(tokens, self.pieces(own)))
        joined = self.vocabulary.join(*parts)
        return (self.wrap(joined) if spec.turns == 1 else joined), shared + own

    def _choose_documents(self, share: Random, room: int | None) -> list[tuple[bytes, int]]:
        """Documents of a prompt with their lengths, in the order in which they come."""
        count = self.spec.documents_per_prompt.sample(share, maximum=len(self._documents))
        chosen: list[tuple[bytes, int]] = []
        used = 0
        for document, length in share.sample(self._documents, count):
            if not chosen or room is None or used + length <= room:
                chosen.append((document, length))
                used += length
        return chosen

    def _min_prompt_tokens(self) -> int:
        """Tokens of the shortest prompt there may be."""
        spec = self.spec
        if spec.ladder:
            return self.vocabulary.overhead + 1
        offset = spec.document_offset.minimum if spec.documents else 0
        # Whichever document comes first stays.
        document = max((length for _, length in self._documents), default=0)
        return spec.prefix_len + document + offset + spec.input_len.minimum

    def _remaining_tokens(self, output: int, used: int, minimum: int = 1) -> int | None:
        return None if self.limit is None else max(minimum, self.limit - output - used)

    def _length_of(self, entry: TraceEntry) -> int:
        """Tokens of a prompt of a trace; of a text its words, as far as the server has room for them."""
        length = len(entry.prompt.split() if isinstance(entry.prompt, str) else entry.prompt or ())
        room = self._remaining_tokens(entry.max_tokens, 0)
        return max(1, length if room is None else min(length, room))

    def _ladder_request(self, rung: int, output: int, streams: Mapping[str, Random]) -> PreparedRequest:
        assert self.limit is not None
        tokens = min(rung, self.limit - output)
        scaling, label = self._scaling(streams["scaling"])
        prompt = self.wrap(self.vocabulary.sample(streams["tokens"], self.pieces(tokens)))
        return self.prepare(prompt, tokens, output, streams["leave"], scaling, _label(f"{rung} tokens", label))

    def _trace_request(self, entry: TraceEntry, streams: Mapping[str, Random]) -> PreparedRequest:
        if isinstance(entry.prompt, tuple):
            prompt, tokens = b"[" + self.vocabulary.from_ids(entry.prompt) + b"]", len(entry.prompt)
        elif entry.prompt is not None:
            text = json.dumps(entry.prompt).encode()
            prompt, tokens = (b'[{"role":"user","content":%b}]' % text if self.spec.chat else text), 0
        else:
            assert entry.input_len is not None
            tokens = entry.input_len
            prompt = self.wrap(self.vocabulary.sample(streams["tokens"], self.pieces(tokens)))
        scaling, label = self._scaling(streams["scaling"])
        if entry.has_scaling:
            own = WeightedScaling(entry.rope_scaling)
            scaling, label = own.fields(), own.name
        return self.prepare(prompt, tokens, entry.max_tokens, streams["leave"], scaling, label)

    def _scaling(self, random: Random) -> tuple[Mapping[str, Any], str | None]:
        if not self.spec.scalings:
            return {}, None
        (chosen,) = random.choices(self.spec.scalings, weights=[entry.weight for entry in self.spec.scalings])
        return chosen.fields(), chosen.name

    def _check_fit(self) -> None:
        """The least that is asked for must fit the server; more is cut where lengths are drawn."""
        spec, limit = self.spec, self.limit
        if spec.chat and any(isinstance(entry.prompt, tuple) for entry in spec.trace):
            line = next(entry.line for entry in spec.trace if isinstance(entry.prompt, tuple))
            raise LoadTestError(f"line {line} of the trace holds token ids, which no chat takes: use completions")
        if spec.ladder:
            self.ladder_lengths()
            return
        if limit is None:
            return
        takes = f"the server takes {limit:,} tokens of prompt and answer together"
        for entry in spec.trace:
            known = entry.input_len or (len(entry.prompt) if isinstance(entry.prompt, tuple) else 1)
            if known + entry.max_tokens > limit:
                raise LoadTestError(
                    f"line {entry.line} of the trace asks for {known} + {entry.max_tokens} tokens, but {takes}: "
                    f"shorten it, or serve with a larger --max-model-len"
                )
        if spec.trace:
            return
        around = self.vocabulary.turn_overhead if spec.chat else 0
        own, output = (spec.input_len.minimum + around) * (spec.turns - 1), spec.output_len.minimum * spec.turns
        needed = self._min_prompt_tokens() + own + output
        if needed > limit:
            parts = [f"--input-len {spec.input_len}"]
            parts += [f"--prefix-len {spec.prefix_len}"] if spec.prefix_len else []
            parts += [f"--document-len {spec.document_len}"] if spec.documents else []
            turns = f" in {spec.turns} turns" if spec.turns > 1 else ""
            raise LoadTestError(
                f"{' with '.join(parts)} and --output-len {spec.output_len}{turns} need {needed:,} tokens, "
                f"but {takes}: lower them, or serve with a larger --max-model-len"
            )


class _MultiTurnConversation(Conversation):
    """Several turns; each sends all that came before with its answers, and a new message."""

    def __init__(
        self,
        workload: Workload,
        joined: bytes,
        tokens: int,
        output: int,
        streams: Mapping[str, Random],
        scaling: Mapping[str, Any],
        label: str | None,
    ) -> None:
        self._workload, self._scaling, self._label = workload, scaling, label
        # Turns come in the order of the answers, so each conversation draws from streams of its own.
        own = streams["tokens"].getrandbits(64)
        self._streams = {name: Random(f"{own}/{name}") for name in streams}
        self._turn = 1
        self._tokens = tokens
        spec, vocabulary = workload.spec, workload.vocabulary
        # What the server adds to a turn: by the vocabulary, until an answer tells more.
        self._template_tokens = vocabulary.turn_overhead if spec.chat else 0
        self._counted_tokens = 0  # of this turn's prompt, without that; 0 for the first turn
        if spec.chat:
            self._history = b'{"role":"user","content":%b}' % vocabulary.prompt(joined)
        else:
            self._history = joined if vocabulary.ids else vocabulary.opening(joined)
        self.think_s = spec.think_s
        super().__init__(self._make(output))

    def advance(
        self,
        text: str,
        token_ids: Sequence[int] | None,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> bool:
        workload, vocabulary = self._workload, self._workload.vocabulary
        spec, limit = workload.spec, workload.limit
        if self._turn == spec.turns:
            return False
        self._turn += 1
        own = spec.input_len.sample(self._streams["input"])
        output = spec.output_len.sample(self._streams["output"])
        message = vocabulary.sample(self._streams["tokens"], own)
        counted = self._tokens if input_tokens is None else input_tokens
        answered = self.request.output_tokens if output_tokens is None else output_tokens
        if spec.chat:
            assistant_text = json.dumps(text).encode()
            self._history += b',{"role":"assistant","content":%b},{"role":"user","content":"%b"}' % (
                assistant_text,
                message,
            )
        elif vocabulary.ids:
            if token_ids is None:
                raise LoadTestError("the server does not tell the token ids of its answers: use --text-prompts")
            answered = len(token_ids)
            self._history = vocabulary.join(self._history, vocabulary.from_ids(token_ids), message)
        else:
            self._history += json.dumps(text).encode()[1:-1] + b" " + message
        if self._counted_tokens:
            self._template_tokens = max(self._template_tokens, counted - self._counted_tokens)
        self._counted_tokens = counted + answered + own
        self._tokens = self._counted_tokens + self._template_tokens
        if limit is not None and self._tokens + output > limit:
            return False  # the conversation no longer fits the server: it ends
        self.request = self._make(output)
        return True

    def _make(self, output: int) -> PreparedRequest:
        workload = self._workload
        if workload.spec.chat:
            prompt = b"[" + self._history + b"]"
        else:
            prompt = b"[" + self._history + b"]" if workload.vocabulary.ids else b'"' + self._history + b'"'
        label = _label(f"turn {self._turn}", self._label)
        return workload.prepare(prompt, self._tokens, output, self._streams["leave"], self._scaling, label)


def _label(*parts: str | None) -> str | None:
    return ", ".join(part for part in parts if part) or None
