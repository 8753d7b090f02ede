"""Which options a server says it runs with: those that are set and matter to whoever sends requests. Knows how they are spelt."""

from __future__ import annotations

from windlass.server.options.engine import EngineOptions
from windlass.server.options.server import ServerOptions


def not_default(engine: EngineOptions, server: ServerOptions) -> list[str]:
    """The options, as written, that change how answers come about or what requests may ask for, as far as they are set."""
    return [
        option
        for option, given in (
            ("--deterministic", engine.deterministic),
            (f"--speculative-ngram {engine.speculative_ngram}", engine.speculative_ngram > 0),
            (f"--speculative-model {engine.speculative_model}", engine.speculative_model is not None),
            ("--speculative-mtp", engine.speculative_mtp),
            (f"--rope-ladder {','.join(engine.rope_ladder or ())}", bool(engine.rope_ladder)),
            (f"--rope-update {engine.rope_update}", engine.rope_update is not None),
            (f"--rope-policy {server.rope_policy}", server.rope_policy != ServerOptions().rope_policy),
            ("--rope-exact", server.rope_exact),
            (f"--context-overflow {server.context_overflow}", server.context_overflow != "stop"),
            (f"--keep-tokens {server.keep_tokens}", server.keep_tokens is not None),
            (f"--attention-window {server.attention_window}", server.attention_window is not None),
            (f"--attention-sinks {server.attention_sinks}", server.attention_sinks > 0),
            (f"--cache-reuse {server.cache_reuse}", server.cache_reuse > 0),
            (f"--shift-context {engine.shift_context}", engine.shift_context is not None),
            (f"--max-total-tokens {engine.max_total_tokens}", engine.max_total_tokens is not None),
            (f"--chat-template {server.chat_template}", server.chat_template is not None),
            (f"--rerank-tokens {','.join(server.rerank_tokens or ())}", bool(server.rerank_tokens)),
            (f"--rerank-template {server.rerank_template}", server.rerank_template is not None),
            (f"--generation-config {server.generation_config}", server.generation_config != "auto"),
            (
                f"--default-chat-template-kwargs {server.default_chat_template_kwargs}",
                server.default_chat_template_kwargs is not None,
            ),
            (f"--tool-call-parser {server.tool_call_parser}", server.tool_call_parser != "auto"),
            (f"--reasoning-parser {server.reasoning_parser}", server.reasoning_parser != "auto"),
        )
        if given
    ]
