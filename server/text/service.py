"""Text work of the API: tokenizing, detokenizing, chat templates and pairs of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from windlass.engine.errors import LoadError
from windlass.server.config.settings import ServerSettings
from windlass.server.errors import ApiError, bad_request, context_length_exceeded, unavailable
from windlass.server.schemas.chat import ChatMessage
from windlass.server.text.chat_messages import prepare_history
from windlass.server.text.fim_tokens import FimTokens
from windlass.server.text.pair_prompts import PairPrompt, PairTemplate
from windlass.server.text.template_facts import RESERVED, TemplateCapabilities
from windlass.server.text.tool_parsers.formats import format_of
from windlass.server.text.workers.frames import WorkerSource, count_ids, pack_ids, slice_ids, unpack_ids
from windlass.server.text.workers.pool import (
    LARGE_JOB,
    ClosedError,
    Limits,
    OutOfMemoryError,
    QueueFullError,
    RefusedError,
    TextPool,
)
from windlass.server.text.workers.processes import KilledError, ProcessDiedError, TooSlowError
from windlass.server.text.workers.tasks import TextTasks, call

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


@contextmanager
def pool_errors_as_api_errors(param: str, subject: str, limits: Limits, kind: str = "text") -> Iterator[None]:
    """The pool's errors as the caller shall read them. subject: what was at work. kind: "text", "template" or "grammar"."""
    try:
        yield
    except RefusedError as error:
        code = {"template": "chat_template_error", "grammar": "invalid_grammar"}.get(kind)
        raise bad_request(str(error), param, code) from None
    except TooSlowError:
        raise bad_request(f"{subject} took more than {limits.seconds:g} s", param, f"{kind}_timeout") from None
    except OutOfMemoryError:
        mib = limits.memory >> 20
        raise bad_request(f"{subject} took more than {mib} MiB of memory", param, f"{kind}_memory") from None
    except KilledError:
        message = f"{subject} was ended from outside, perhaps for lack of memory: send it again"
        raise unavailable(message, code="text_unavailable", retry_after=1) from None
    except ProcessDiedError as error:
        raise bad_request(f"{subject} ended the process it ran in ({error})", param, f"{kind}_failed") from None
    except QueueFullError:
        raise ApiError(
            429,
            "too much text waits to be tokenized already: try again later",
            type="rate_limit_error",
            code="too_much_text",
            retry_after=1,
        ) from None
    except (ClosedError, LoadError) as error:
        raise unavailable(str(error), code="text_unavailable", retry_after=1) from None


T = TypeVar("T")

MAX_BATCH_TEXTS = 32  # short prompts tokenized in one job: between jobs others have their turn


class TextLengthCheck(Protocol):
    """See `TextService.check_text_length`."""

    async def __call__(self, characters: int, max_model_len: int, *, truncated: bool, param: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What holds for all pairs of a request. most: tokens that a pair may have. truncate: to which its second text is cut.

    keep_first: whether it is cut at its end. first, seconds: what the texts are called, the second of each pair.
    """

    max_tokens: int
    truncate: int | None
    keep_first: bool
    add_special_tokens: bool
    first: str
    seconds: Sequence[str]
    caller: str


class PairTokenizer:
    """check_text_length: refuses a text by its length, before it is tokenized."""

    def __init__(self, pool: TextPool, limits: Limits, check_text_length: TextLengthCheck) -> None:
        self._pool, self._limits, self._check_text_length = pool, limits, check_text_length

    def template(self) -> PairTemplate | None:
        """How pairs are put to the model, if a template says so; blocks while the text processes load. Raises ApiError."""
        with pool_errors_as_api_errors("model", "loading the chat template", self._limits, "template"):
            return self._pool.pairs()

    async def cut(
        self, documents: Sequence[str], max_tokens: int, *, longest: int, param: str, caller: str
    ) -> list[str]:
        """The beginning of each, of at most so many tokens. longest: tokens of the context. Raises ApiError for a giant one."""
        for index, document in enumerate(documents):
            await self._check_text_length(len(document), longest, truncated=True, param=f"{param}[{index}]")
        found: list[str] = []
        for batch in batches(documents, len):
            with pool_errors_as_api_errors(param, "tokenizing this text", self._limits):
                task_call = call(TextTasks.cut, batch, max_tokens=max_tokens)
                cut = await self._pool.run(task_call, size=sum(map(len, batch)), limits=self._limits, caller=caller)
            found += cut
        return found

    async def join(self, pairs: Sequence[tuple[str, str]], job: PairOptions) -> list[tuple[list[int], int]]:
        """The token ids of pairs as the tokenizer joins them, each with where the second text begins.

        The second is cut at its end so that both have no more than `truncate` tokens. Raises ApiError for a pair that cannot fit,
        before tokenizing it where its length tells.
        """
        await self._check_lengths(pairs, job)
        found: list[tuple[list[int], int]] = []
        for batch in batches(pairs, _pair_length):
            with pool_errors_as_api_errors(job.first, "tokenizing this text", self._limits):
                task_call = call(
                    TextTasks.encode_pairs, batch, add_special_tokens=job.add_special_tokens, max_tokens=job.truncate
                )
                size = sum(map(_pair_length, batch))
                joined = await self._pool.run(task_call, size=size, limits=self._limits, caller=job.caller)
            for ids, begin in joined:
                found.append((_unpack_within_limit(ids, job.max_tokens, job.seconds[len(found)]), begin))
        return found

    async def fill(
        self, prompt: PairPrompt, instruction: str, pairs: Sequence[tuple[str, str]], job: PairOptions
    ) -> list[list[int]]:
        """The token ids of the prompt with each pair of query and document in it. Cuts and raises as `join` does."""
        await self._check_text_length(len(instruction), job.max_tokens, truncated=False, param="instruction")
        await self._check_lengths(pairs, job)
        around = prompt.length + len(instruction)
        found: list[list[int]] = []
        for batch in batches(pairs, _pair_length):
            with pool_errors_as_api_errors(job.first, "tokenizing this text", self._limits):
                task_call = call(
                    TextTasks.encode_pair_prompts,
                    prompt,
                    instruction,
                    batch,
                    add_special_tokens=job.add_special_tokens,
                    max_tokens=job.truncate,
                    keep_first=job.keep_first,
                )
                size = sum(around + _pair_length(pair) for pair in batch)
                filled = await self._pool.run(task_call, size=size, limits=self._limits, caller=job.caller)
            for ids in filled:
                found.append(_unpack_within_limit(ids, job.max_tokens, job.seconds[len(found)]))
        return found

    async def _check_lengths(self, pairs: Sequence[tuple[str, str]], job: PairOptions) -> None:
        for (first, second), name in zip(pairs, job.seconds, strict=True):
            await self._check_text_length(len(first), job.max_tokens, truncated=False, param=job.first)
            await self._check_text_length(len(second), job.max_tokens, truncated=job.truncate is not None, param=name)


def batches(texts: Sequence[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Short texts, or pairs of them, together; a long one alone."""
    batch: list[T] = []
    size = 0
    for text in texts:
        if batch and (len(batch) == MAX_BATCH_TEXTS or size + length(text) > LARGE_JOB):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += length(text)
    if batch:
        yield batch


def _pair_length(pair: tuple[str, str]) -> int:
    return len(pair[0]) + len(pair[1])


def _unpack_within_limit(packed: bytes, max_tokens: int, param: str) -> list[int]:
    """The ids; raises ApiError where there are too many."""
    count = count_ids(packed)
    if count > max_tokens:
        raise context_length_exceeded(max_tokens, count, param=param)
    return unpack_ids(packed)


MAX_CACHED_BREAKER_SIZE = 1 << 16  # ids, sequences and characters of the lists themselves, of all lists together

MAX_CACHED_BREAKER_LISTS = 64  # each takes memory, even one of which nothing is found

# A chat of more messages, of more text, or of more in its calls and variables is made plain off the loop.
MAX_INLINE_MESSAGES = 64

MAX_INLINE_VALUES = 8192  # values and their characters: a millisecond or two

MAX_CACHED_GRAMMARS = 64  # agents send one schema again and again

MAX_CONCURRENT_GRAMMARS = 2

GRAMMAR_SECONDS = 4.0  # that a grammar may take to compile


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine. `text`: as the caller wrote it, None for token ids or a truncated prompt."""

    token_ids: list[int]
    text: str | None = None


class TextService:
    """One per app. `caller` everywhere: whose request it is; callers that wait for text work take turns."""

    def __init__(self, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        # By whether functions are on offer.
        sources = {tools: tokenizer.template_for(tools) for tools in (False, True)}
        self._template_capabilities = {
            tools: None if source is None else TemplateCapabilities.of(source) for tools, source in sources.items()
        }
        self._call_examples = {
            tools: format_of(settings.tool_call_parser, source).example for tools, source in sources.items()
        }
        self.fill_in = FimTokens.from_tokenizer(tokenizer)
        self._pool = TextPool(
            WorkerSource.of(tokenizer, settings.ranking),
            short=settings.text_processes,
            large=1,
            templates=settings.max_concurrent_templates,
            grammars=MAX_CONCURRENT_GRAMMARS,
            max_waiting=settings.max_waiting_text_chars,
        )
        self._text_limits = Limits(settings.text_seconds, settings.text_memory)
        self._template_limits = Limits(settings.template_seconds, settings.template_memory)
        self.pairs = PairTokenizer(self._pool, self._text_limits, self.check_text_length)
        self._breakers: dict[tuple[str, ...], tuple[frozenset[int], frozenset[tuple[int, ...]]]] = {}
        self._grammars: dict[tuple[str, str, str], str] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="windlass-answers")

    @property
    def template_capabilities(self) -> TemplateCapabilities | None:
        """Of the template for chats with functions, which is the only one of most models; None where there is none."""
        return self._template_capabilities[True]

    def template_capabilities_for(self, tools: Sequence[Mapping[str, Any]] | None) -> TemplateCapabilities | None:
        """Of the template for chats with these functions on offer; None where there is none."""
        return self._template_capabilities[bool(tools)]

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a template for plain chats."""
        return self._template_capabilities[False] is not None

    @property
    def processes_lost(self) -> int:
        """Processes that ended when nobody had asked them to."""
        return self._pool.processes_lost

    # ---- life --------------------------------------------------------------------------------------------------------
    def spawn(self) -> None:
        """Begin to load the processes, and to compute what early refusals need: it visits the whole vocabulary once."""
        self._pool.spawn()
        self._threads.submit(lambda: self._tokenizer.max_token_chars)

    def wait_loaded(self) -> None:
        """Load; blocks. Raises LoadError where the chat template cannot be used."""
        self._pool.wait_loaded()

    def close(self) -> None:
        """End processes and threads without waiting for their work."""
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- work --------------------------------------------------------------------------------------------------------
    async def run_in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of bounded cost beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        max_model_len: int,
        truncate: int | None,
        keep_first: bool = False,
        param: str,
        caller: str,
        numbered: bool = False,
    ) -> list[Prompt]:
        """Tokenize `texts`; raises ApiError for one that cannot fit, before tokenizing it.

        truncate: keep the last so many tokens, or the first. The text may then be longer than the context, but not by any amount.
        numbered: errors about one of the texts name its place in `param`, too.
        """
        names = [f"{param}[{index}]" if numbered else param for index in range(len(texts))]
        for text, name in zip(texts, names, strict=True):
            await self.check_text_length(len(text), max_model_len, truncated=truncate is not None, param=name)
        prompts: list[Prompt] = []
        for batch in batches(texts, len):
            with pool_errors_as_api_errors(param, "tokenizing this text", self._text_limits):
                packed = await self._pool.run(
                    call(TextTasks.encode, batch, add_special_tokens=add_special_tokens),
                    size=sum(map(len, batch)),
                    limits=self._text_limits,
                    caller=caller,
                )
            for text, ids in zip(batch, packed, strict=True):
                count = count_ids(ids)
                if truncate is None and count > max_model_len:
                    raise context_length_exceeded(max_model_len, count, param=names[len(prompts)])
                cut = truncate is not None and count > truncate
                kept = slice_ids(ids, truncate, first=keep_first) if cut and truncate else ids
                many = count_ids(kept) > LARGE_JOB
                token_ids = await self.run_in_thread(unpack_ids, kept) if many else unpack_ids(kept)
                prompts.append(Prompt(token_ids, None if cut else text))
        return prompts

    async def encode_word_variants(
        self, words: Sequence[str], *, param: str, caller: str
    ) -> tuple[tuple[int, ...], ...]:
        """Id sequences of words as they begin a text and as they stand after a space."""
        with pool_errors_as_api_errors(param, "tokenizing this text", self._text_limits):
            return await self._pool.run(
                call(TextTasks.encode_word_variants, words),
                size=sum(map(len, words)),
                limits=self._text_limits,
                caller=caller,
            )

    async def breaker_tokens(
        self, breakers: Sequence[str], *, param: str, caller: str
    ) -> tuple[frozenset[int], frozenset[tuple[int, ...]]]:
        """(ids of tokens that hold a breaker, sequences of ids that do); those of the last few lists are kept."""
        key = tuple(breakers)
        found = self._breakers.pop(key, None)
        if found is None:
            with pool_errors_as_api_errors(param, "looking for sequence breakers in the vocabulary", self._text_limits):
                found = await self._pool.run(
                    call(TextTasks.breaker_tokens, key),
                    size=self._tokenizer.vocab_size,
                    limits=self._text_limits,
                    caller=caller,
                )
        self._breakers[key] = found  # behind the others: the first is the one not asked for the longest
        kept = sum(_cached_size(*item) for item in self._breakers.items())
        while len(self._breakers) > 1 and (
            kept > MAX_CACHED_BREAKER_SIZE or len(self._breakers) > MAX_CACHED_BREAKER_LISTS
        ):
            first = next(iter(self._breakers))
            kept -= _cached_size(first, self._breakers.pop(first))
        return found

    async def decode(self, prompts: Sequence[Sequence[int]], *, skip_special_tokens: bool, caller: str) -> list[str]:
        """The text of each list of token ids."""
        with pool_errors_as_api_errors("prompt", "detokenizing this prompt", self._text_limits):
            packed = [pack_ids(ids) for ids in prompts]
            return await self._pool.run(
                call(TextTasks.decode, packed, skip_special_tokens=skip_special_tokens),
                size=sum(map(len, prompts)),
                limits=self._text_limits,
                caller=caller,
            )

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        offsets: bool,
        token_strs: bool,
        max_model_len: int | None,
        param: str,
        caller: str,
    ) -> bytes:
        """The JSON answer of /tokenize."""
        with pool_errors_as_api_errors(param, "tokenizing this text", self._text_limits):
            task_call = call(
                TextTasks.tokenize,
                text,
                add_special_tokens=add_special_tokens,
                offsets=offsets,
                token_strs=token_strs,
                max_model_len=max_model_len,
                max_bytes=self._settings.max_response_bytes,
            )
            return await self._pool.run(task_call, size=len(text), limits=self._text_limits, caller=caller)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, offsets: bool, token_strs: bool, caller: str
    ) -> bytes:
        """The JSON answer of /detokenize."""
        with pool_errors_as_api_errors("tokens", "detokenizing these tokens", self._text_limits):
            task_call = call(
                TextTasks.detokenize,
                await self.run_in_thread(pack_ids, token_ids),
                skip_special_tokens=skip_special_tokens,
                offsets=offsets,
                token_strs=token_strs,
                max_bytes=self._settings.max_response_bytes,
            )
            return await self._pool.run(task_call, size=len(token_ids), limits=self._text_limits, caller=caller)

    async def compile_grammar(self, kind: str, value: str, alternative: str, *, param: str, caller: str) -> str:
        """What `windlass.server.text.grammars` makes of it; raises ApiError 400 naming `param` where it makes nothing."""
        key = kind, value, alternative
        grammar: str | None = self._grammars.get(key)
        if grammar is None:
            limits = Limits(GRAMMAR_SECONDS, self._text_limits.memory)
            limiter = self._pool.grammars
            with pool_errors_as_api_errors(param, "compiling this grammar", limits, "grammar"):
                grammar = await self._pool.run(
                    call(TextTasks.compile_grammar, kind, value, alternative),
                    size=len(value) + len(alternative),
                    limits=limits,
                    caller=caller,
                    limiter=limiter,
                )
            while len(self._grammars) >= MAX_CACHED_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        self._grammars.pop(key, None)
        self._grammars[key] = grammar  # the last one used is the last one
        return grammar

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        variables: dict[str, Any] | None,
        caller: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_model_len: int | None = None,
        truncated: bool = False,
    ) -> str:
        """The chat as one text; raises ApiError 400 where there is no template or it refuses the messages.

        variables: of the template, as the request gives them; the operator's hold beside them.
        tools: what the model shall be told that it may call.
        max_model_len: refuse messages before rendering them if their text alone cannot fit into so many tokens.
        truncated: their tokens will be cut, so they may be longer than that.
        """
        capabilities = self.template_capabilities_for(tools)
        if capabilities is None:
            raise bad_request(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                "messages",
                "no_chat_template",
            )
        for name in RESERVED:
            if variables and name in variables:
                raise bad_request(
                    f"chat_template_kwargs.{name} comes from the request itself: leave it out",
                    f"chat_template_kwargs.{name}",
                )
        if self._settings.template_kwargs:
            variables = {**self._settings.template_kwargs, **(variables or {})}
        size = sum(len(message.content or "") for message in messages)
        if max_model_len is not None:
            await self.check_text_length(size, max_model_len, truncated=truncated, param="messages")
        continuing = bool(continue_final_message)
        if continuing and add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        if continuing and messages[-1].role != "assistant":
            raise bad_request("continue_final_message needs a last message of role assistant", "continue_final_message")
        prepared = messages, capabilities, variables, tools, self._call_examples[bool(tools)]
        is_small = not tools and _is_small_chat(messages, variables)
        plain, size = _prepare_history(*prepared) if is_small else await self.run_in_thread(_prepare_history, *prepared)
        with pool_errors_as_api_errors(
            "messages", "the chat template, on these messages,", self._template_limits, "template"
        ):
            task_call = call(
                TextTasks.render,
                plain,
                add_generation_prompt=(not continuing) if add_generation_prompt is None else add_generation_prompt,
                continue_final_message=continuing,
                variables=variables,
                tools=tools if capabilities.tools else None,
                with_tools=bool(tools),
            )
            limiter = self._pool.templates
            return await self._pool.run(
                task_call, size=size, limits=self._template_limits, caller=caller, limiter=limiter
            )

    async def check_text_length(self, characters: int, max_model_len: int, *, truncated: bool, param: str) -> None:
        """Raise ApiError for a text of so many characters that cannot fit into so many tokens. truncated: see `encode`."""
        if characters <= max_model_len:
            return  # a token has at least one character
        per_token = await self.run_in_thread(lambda: self._tokenizer.max_token_chars)
        if not truncated:
            if characters > max_model_len * per_token:
                tokens = -(-characters // per_token)
                raise context_length_exceeded(max_model_len, tokens, param=param, at_least=True)
        elif characters > (max_characters := max(max_model_len * per_token, self._settings.max_tokenize_chars)):
            raise bad_request(
                f"{param} holds {characters} characters, at most {max_characters} are tokenized to be truncated: "
                "send what is to be kept",
                param,
                "string_too_long",
            )


def _cached_size(breakers: tuple[str, ...], found: tuple[frozenset[int], frozenset[tuple[int, ...]]]) -> int:
    return sum(map(len, breakers)) + len(found[0]) + len(found[1])


def _is_small_chat(messages: Sequence[ChatMessage], variables: dict[str, Any] | None) -> bool:
    """Whether `_prepare_history` takes but a moment, told without looking at more than so much."""
    if len(messages) > MAX_INLINE_MESSAGES:
        return False
    texts = [text for each in messages for text in (each.content, each.reasoning_content, each.reasoning) if text]
    remaining = MAX_INLINE_VALUES
    stack: list[Any] = [variables]
    for message in messages:
        stack += [call.function.arguments for call in message.tool_calls or ()]
        if message.function_call is not None:
            stack.append(message.function_call.arguments)
    while stack and remaining >= 0:
        item = stack.pop()
        remaining -= 1 + (len(item) if isinstance(item, str | dict | list) else 0)
        if remaining >= 0 and isinstance(item, dict | list):
            stack.extend(item.values() if isinstance(item, dict) else item)
    return remaining >= 0 and sum(map(len, texts)) < LARGE_JOB


def _prepare_history(
    messages: Sequence[ChatMessage],
    capabilities: TemplateCapabilities,
    variables: dict[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    example: str,
) -> tuple[list[dict[str, Any]], int]:
    """The messages as templates expect them, and the size of what goes to the template: characters and values."""
    plain = prepare_history(messages, tools, capabilities, example)
    size = 0
    stack: list[Any] = [plain, variables, tools]
    while stack:
        item = stack.pop()
        size += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return plain, size
