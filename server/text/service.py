"""Text work of the API: tokenizing, detokenizing, chat templates, grammars and pairs of texts."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, TypeVar, Unpack

from windlass.engine.errors import LoadError
from windlass.server.config.option_names import with_option_names
from windlass.server.config.settings import ServerSettings
from windlass.server.errors import ApiError, bad_request, context_length_exceeded, unavailable
from windlass.server.schemas.chat import ChatMessage
from windlass.server.text.chat_messages import Change, FittedMessages, prepare_history, prepare_tools
from windlass.server.text.tokenizer import FimTokens
from windlass.server.text.tokenizer_files import RESERVED, PairPrompt, PairTemplate, TemplateCapabilities
from windlass.server.text.tool_parsers.formats import format_of, is_known
from windlass.server.text.workers.frames import Limits, WorkerSource, count_ids, pack_ids, slice_ids, unpack_ids
from windlass.server.text.workers.pool import (
    LARGE_JOB,
    ClosedError,
    FairLimiter,
    KilledError,
    OutOfMemoryError,
    ProcessDiedError,
    QueueFullError,
    RefusedError,
    TextPool,
    TextWorkerError,
    TooManyCrashesError,
    TooSlowError,
)
from windlass.server.text.workers.tasks import TextTasks

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer

MAX_BATCH_TEXTS = 32  # short prompts tokenized in one job; other callers take turns between jobs
MAX_CACHED_BREAKER_SIZE = 1 << 16  # ids, sequences, and characters of the breakers, over all cached lists
MAX_CACHED_BREAKER_LISTS = 64  # even a list without any tokens takes memory

# A chat with more messages, more text, or more values in its calls and variables is prepared on a thread.
MAX_INLINE_MESSAGES = 64
MAX_INLINE_VALUES = 8192  # values and their characters: 1 to 2 ms
MAX_CACHED_GRAMMARS = 64  # agents send the same schema again and again
MAX_CONCURRENT_GRAMMARS = 2  # quick ones, and slow ones of different callers
QUICK_GRAMMAR_SECONDS = 0.25  # one that takes longer is compiled again among the slow ones, so that others pass it
GRAMMAR_SECONDS = 4.0  # time limit of compiling a grammar
PROBE_LIMITS = Limits(5.0, 512 * 2**20)  # for probing a chat template, which takes about 50 ms
T = TypeVar("T")
R = TypeVar("R")

_logger = logging.getLogger("windlass.server")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine. text: that of all its ids, None for a prompt given as ids or truncated. The prompt of a chat
    always has the rendered text."""

    token_ids: list[int]
    text: str | None = None


class ChatOptions(TypedDict):
    """How messages are rendered. variables: of the template, from the request. tools: the functions on offer."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    variables: dict[str, Any] | None
    tools: NotRequired[Sequence[Mapping[str, Any]] | None]


class TokenizeOptions(TypedDict):
    """Options of a response of /tokenize. offsets, token_strs: whether it has these fields."""

    add_special_tokens: bool
    offsets: bool
    token_strs: bool
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a text job. kind: prefix of error codes. subject: of error messages."""

    kind: Literal["text", "template", "grammar"]
    subject: str
    limits: Limits


@contextmanager
def pool_errors_as_api_errors(param: str, *phases: Phase) -> Iterator[None]:
    """Turn errors of the pool into ApiError. phases: those of the job."""
    try:
        yield
    except LoadError as error:
        raise unavailable(with_option_names(str(error)), code="text_unavailable", retry_after=1) from None
    except TextWorkerError as error:
        raise _api_error(error, param, phases[error.phase]) from None


def _api_error(error: TextWorkerError, param: str, phase: Phase) -> ApiError:
    subject, kind = phase.subject, phase.kind
    if isinstance(error, RefusedError):
        code = {"template": "chat_template_error", "grammar": "invalid_grammar"}.get(kind)
        return bad_request(str(error), param, code)
    if isinstance(error, TooSlowError):
        return bad_request(f"{subject} took more than {phase.limits.seconds:g} s", param, f"{kind}_timeout")
    if isinstance(error, OutOfMemoryError):
        mib = phase.limits.memory >> 20
        return bad_request(f"{subject} took more than {mib} MiB of memory", param, f"{kind}_memory")
    if isinstance(error, KilledError):
        message = f"{subject} was ended from outside, perhaps for lack of memory: send the request again"
        return unavailable(message, code="text_unavailable", retry_after=1)
    if isinstance(error, ProcessDiedError):
        return bad_request(f"{subject} ended the process it ran in ({error})", param, f"{kind}_failed")
    if isinstance(error, QueueFullError):
        return ApiError(
            429,
            "too much text is waiting to be tokenized: try again later",
            code="too_much_text",
            retry_after=1,
        )
    if isinstance(error, TooManyCrashesError):
        seconds = math.ceil(error.retry_after)
        return ApiError(
            429,
            f"{error} repeatedly: wait {seconds} s, and change {param}",
            code="too_many_crashes",
            retry_after=seconds,
        )
    return unavailable(str(error), code="text_unavailable", retry_after=1)


class TextService:
    """The text work of one app. `caller` in its methods: waiting requests of different callers take turns.

    on_changes: called for each chat, in its context, with the kinds of changes that fit its messages to the template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        on_changes: Callable[[Sequence[Change]], None] = lambda changes: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._on_changes = on_changes
        self._settings = settings
        # By whether functions are on offer.
        self._templates = {tools: tokenizer.template_for(tools) for tools in (False, True)}
        self._capabilities: dict[bool, TemplateCapabilities | None] | None = None
        self._probing = threading.Lock()
        self._logged_changes: set[str] = set()
        self._call_examples = {
            tools: format_of(settings.tool_call_parser, source).example for tools, source in self._templates.items()
        }
        self.fill_in = FimTokens.from_tokenizer(tokenizer)
        self._pool = TextPool(
            WorkerSource.from_tokenizer(tokenizer, settings.ranking),
            short=settings.text_processes,
            large=1,
            templates=settings.max_concurrent_templates,
            grammars=MAX_CONCURRENT_GRAMMARS,
            max_waiting=settings.max_waiting_text_chars,
        )
        text_limits = Limits(settings.text_seconds, settings.text_memory)
        template_limits = Limits(settings.template_seconds, settings.template_memory)
        self.tokenizing = Phase("text", "tokenizing this text", text_limits)
        self._rendering = Phase("template", "the chat template, on these messages,", template_limits)
        self._max_token_chars: int | None = None
        self.pairs = PairTokenizer(self)
        self._breakers: dict[tuple[str, ...], tuple[frozenset[int], frozenset[tuple[int, ...]]]] = {}
        self._grammars: dict[tuple[str, str, str], str] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="windlass-answers")

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a template for plain chats."""
        return self._templates[False] is not None

    @property
    def processes_lost(self) -> int:
        """Number of processes that ended unexpectedly."""
        return self._pool.processes_lost

    # ---- start and end -----------------------------------------------------------------------------------------------
    def spawn(self) -> None:
        """Start loading the processes and computing the longest token, for which the vocabulary is sorted once."""
        self._pool.spawn()
        self._threads.submit(lambda: self._tokenizer.max_token_chars)

    def wait_loaded(self) -> None:
        """Load; blocks. Raises LoadError if the chat template cannot be used. The template is probed meanwhile."""
        self._pool.wait_loaded()
        self._threads.submit(self._load_capabilities)  # the first chat waits for it, the start does not

    async def template_capabilities(self, *, tools: bool) -> TemplateCapabilities | None:
        """Capabilities of the template for chats with or without functions; None without a template.

        Waits for the text processes. Raises ApiError if they cannot be loaded.
        """
        if self._capabilities is None:
            with pool_errors_as_api_errors("messages", self._rendering):
                return (await self.run_in_thread(self._load_capabilities))[tools]
        return self._capabilities[tools]

    def _load_capabilities(self) -> dict[bool, TemplateCapabilities | None]:
        with self._probing:
            if self._capabilities is None:
                plain, with_tools = self._templates[False], self._templates[True]
                found = {False: None if plain is None else self._probe(with_tools=False)}
                found[True] = found[False] if with_tools == plain else self._probe(with_tools=True)
                self._capabilities = found
                if (capabilities := found[True]) is not None and self.call_format(capabilities) is None:
                    _logger.warning(
                        "the chat template supports tools, but its format of tool calls is unknown: only calls in plain JSON are "
                        "recognized; set the format with --tool-call-parser"
                    )
            return self._capabilities

    def call_format(self, capabilities: TemplateCapabilities) -> str | None:
        """Format in which tool calls are read, None if the chat template shows functions and its format is not known."""
        parser, template = self._settings.tool_call_parser, self._templates[True]
        if parser == "none":
            return parser
        if parser == "auto" and template is not None and capabilities.tools and not is_known(template):
            return None
        return format_of(parser, template).name

    def _probe(self, *, with_tools: bool) -> TemplateCapabilities:
        try:
            variables = dict(self._settings.template_kwargs)
            task = partial(TextTasks.probe_template, with_tools=with_tools, variables=variables)
            return self._pool.run_blocking(task, PROBE_LIMITS)
        except (KilledError, ClosedError):
            raise
        except TextWorkerError as error:
            reason = _api_error(error, "messages", Phase("template", "probing it", PROBE_LIMITS)).message
            _logger.warning("the chat template could not be examined, so messages are not adapted to it: %s", reason)
            return TemplateCapabilities()

    def pair_template(self) -> PairTemplate | None:
        """The template of pairs, if there is one; blocks while the text processes load. Raises ApiError."""
        phase = Phase("template", "loading the chat template", self._rendering.limits)
        with pool_errors_as_api_errors("model", phase):
            return self._pool.pairs()

    def close(self) -> None:
        """End processes and threads without waiting for their work."""
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- running -----------------------------------------------------------------------------------------------------
    async def run_in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of bounded cost on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def run(
        self, task: partial[R], *phases: Phase, param: str, size: int, caller: str, limiter: FairLimiter | None = None
    ) -> R:
        """Run a text job, see `TextPool.run`; raises ApiError naming `param`. phases: `tokenizing` if none is given."""
        phases = phases or (self.tokenizing,)
        with pool_errors_as_api_errors(param, *phases):
            limits = [phase.limits for phase in phases]
            return await self._pool.run(task, *limits, size=size, caller=caller, limiter=limiter)

    # ---- text to tokens and back -------------------------------------------------------------------------------------
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

        truncate: keep the last `truncate` tokens, or with `keep_first` the first. The text may then be longer than the context,
        up to a limit. numbered: errors name the index of a text after `param`.
        """
        names = [f"{param}[{index}]" if numbered else param for index in range(len(texts))]
        for text, name in zip(texts, names, strict=True):
            await self.check_text_length(len(text), max_model_len, truncated=truncate is not None, param=name)
        prompts: list[Prompt] = []
        for batch in batches(texts, len):
            task = partial(TextTasks.encode, texts=batch, add_special_tokens=add_special_tokens)
            packed = await self.run(task, param=param, size=sum(map(len, batch)), caller=caller)
            for text, ids in zip(batch, packed, strict=True):
                name = names[len(prompts)]
                token_ids = await self._unpack(ids, max_model_len, truncate, keep_first=keep_first, param=name)
                prompts.append(Prompt(token_ids, text if len(token_ids) == count_ids(ids) else None))
        return prompts

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_special_tokens: bool,
        max_model_len: int | None,
        truncate: int | None = None,
        keep_first: bool = False,
        caller: str,
        **options: Unpack[ChatOptions],
    ) -> Prompt:
        """Render and tokenize a chat in one job; raises ApiError as `render` and `encode` do.

        max_model_len: None for no limit. truncate, keep_first: see `encode`.
        """
        max_characters = None
        self._check_chat(messages, options)
        if max_model_len is not None:
            size = sum(len(message.content or "") for message in messages)
            await self.check_text_length(size, max_model_len, truncated=truncate is not None, param="messages")
            max_characters = await self._max_characters(max_model_len, truncated=truncate is not None)
        conversation, size = await self._prepare_chat(messages, options)
        task = partial(
            TextTasks.encode_chat, add_special_tokens=add_special_tokens, max_characters=max_characters, **conversation
        )
        phases = self._rendering, self.tokenizing
        limiter = self._pool.templates
        encoded = await self.run(task, *phases, param="messages", size=size, caller=caller, limiter=limiter)
        if isinstance(encoded, int):
            assert max_model_len is not None
            raise await self._too_long(encoded, max_model_len, truncated=truncate is not None, param="messages")
        text, packed = encoded
        return Prompt(
            await self._unpack(packed, max_model_len, truncate, keep_first=keep_first, param="messages"), text
        )

    async def render(self, messages: Sequence[ChatMessage], *, caller: str, **options: Unpack[ChatOptions]) -> str:
        """The chat as text; raises ApiError 400 without a template, or if it refuses the messages."""
        self._check_chat(messages, options)
        conversation, size = await self._prepare_chat(messages, options)
        task, limiter = partial(TextTasks.render, **conversation), self._pool.templates
        return await self.run(task, self._rendering, param="messages", size=size, caller=caller, limiter=limiter)

    async def encode_word_variants(
        self, words: Sequence[str], *, param: str, caller: str
    ) -> tuple[tuple[int, ...], ...]:
        """Id sequences of words at the beginning of a text and after a space."""
        task = partial(TextTasks.encode_word_variants, words=words)
        return await self.run(task, param=param, size=sum(map(len, words)), caller=caller)

    async def dry_breaker_tokens(
        self, breakers: Sequence[str], *, param: str, caller: str
    ) -> tuple[frozenset[int], frozenset[tuple[int, ...]]]:
        """(ids of tokens that contain a breaker, sequences of ids that do). Recent lists are cached."""
        key = tuple(breakers)
        found = self._breakers.pop(key, None)
        if found is None:
            task = partial(TextTasks.dry_breaker_tokens, breakers=key)
            phase = Phase("text", "searching the vocabulary for sequence breakers", self.tokenizing.limits)
            found = await self.run(task, phase, param=param, size=self._tokenizer.vocab_size, caller=caller)
        self._breakers[key] = found  # at the end: the first one is the least recently used
        size = sum(_cached_size(*item) for item in self._breakers.items())
        while len(self._breakers) > 1 and (
            size > MAX_CACHED_BREAKER_SIZE or len(self._breakers) > MAX_CACHED_BREAKER_LISTS
        ):
            first = next(iter(self._breakers))
            size -= _cached_size(first, self._breakers.pop(first))
        return found

    async def decode(self, prompts: Sequence[Sequence[int]], *, skip_special_tokens: bool, caller: str) -> list[str]:
        """The text of each list of token ids."""
        packed = [pack_ids(ids) for ids in prompts]
        task = partial(TextTasks.decode, prompts=packed, skip_special_tokens=skip_special_tokens)
        phase = Phase("text", "detokenizing this prompt", self.tokenizing.limits)
        return await self.run(task, phase, param="prompt", size=sum(map(len, prompts)), caller=caller)

    async def tokenize(self, text: str, *, caller: str, **options: Unpack[TokenizeOptions]) -> bytes:
        """The JSON response of /tokenize for a text."""
        task = partial(TextTasks.tokenize, text=text, max_bytes=self._settings.max_response_bytes, **options)
        return await self.run(task, param="prompt", size=len(text), caller=caller)

    async def tokenize_chat(
        self, messages: Sequence[ChatMessage], chat: ChatOptions, *, caller: str, **options: Unpack[TokenizeOptions]
    ) -> bytes:
        """The JSON response of /tokenize for a chat, which is rendered and tokenized in one job; raises as `render` does."""
        self._check_chat(messages, chat)
        conversation, size = await self._prepare_chat(messages, chat)
        max_bytes = self._settings.max_response_bytes
        task = partial(TextTasks.tokenize_chat, conversation=conversation, max_bytes=max_bytes, **options)
        phases, limiter = (self._rendering, self.tokenizing), self._pool.templates
        return await self.run(task, *phases, param="messages", size=size, caller=caller, limiter=limiter)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, offsets: bool, token_strs: bool, caller: str
    ) -> bytes:
        """The JSON response of /detokenize."""
        task = partial(
            TextTasks.detokenize,
            token_ids=await self.run_in_thread(pack_ids, token_ids),
            skip_special_tokens=skip_special_tokens,
            offsets=offsets,
            token_strs=token_strs,
            max_bytes=self._settings.max_response_bytes,
        )
        phase = Phase("text", "detokenizing these tokens", self.tokenizing.limits)
        return await self.run(task, phase, param="tokens", size=len(token_ids), caller=caller)

    async def compile_grammar(self, kind: str, value: str, alternative: str, *, param: str, caller: str) -> str:
        """A serialized grammar, see `windlass.server.text.grammars`; recent ones are cached. Raises ApiError 400."""
        key = kind, value, alternative
        grammar: str | None = self._grammars.pop(key, None)
        if grammar is None:
            task = partial(TextTasks.compile_grammar, kind=kind, value=value, alternative=alternative)
            memory = self.tokenizing.limits.memory
            phase = Phase("grammar", "compiling this grammar", Limits(GRAMMAR_SECONDS, memory))
            size = len(value) + len(alternative)
            with pool_errors_as_api_errors(param, phase):
                try:
                    quick, limiter = Limits(QUICK_GRAMMAR_SECONDS, memory), self._pool.grammars
                    grammar = await self._pool.run(task, quick, size=size, caller=caller, limiter=limiter)
                except TooSlowError:
                    limiter = self._pool.slow_grammars
                    grammar = await self._pool.run(task, phase.limits, size=size, caller=caller, limiter=limiter)
            while len(self._grammars) >= MAX_CACHED_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        self._grammars[key] = grammar  # at the end: the first one is the least recently used
        return grammar

    # ---- lengths -----------------------------------------------------------------------------------------------------
    async def check_text_length(self, characters: int, max_model_len: int, *, truncated: bool, param: str) -> None:
        """Raise ApiError for a text that cannot fit into `max_model_len` tokens. truncated: see `encode`."""
        # A token has at least one character.
        if characters > max_model_len and characters > await self._max_characters(max_model_len, truncated=truncated):
            raise await self._too_long(characters, max_model_len, truncated=truncated, param=param)

    async def _max_characters(self, max_model_len: int, *, truncated: bool) -> int:
        if self._max_token_chars is None:
            self._max_token_chars = await self.run_in_thread(lambda: self._tokenizer.max_token_chars)
        most = max_model_len * self._max_token_chars
        return max(most, self._settings.max_tokenize_chars) if truncated else most

    async def _too_long(self, characters: int, max_model_len: int, *, truncated: bool, param: str) -> ApiError:
        most = await self._max_characters(max_model_len, truncated=truncated)
        if not truncated:
            tokens = -(-characters // (self._max_token_chars or 1))
            return context_length_exceeded(max_model_len, tokens, param=param, at_least=True)
        return bad_request(
            f"{param} holds {characters} characters, at most {most} are tokenized to be truncated: send only the part to keep",
            param,
            "string_too_long",
        )

    async def _unpack(
        self, packed: bytes, max_model_len: int | None, truncate: int | None, *, keep_first: bool, param: str
    ) -> list[int]:
        """The ids, truncated; raises ApiError if there are too many. Many ids are unpacked on a thread."""
        count = count_ids(packed)
        if truncate is None and max_model_len is not None and count > max_model_len:
            raise context_length_exceeded(max_model_len, count, param=param)
        if truncate and count > truncate:
            packed = slice_ids(packed, truncate, first=keep_first)
        return await self.run_in_thread(unpack_ids, packed) if count_ids(packed) > LARGE_JOB else unpack_ids(packed)

    # ---- chats -------------------------------------------------------------------------------------------------------
    def _check_chat(self, messages: Sequence[ChatMessage], options: ChatOptions) -> None:
        """Raise ApiError for options that cannot be used with this model or with each other."""
        if self._templates[bool(options.get("tools"))] is None:
            raise bad_request(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                "messages",
                "no_chat_template",
            )
        for name in RESERVED:
            if options["variables"] and name in options["variables"]:
                raise bad_request(
                    f"chat_template_kwargs.{name} comes from the request itself: leave it out",
                    f"chat_template_kwargs.{name}",
                )
        if not options["continue_final_message"]:
            return
        if options["add_generation_prompt"]:
            raise bad_request(
                "continue_final_message and add_generation_prompt cannot be combined: set one of them",
                "continue_final_message",
            )
        if messages[-1].role != "assistant":
            raise bad_request("continue_final_message needs a last message of role assistant", "continue_final_message")

    async def _prepare_chat(self, messages: Sequence[ChatMessage], options: ChatOptions) -> tuple[dict[str, Any], int]:
        """Arguments of `TextTasks.render`, and their size in characters and values."""
        tools, variables = options.get("tools"), options["variables"]
        if self._settings.template_kwargs:
            variables = {**self._settings.template_kwargs, **(variables or {})}
        capabilities = await self.template_capabilities(tools=bool(tools))
        assert capabilities is not None
        prepared = messages, capabilities, variables, tools, self._call_examples[bool(tools)]
        is_small = not tools and _is_small_chat(messages, variables)
        fit = _prepare_history
        fitted, size = fit(*prepared) if is_small else await self.run_in_thread(fit, *prepared)
        self._report_changes(fitted.changes)
        continuing, prompts = bool(options["continue_final_message"]), options["add_generation_prompt"]
        conversation = {
            "messages": fitted.messages,
            "null_content": capabilities.null_content,
            "add_generation_prompt": (not continuing) if prompts is None else prompts,
            "continue_final_message": continuing,
            "variables": variables,
            "tools": prepare_tools(tools, capabilities),
            "with_tools": bool(tools),
        }
        return conversation, size

    def _report_changes(self, changes: Sequence[Change]) -> None:
        """Report changes of messages to the request's observer, and each kind once in the log."""
        self._on_changes(changes)
        for change in changes:
            if change not in self._logged_changes:
                self._logged_changes.add(change)
                _logger.info("messages are adapted to the chat template: %s (see docs/guides/tool-calling.md)", change)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """Options for all pairs of a request. max_tokens: limit of a pair. truncate: tokens to which a pair is cut.

    keep_first: whether the end of the second text is cut, or its beginning. first_param, second_params: names of the texts in
    errors, the second one of each pair.
    """

    max_tokens: int
    truncate: int | None
    keep_first: bool
    add_special_tokens: bool
    first_param: str
    second_params: Sequence[str]
    caller: str


class PairTokenizer:
    """Tokenizes pairs of texts for rerankers and classifiers."""

    def __init__(self, service: TextService) -> None:
        self._service = service

    async def truncate(
        self, documents: Sequence[str], max_tokens: int, *, max_model_len: int, param: str, caller: str
    ) -> list[str]:
        """The beginning of each document, at most `max_tokens` tokens. Raises ApiError for one that is far too long."""
        for index, document in enumerate(documents):
            name = f"{param}[{index}]"
            await self._service.check_text_length(len(document), max_model_len, truncated=True, param=name)
        found: list[str] = []
        for batch in batches(documents, len):
            task = partial(TextTasks.truncate, texts=batch, max_tokens=max_tokens)
            cut = await self._service.run(task, param=param, size=sum(map(len, batch)), caller=caller)
            found += cut
        return found

    async def join(self, pairs: Sequence[tuple[str, str]], options: PairOptions) -> list[tuple[list[int], int]]:
        """Token ids of pairs as the tokenizer joins them, each with the index of the second text's first token.

        The end of the second text is cut so that a pair has at most `truncate` tokens. Raises ApiError for a pair that cannot
        fit, if possible before tokenizing it.
        """
        await self._check_lengths(pairs, options)
        special, most = options.add_special_tokens, options.truncate
        found: list[tuple[list[int], int]] = []
        for batch in batches(pairs, _pair_length):
            task = partial(TextTasks.encode_pairs, pairs=batch, add_special_tokens=special, max_tokens=most)
            size = sum(map(_pair_length, batch))
            joined = await self._service.run(task, param=options.first_param, size=size, caller=options.caller)
            for ids, begin in joined:
                found.append((_unpack_pair(ids, options, len(found)), begin))
        return found

    async def fill(
        self, prompt: PairPrompt, instruction: str, pairs: Sequence[tuple[str, str]], options: PairOptions
    ) -> list[list[int]]:
        """Token ids of the prompt with each pair of query and document. Cuts and raises as `join` does."""
        await self._service.check_text_length(
            len(instruction), options.max_tokens, truncated=False, param="instruction"
        )
        await self._check_lengths(pairs, options)
        around = prompt.length + len(instruction)
        found: list[list[int]] = []
        for batch in batches(pairs, _pair_length):
            task = partial(
                TextTasks.encode_pair_prompts,
                prompt=prompt,
                instruction=instruction,
                pairs=batch,
                add_special_tokens=options.add_special_tokens,
                max_tokens=options.truncate,
                keep_first=options.keep_first,
            )
            size = sum(around + _pair_length(pair) for pair in batch)
            filled = await self._service.run(task, param=options.first_param, size=size, caller=options.caller)
            for ids in filled:
                found.append(_unpack_pair(ids, options, len(found)))
        return found

    async def _check_lengths(self, pairs: Sequence[tuple[str, str]], options: PairOptions) -> None:
        check, most = self._service.check_text_length, options.max_tokens
        for (first, second), name in zip(pairs, options.second_params, strict=True):
            await check(len(first), most, truncated=False, param=options.first_param)
            await check(len(second), most, truncated=options.truncate is not None, param=name)


def batches(texts: Sequence[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups of short texts, or of pairs of them; a long one alone."""
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


def _unpack_pair(packed: bytes, options: PairOptions, index: int) -> list[int]:
    """The ids of a pair; raises ApiError if there are too many."""
    count = count_ids(packed)
    if count > options.max_tokens:
        raise context_length_exceeded(options.max_tokens, count, param=options.second_params[index])
    return unpack_ids(packed)


def _cached_size(breakers: tuple[str, ...], found: tuple[frozenset[int], frozenset[tuple[int, ...]]]) -> int:
    return sum(map(len, breakers)) + len(found[0]) + len(found[1])


def _is_small_chat(messages: Sequence[ChatMessage], variables: dict[str, Any] | None) -> bool:
    """Whether `_prepare_history` is fast, found by inspecting a bounded number of values."""
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
) -> tuple[FittedMessages, int]:
    """The messages fitted to the template, and the size of the template's input in characters and values."""
    fitted = prepare_history(messages, tools, capabilities, example)
    size = 0
    stack: list[Any] = [fitted.messages, variables, tools]
    while stack:
        item = stack.pop()
        size += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return fitted, size
