"""Requests of a load test: prompts of exact lengths, shared prefixes, documents, conversations, rotary scalings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from windlass.clients.loadtest.load_plan import TraceEntry, WeightedScaling, WorkloadSpec
from windlass.clients.loadtest.results import RequestRecord
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

LADDER_START = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Pieces from which prompts are drawn.

    ids: the pieces are token ids, otherwise words. exact: a prompt of n pieces is known to have n + `overhead` tokens.
    overhead: tokens that the server adds to a prompt (of a template, beginning of text), and those of `first`, the word at
    the beginning of every text. turn_overhead: tokens that a chat template adds to each further response and message; 0
    where unknown.
    """

    pieces: Sequence[bytes]
    ids: bool
    exact: bool
    overhead: int = 0
    first: bytes = b""
    turn_overhead: int = 0

    def sample(self, random: Random, count: int) -> bytes:
        """`count` random pieces, joined."""
        return self._separator.join(random.choices(self.pieces, k=count))

    def join(self, *parts: bytes) -> bytes:
        """Join the parts that are not empty."""
        return self._separator.join([part for part in parts if part])

    def prompt(self, joined: bytes) -> bytes:
        """The JSON value of a prompt."""
        return b"[" + joined + b"]" if self.ids else b'"' + self.opening(joined) + b'"'

    def opening(self, joined: bytes) -> bytes:
        """The text of a prompt with its first word. Pieces need no escaping in JSON."""
        return self.join(self.first, joined)

    def from_ids(self, token_ids: Sequence[int]) -> bytes:
        """Token ids as a part of a prompt."""
        return b",".join(b"%d" % token_id for token_id in token_ids)

    @property
    def _separator(self) -> bytes:
        return b"," if self.ids else b" "


async def find_vocabulary(
    control: ControlClient, server: Server, *, chat: bool, text: bool, size: int | None
) -> Vocabulary:
    """The best vocabulary for this server.

    text: prompts must be text even where the server accepts token ids. size: vocabulary size given by the user. Where the
    server tokenizes, ids are those of ordinary words and syllables, without special tokens.
    """
    if not (chat or text):
        if size is not None:
            return _middle_ids(size)
        response = await control.tokenize(model=server.model, prompt=_sample_text(), add_special_tokens=False)
        if response is not None:
            return Vocabulary(pieces=[b"%d" % item for item in sorted(set(response["tokens"]))], ids=True, exact=True)
    return await _word_vocabulary(control, server, chat)


def _middle_ids(size: int) -> Vocabulary:
    """Ids of the middle half, since special tokens are at the beginning and at the end."""
    if size < 8:
        raise LoadTestError(f"--vocab-size must be the vocabulary size of the model, at least 8, got {size}")
    return Vocabulary(pieces=[b"%d" % item for item in range(size // 4, 3 * size // 4)], ids=True, exact=True)


def _sample_text() -> str:
    """Words, syllables and numbers, which a tokenizer splits into many different tokens."""
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
    """Words that are one token after a space; all words where the server does not report that."""
    first, *others = WORDS
    everything = Vocabulary(pieces=[word.encode() for word in others], ids=False, exact=False, first=first.encode())
    words: dict[str, Any] = {"model": server.model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    response = await control.tokenize(**words)
    if response is not None and "offsets" not in response:
        response = await control.tokenize(**words, return_token_strs=True)
    single = _single_tokens(response) if response is not None else []
    if len(single) < 8:
        return everything
    # The overhead is measured with a prompt of known length, since the first word may be several tokens.
    probe = 8
    text = " ".join([first, *single[:probe]])
    prompt: dict[str, Any] = {"prompt": text}
    if chat:
        prompt = {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
    counted = await control.count(model=server.model, **prompt)
    if counted is None:
        return everything
    turn = 0
    if chat:
        further = " ".join(single[:probe])
        prompt["messages"] += [{"role": role, "content": further} for role in ("assistant", "user")]
        turn = max(0, (await control.count(model=server.model, **prompt) or 0) - counted - 2 * probe)
    return Vocabulary(
        pieces=[word.encode() for word in single],
        ids=False,
        exact=True,
        overhead=counted - probe,
        first=first.encode(),
        turn_overhead=turn,
    )


def _single_tokens(response: Mapping[str, Any]) -> list[str]:
    """Those of WORDS, except for the first, that are one token each, including the space before them."""
    try:
        spans = _spans(response)
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    found, start = [], 0
    for word in WORDS:
        end = start + len(word)
        if start and (start - 1, end) in spans:
            found.append(word)
        start = end + 1
    return list(dict.fromkeys(found))


def _spans(response: Mapping[str, Any]) -> set[tuple[int, int]]:
    """(begin, end) of each token of the joined WORDS, by the server's offsets, otherwise by the texts of the tokens."""
    if "offsets" in response:
        return {(int(start), int(end)) for start, end in response["offsets"]}
    # Tokenizers represent a space by one of these characters. Some add one before the text.
    pieces = [piece.replace("Ġ", " ").replace("▁", " ") for piece in response["token_strs"]]
    text, joined = " ".join(WORDS), "".join(pieces)
    if joined not in (text, " " + text):
        raise ValueError
    ends = list(itertools.accumulate(map(len, pieces), initial=len(text) - len(joined)))
    return set(itertools.pairwise(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request ready to send. input_tokens: as planned, 0 where unknown. output_tokens: the requested number."""

    path: str
    body: bytes
    input_tokens: int
    output_tokens: int
    label: str | None = None
    disconnect_after: int | None = None


class Conversation:
    """One request, or several of which each waits for the previous response. `request` is the next one."""

    think_time: float = 0.0

    def __init__(self, request: PreparedRequest) -> None:
        self.request = request

    def advance(self, record: RequestRecord) -> bool:
        """Set the next request after a completed one; False after the last turn. Raises LoadTestError where none can follow."""
        return False


class Workload:
    """The conversations of a spec for a server, drawn from a vocabulary.

    limit: maximum number of tokens of a prompt and its response; None where unknown. Raises LoadTestError where the lengths
    of the spec cannot fit it.
    """

    def __init__(self, spec: WorkloadSpec, *, server: Server, vocabulary: Vocabulary, seed: int = 0) -> None:
        self.spec, self.server, self.vocabulary, self.seed = spec, server, vocabulary, seed
        self.limit = server.max_model_len
        random = Random(f"{seed}/shared")
        self._prefixes = [vocabulary.sample(random, spec.prefix_len) for _ in range(spec.prefix_groups)]
        lengths = [spec.document_len.sample(random) for _ in range(spec.documents)]
        self._documents = [(vocabulary.sample(random, length), length) for length in lengths]
        self._check_fit()

    @property
    def returns_token_ids(self) -> bool:
        """Whether responses must return their token ids, for the next turn of a conversation of token ids."""
        return self.spec.turns > 1 and self.vocabulary.ids

    def with_seed(self, seed: int) -> Workload:
        """The same load drawn from another seed."""
        return Workload(self.spec, server=self.server, vocabulary=self.vocabulary, seed=seed)

    def with_other_prompts(self) -> Workload:
        """The same load with other prompts. Prompts of a trace are replaced by random ones of about the same lengths."""
        trace = [
            entry if entry.prompt is None else replace(entry, prompt=None, input_len=self._length_of(entry))
            for entry in self.spec.trace
        ]
        spec = replace(self.spec, trace=trace)
        return Workload(spec, server=self.server, vocabulary=self.vocabulary, seed=~self.seed)

    def conversations(self) -> Iterator[Conversation]:
        """The conversations in order, equal on each call. Endless except for a trace."""
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
            scaling = self._scaling(streams["scaling"])
            if self.spec.turns == 1:
                yield Conversation(self.prepare(prompt, tokens, output, streams["leave"], scaling))
            else:
                yield _MultiTurnConversation(self, prompt, tokens, output, streams, scaling)

    def ladder_lengths(self) -> list[int]:
        """The lengths of the ladder: doubling from LADDER_START, then the longest that fits the server."""
        if self.limit is None:
            raise LoadTestError("the ladder needs the server's limit, which it does not report: use --input-len")
        longest = self.limit - self.spec.output_len.minimum
        if longest <= self.vocabulary.overhead:
            raise LoadTestError(
                f"responses of {self.spec.output_len} tokens leave no space for a prompt: the server accepts {self.limit} "
                "tokens in total"
            )
        lengths = itertools.takewhile(lambda length: length < longest, (LADDER_START << i for i in itertools.count()))
        return [*lengths, longest]

    def prepare(
        self,
        prompt: bytes,
        tokens: int,
        output: int,
        disconnect_random: Random,
        scaling: WeightedScaling | None,
        label: str | None = None,
    ) -> PreparedRequest:
        """The request for the JSON value of a prompt, or of the messages of a chat."""
        spec = self.spec
        fields: dict[str, Any] = {"model": self.server.model, "max_tokens": output, "stream": True}
        if spec.usage:
            fields["stream_options"] = {"include_usage": True}
        if spec.temperature is not None:
            fields["temperature"] = spec.temperature
        if spec.ignore_eos:
            fields["ignore_eos"] = True
        if self.returns_token_ids:
            fields["return_token_ids"] = True
        scaling_fields = scaling.fields() if scaling is not None else {}
        fields |= scaling_fields
        fields |= spec.extra_body
        fields = {name: value for name, value in fields.items() if value is not None or name in scaling_fields}
        head = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()[:-1]
        name = b"messages" if spec.chat else b"prompt"
        disconnects = spec.disconnect_share > 0 and disconnect_random.random() < spec.disconnect_share
        return PreparedRequest(
            path="/v1/chat/completions" if spec.chat else "/v1/completions",
            body=b'%b,"%b":%b}' % (head, name, prompt),
            input_tokens=tokens,
            output_tokens=output,
            label=", ".join(filter(None, [label, scaling.name if scaling is not None else None])) or None,
            disconnect_after=spec.disconnect_after if disconnects else None,
        )

    def num_pieces(self, tokens: int) -> int:
        """Number of pieces of a prompt with this number of tokens."""
        return max(0 if self.vocabulary.first else 1, tokens - self.vocabulary.overhead)

    def wrap(self, joined: bytes) -> bytes:
        """The JSON value of the prompt, or of the messages, of a single turn."""
        prompt = self.vocabulary.prompt(joined)
        return b'[{"role":"user","content":%b}]' % prompt if self.spec.chat else prompt

    def _prompt(self, streams: Mapping[str, Random], output: int) -> tuple[bytes, int]:
        """A prompt, wrapped unless there are further turns, and its length in tokens."""
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
        parts.append(self.vocabulary.sample(tokens, self.num_pieces(own)))
        joined = self.vocabulary.join(*parts)
        return (self.wrap(joined) if spec.turns == 1 else joined), shared + own

    def _choose_documents(self, share: Random, limit: int | None) -> list[tuple[bytes, int]]:
        """Documents of a prompt in order, with their lengths, of at most `limit` tokens except for the first."""
        count = self.spec.documents_per_prompt.sample(share, maximum=len(self._documents))
        chosen: list[tuple[bytes, int]] = []
        used = 0
        for document, length in share.sample(self._documents, count):
            if not chosen or limit is None or used + length <= limit:
                chosen.append((document, length))
                used += length
        return chosen

    def _min_prompt_tokens(self) -> int:
        """Tokens of the shortest possible prompt."""
        spec = self.spec
        if spec.ladder:
            return self.vocabulary.overhead + 1
        offset = spec.document_offset.minimum if spec.documents else 0
        # The first document is always used, whichever that is.
        document = max((length for _, length in self._documents), default=0)
        return spec.prefix_len + document + offset + spec.input_len.minimum

    def _remaining_tokens(self, output: int, used: int, minimum: int = 1) -> int | None:
        return None if self.limit is None else max(minimum, self.limit - output - used)

    def _length_of(self, entry: TraceEntry) -> int:
        """Tokens of a prompt of a trace that fit the server; for a text its words are counted."""
        length = len(entry.prompt.split() if isinstance(entry.prompt, str) else entry.prompt or ())
        limit = self._remaining_tokens(entry.max_tokens, 0)
        return max(1, length if limit is None else min(length, limit))

    def _ladder_request(self, rung: int, output: int, streams: Mapping[str, Random]) -> PreparedRequest:
        assert self.limit is not None
        tokens = min(rung, self.limit - output)
        scaling = self._scaling(streams["scaling"])
        prompt = self.wrap(self.vocabulary.sample(streams["tokens"], self.num_pieces(tokens)))
        return self.prepare(prompt, tokens, output, streams["leave"], scaling, f"{rung} tokens")

    def _trace_request(self, entry: TraceEntry, streams: Mapping[str, Random]) -> PreparedRequest:
        if isinstance(entry.prompt, tuple):
            prompt, tokens = b"[" + self.vocabulary.from_ids(entry.prompt) + b"]", len(entry.prompt)
        elif entry.prompt is not None:
            text = json.dumps(entry.prompt).encode()
            prompt, tokens = (b'[{"role":"user","content":%b}]' % text if self.spec.chat else text), 0
        else:
            assert entry.input_len is not None
            tokens = entry.input_len
            prompt = self.wrap(self.vocabulary.sample(streams["tokens"], self.num_pieces(tokens)))
        scaling = self._scaling(streams["scaling"])
        if entry.has_scaling:
            scaling = WeightedScaling(entry.rope_scaling)
        return self.prepare(prompt, tokens, entry.max_tokens, streams["leave"], scaling)

    def _scaling(self, random: Random) -> WeightedScaling | None:
        if not self.spec.scalings:
            return None
        return random.choices(self.spec.scalings, weights=[entry.weight for entry in self.spec.scalings])[0]

    def _check_fit(self) -> None:
        """Raise LoadTestError where the shortest lengths do not fit the server. Longer ones are cut when drawn."""
        spec, limit = self.spec, self.limit
        if spec.chat and any(isinstance(entry.prompt, tuple) for entry in spec.trace):
            line = next(entry.line for entry in spec.trace if isinstance(entry.prompt, tuple))
            raise LoadTestError(
                f"line {line} of the trace has token ids, which chats do not accept: use --endpoint completions"
            )
        if spec.ladder:
            self.ladder_lengths()
            return
        if limit is None:
            return
        limit_text = f"the server accepts {limit:,} tokens of prompt and response together"
        for entry in spec.trace:
            known = entry.input_len or (len(entry.prompt) if isinstance(entry.prompt, tuple) else 1)
            if known + entry.max_tokens > limit:
                raise LoadTestError(
                    f"line {entry.line} of the trace needs {known} + {entry.max_tokens} tokens, but {limit_text}: "
                    "shorten it, or serve with a larger --max-model-len"
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
                f"but {limit_text}: lower them, or serve with a larger --max-model-len"
            )


class _MultiTurnConversation(Conversation):
    """Several turns. Each sends all previous messages and responses, and a new message."""

    def __init__(
        self,
        workload: Workload,
        joined: bytes,
        tokens: int,
        output: int,
        streams: Mapping[str, Random],
        scaling: WeightedScaling | None,
    ) -> None:
        self._workload, self._scaling = workload, scaling
        # Each conversation has its own random streams, since turns follow in the order of responses.
        own = streams["tokens"].getrandbits(64)
        self._streams = {name: Random(f"{own}/{name}") for name in streams}
        self._turn = 1
        self._tokens = tokens
        spec, vocabulary = workload.spec, workload.vocabulary
        # Tokens that the server adds to a turn: by the vocabulary, until the usage of a response shows more.
        self._template_tokens = vocabulary.turn_overhead if spec.chat else 0
        self._counted_tokens = 0  # of this turn's prompt without these; 0 for the first turn
        if spec.chat:
            self._history = b'{"role":"user","content":%b}' % vocabulary.prompt(joined)
        else:
            self._history = joined if vocabulary.ids else vocabulary.opening(joined)
        self.think_time = spec.think_time
        super().__init__(self._make(output))

    def advance(self, record: RequestRecord) -> bool:
        workload, vocabulary = self._workload, self._workload.vocabulary
        spec, limit = workload.spec, workload.limit
        if self._turn == spec.turns:
            return False
        self._turn += 1
        own = spec.input_len.sample(self._streams["input"])
        output = spec.output_len.sample(self._streams["output"])
        message = vocabulary.sample(self._streams["tokens"], own)
        output_tokens = record.output_tokens
        if spec.chat:
            text = json.dumps(record.text or "").encode()
            self._history += b',{"role":"assistant","content":%b},{"role":"user","content":"%b"}' % (text, message)
        elif vocabulary.ids:
            if record.token_ids is None:
                raise LoadTestError("the server does not return the token ids of its responses: use --text-prompts")
            output_tokens = len(record.token_ids)
            self._history = vocabulary.join(self._history, vocabulary.from_ids(record.token_ids), message)
        else:
            self._history += json.dumps(record.text or "").encode()[1:-1] + b" " + message
        if self._counted_tokens:
            self._template_tokens = max(self._template_tokens, record.input_tokens - self._counted_tokens)
        self._counted_tokens = record.input_tokens + output_tokens + own
        self._tokens = self._counted_tokens + self._template_tokens
        if limit is not None and self._tokens + output > limit:
            return False  # the conversation no longer fits the server
        self.request = self._make(output)
        return True

    def _make(self, output: int) -> PreparedRequest:
        workload = self._workload
        if workload.spec.chat:
            prompt = b"[" + self._history + b"]"
        else:
            prompt = b"[" + self._history + b"]" if workload.vocabulary.ids else b'"' + self._history + b'"'
        random = self._streams["leave"]
        return workload.prepare(prompt, self._tokens, output, random, self._scaling, f"turn {self._turn}")
