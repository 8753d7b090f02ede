"""Tasks of a text worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from windlass.engine.errors import RequestError
from windlass.server.text.chat_template import probe_template
from windlass.server.text.grammars import GrammarCompiler
from windlass.server.text.tokenizer import TextOffsets, Tokenizer
from windlass.server.text.tokenizer_files import PairField, PairPrompt, TemplateCapabilities
from windlass.server.text.workers.frames import pack_ids, unpack_ids

if TYPE_CHECKING:
    from windlass.server.text.chat_template import ChatTemplate


MAX_TAIL = 19  # tokens of a breaker after its first one


def dry_breaker_tokens(
    tokenizer: Tokenizer, breakers: Sequence[str]
) -> tuple[frozenset[int], frozenset[tuple[int, ...]]]:
    """(ids of tokens that contain a breaker, sequences of at least two ids that do).

    A sequence is a token that ends with the beginning of a breaker, and the tokens of the rest.
    """
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    ids: set[int] = set()
    tails: defaultdict[bytes, set[tuple[int, ...]]] = defaultdict(set)  # by the end of the token before them
    for breaker in dict.fromkeys(breakers):
        whole = breaker.encode()
        ids.update([token_id for token_id, piece in enumerate(pieces) if whole in piece])
        for cut in range(1, len(breaker)):
            rest = tuple(tokenizer.encode(breaker[cut:], add_special_tokens=False)[:MAX_TAIL])
            if rest:
                tails[breaker[:cut].encode()].add(rest)
    longest = max(map(len, tails), default=0)
    sequences: set[tuple[int, ...]] = set()
    for token_id, piece in enumerate(pieces):
        for start in range(max(0, len(piece) - longest), len(piece)):
            if (end := piece[start:]) in tails:
                sequences.update((token_id, *rest) for rest in tails[end])
    return frozenset(ids), frozenset(sequences)


class TextTasks:
    """The tasks. Methods take keyword arguments only and raise RequestError or ChatTemplateError if the input is at fault."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, tool_template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template, self._tool_template = template, tool_template or template
        self._grammars = GrammarCompiler(tokenizer)
        # Called with the characters of a task's next phase. A worker replaces it, to change its limits.
        self.next_phase: Callable[[int], None] = lambda size: None

    def encode(self, *, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        """Packed token ids of each text."""
        return [pack_ids(self._encode(text, add_special_tokens)[0]) for text in texts]

    def truncate(self, *, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The beginning of each text: at most `max_tokens` tokens, at least one character."""
        return [self._truncate(text, max_tokens) for text in texts]

    def encode_pairs(
        self, *, pairs: Sequence[tuple[str, str]], add_special_tokens: bool, max_tokens: int | None
    ) -> list[tuple[bytes, int]]:
        """Packed token ids of each pair, and the index of the second text's first token; see `Tokenizer.encode_pair`."""
        results = []
        for first, second in pairs:
            with _tokenizer_errors():
                ids, begin = self._tokenizer.encode_pair(
                    first, second, add_special_tokens=add_special_tokens, max_tokens=max_tokens
                )
            results.append((pack_ids(ids), begin))
        return results

    def encode_pair_prompts(
        self,
        *,
        prompt: PairPrompt,
        instruction: str,
        pairs: Sequence[tuple[str, str]],
        add_special_tokens: bool,
        max_tokens: int | None,
        keep_first: bool,
    ) -> list[bytes]:
        """Packed token ids of the prompt with each pair of query and document.

        max_tokens: the end of the document (its beginning unless `keep_first`) is cut so that a prompt has at most that many
        tokens. Raises RequestError if the rest alone has more.
        """
        results = []
        for query, document in pairs:
            values: dict[PairField, str] = {"instruction": instruction, "query": query, "document": document}
            text, begin, inserted = prompt.fill(values)
            ids, spans = self._encode(text, add_special_tokens)
            while max_tokens is not None and len(ids) > max_tokens:
                if not inserted:
                    raise RequestError(
                        f"the prompt without its document has {len(ids)} tokens, more than the limit of {max_tokens}"
                    )
                values["document"] = _drop_tokens(inserted, begin, spans, len(ids) - max_tokens, keep_first)
                text, begin, inserted = prompt.fill(values)
                ids, spans = self._encode(text, add_special_tokens)
            results.append(pack_ids(ids))
        return results

    def encode_word_variants(self, *, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Distinct id sequences of each word at the beginning of a text and after a space."""
        results: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                ids = tuple(self._encode(text, False)[0])
                if ids:
                    results[ids] = None
        return tuple(results)

    def dry_breaker_tokens(self, *, breakers: Sequence[str]) -> tuple[frozenset[int], frozenset[tuple[int, ...]]]:
        """See the function of this name."""
        return dry_breaker_tokens(self._tokenizer, breakers)

    def tokenize(
        self,
        *,
        text: str,
        add_special_tokens: bool,
        offsets: bool,
        token_strs: bool,
        max_model_len: int | None,
        max_bytes: int,
    ) -> bytes:
        """The JSON response of /tokenize, at most `max_bytes` long."""
        ids, spans = self._encode(text, add_special_tokens)
        payload: dict[str, Any] = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
        if offsets:
            payload["offsets"] = spans
        if token_strs:
            payload["token_strs"] = [self._tokenizer.token_text(token_id) for token_id in ids]
        return _check_size(to_json(payload), max_bytes, "prompt")

    def tokenize_chat(self, *, conversation: Mapping[str, Any], **options: Any) -> bytes:
        """Render a conversation, then `tokenize` in a second phase. conversation, options: arguments of these methods."""
        text = self.render(**conversation)
        self.next_phase(len(text))
        return self.tokenize(text=text, **options)

    def decode(self, *, prompts: Sequence[bytes], skip_special_tokens: bool) -> list[str]:
        """The text of each list of packed ids."""
        return [self._tokenizer.decode(unpack_ids(ids), skip_special_tokens=skip_special_tokens) for ids in prompts]

    def detokenize(
        self, *, token_ids: bytes, skip_special_tokens: bool, offsets: bool, token_strs: bool, max_bytes: int
    ) -> bytes:
        """The JSON response of /detokenize, at most `max_bytes` long."""
        ids = unpack_ids(token_ids)
        payload: dict[str, Any] = {"prompt": self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)}
        if offsets:
            counter = TextOffsets(self._tokenizer, skip_special_tokens=skip_special_tokens)
            starts = [counter.advance(token_id) for token_id in ids]
            payload["offsets"] = list(zip(starts, [*starts[1:], counter.position], strict=False))
        if token_strs:
            payload["token_strs"] = [self._tokenizer.token_text(token_id) for token_id in ids]
        return _check_size(to_json(payload), max_bytes, "tokens")

    def prepare_grammars(self) -> None:
        """Load the data that every grammar needs. Forks of this process share it, which saves half a second in each."""
        self._grammars.prepare()

    def compile_grammar(self, *, kind: str, value: str, alternative: str) -> str:
        """A serialized grammar; see `GrammarCompiler.compile`."""
        return self._grammars.compile(kind, value, alternative)

    def probe_template(self, *, with_tools: bool, variables: Mapping[str, Any]) -> TemplateCapabilities:
        """Capabilities of the template. with_tools: of the one for chats with functions. variables: of every chat."""
        template = self._tool_template if with_tools else self._template
        assert template is not None
        return probe_template(template, variables)

    def render(self, *, messages: Sequence[Mapping[str, Any]], with_tools: bool, **options: Any) -> str:
        """A conversation as text. with_tools: use the template for chats with functions. options: of `ChatTemplate.render`."""
        template = self._tool_template if with_tools else self._template
        assert template is not None
        return template.render(messages, **options)

    def encode_chat(
        self, *, add_special_tokens: bool, max_characters: int | None, **conversation: Any
    ) -> tuple[str, bytes] | int:
        """A conversation as text and as packed token ids, or its length if it has more than `max_characters`.

        The second phase tokenizes. conversation: arguments of `render`.
        """
        text = self.render(**conversation)
        if max_characters is not None and len(text) > max_characters:
            return len(text)
        self.next_phase(len(text))
        return text, pack_ids(self._encode(text, add_special_tokens)[0])

    def _truncate(self, text: str, max_tokens: int) -> str:
        ids, spans = self._encode(text, False)
        while len(ids) > max_tokens and len(text) > 1:
            text = _drop_tokens(text, 0, spans, len(ids) - max_tokens, keep_first=True) or text[0]
            ids, spans = self._encode(text, False)
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        with _tokenizer_errors():
            return self._tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)


def _drop_tokens(document: str, begin: int, spans: Sequence[tuple[int, int]], count: int, keep_first: bool) -> str:
    """The document without `count` of its tokens, at least one character shorter. begin: its offset in the text of `spans`."""
    end = begin + len(document)
    inside = [span for span in spans if span[0] < span[1] and begin <= span[0] < end]
    if len(inside) <= count:
        return ""
    if keep_first:
        return document[: min(inside[-count][0] - begin, len(document) - 1)]
    return document[max(inside[count - 1][1] - begin, 1) :]


@contextmanager
def _tokenizer_errors() -> Iterator[None]:
    """Turn failures of the tokenizer into RequestError."""
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except BaseException as error:  # a panic of the Rust library, as for a pattern that gave up, is not an Exception
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RequestError(f"the model's tokenizer cannot process this text ({reason})") from None


def _check_size(answer: bytes, max_bytes: int, param: str) -> bytes:
    if len(answer) > max_bytes:
        raise RequestError(
            f"the response has {len(answer)} bytes, more than the limit of {max_bytes}: "
            f"send less in {param}, or leave offsets and token_strs out"
        )
    return answer
