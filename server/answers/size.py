"""How large an answer may become, estimated before anything is generated.

Knows what is asked for and typical sizes of JSON; knows nothing of tokens' texts. An answer that grows past the limit all
the same is ended by its writer.
"""

from __future__ import annotations

from collections.abc import Iterable

from windlass.server.answers.base import AnswerOptions

# Bytes of JSON per token, for vocabularies whose tokens have about six characters and log-probabilities of 18 digits.
TEXT = 6
TOKEN_ID = 6
COMPLETION_LOGPROBS = 42  # its text, its own log-probability, its offset, and the braces of its alternatives
COMPLETION_ALTERNATIVE = 32
CHAT_LOGPROBS = 25
CHAT_ALTERNATIVE = 90  # text, log-probability and bytes
PROMPT_LOGPROBS = 3
PROMPT_ALTERNATIVE = 72  # id, log-probability, rank and text


def estimate_bytes(
    options: AnswerOptions, lengths: Iterable[tuple[int, int]], *, chat: bool, echo: bool, stream: bool
) -> int:
    """Bytes of the answer, or of what a stream keeps for its first events.

    lengths: per prompt its tokens and the most that may be generated.
    """
    logprobs, prompt_logprobs = options.logprobs, options.prompt_logprobs
    token = 0
    if logprobs is not None:
        each, alternative = (CHAT_LOGPROBS, CHAT_ALTERNATIVE) if chat else (COMPLETION_LOGPROBS, COMPLETION_ALTERNATIVE)
        token = each + alternative * (logprobs + 1)
    ids = TOKEN_ID if options.return_token_ids else 0
    of_prompt = ids + (TEXT + token if echo else 0)
    if prompt_logprobs is not None:
        of_prompt += PROMPT_LOGPROBS + PROMPT_ALTERNATIVE * (prompt_logprobs + 1)
    of_generated = TEXT + ids + token
    if stream:
        return sum(of_prompt * prompt for prompt, _ in lengths)
    return sum(options.n * of_prompt * prompt + options.samples * of_generated * most for prompt, most in lengths)
