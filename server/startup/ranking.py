"""How a model ranks pairs of texts: by what the operator says, else by what its files say. Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.sentence_transformers_files import read_reranker_config
from windlass.server.options.server import ServerOptions
from windlass.server.options.settings import RankSettings
from windlass.server.options.spelling import read_template_file, split
from windlass.server.text.pair_prompt import QWEN3_RERANKER

if TYPE_CHECKING:
    from windlass.engine.model.model_spec import ModelSpec

_QWEN3 = "qwen3"
_QWEN3_TOKENS = ("yes", "no")


def rank_settings(path: Path, server: ServerOptions, spec: ModelSpec | None) -> RankSettings | None:
    """Of the model in this directory; None where it scores pairs without a prompt around them. Raises LoadError.

    spec: None where it is not known; then the model is taken to generate.
    """
    given = _check(server, spec)
    template = _template(server)
    if spec is not None and not spec.generates:
        one = spec.head is not None and not spec.head.classes.per_token and len(spec.head.classes.labels) == 1
        return (
            RankSettings(template=template, needs_template=template is not None)
            if one and not spec.is_bidirectional
            else None
        )
    declared = read_reranker_config(path)
    instruction = None if declared is None else declared.instruction
    tokens = given or (() if declared is None else declared.tokens)
    if server.rerank_template == _QWEN3:
        tokens = tokens or _QWEN3_TOKENS
    elif template is None and declared is not None and declared.is_qwen3_reranker:
        template = QWEN3_RERANKER
    if not tokens:
        if template is None:
            return None
        raise LoadError(
            f"--rerank-template {server.rerank_template}: the model's files do not say which tokens it answers with: say it with "
            "--rerank-tokens, such as no,yes"
        )
    asked = bool(given) or template is not None  # what files alone say keeps nobody from generating
    return RankSettings(template=template, needs_template=asked, tokens=tokens, instruction=instruction)


def _check(server: ServerOptions, spec: ModelSpec | None) -> tuple[str, ...]:
    """The operator's tokens, the one that counts first. Raises LoadError for options that this model cannot follow."""
    tokens = split(server.rerank_tokens)
    if server.rerank_tokens is not None and len(tokens) not in (1, 2):
        raise LoadError(f"--rerank-tokens takes one token or two, the refusal first: no,yes; got {len(tokens)}")
    if spec is None or spec.generates:
        return tuple(reversed(tokens))
    if tokens:
        raise LoadError(f"--rerank-tokens: a {spec.architecture} goes on with no token: leave it out")
    if server.rerank_template is not None:
        if spec.head is None or spec.head.classes.per_token or len(spec.head.classes.labels) != 1:
            raise LoadError(f"--rerank-template: a {spec.architecture} without one class ranks no pairs: leave it out")
        if spec.is_bidirectional:
            raise LoadError("--rerank-template: pairs are joined by the tokenizer of this model: leave it out")
    return ()


def _template(server: ServerOptions) -> str | None:
    """The source of the operator's; raises LoadError for one that cannot be used."""
    given = server.rerank_template
    if given is None or given == _QWEN3:
        return QWEN3_RERANKER if given == _QWEN3 else None
    source = read_template_file("--rerank-template", Path(given))
    from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError  # they bring jinja2
    from windlass.server.text.pair_template import cut_pairs

    try:
        cut_pairs(ChatTemplate(source))
    except ChatTemplateError as error:
        raise LoadError(f"--rerank-template {given}: {error.message}") from None
    return source
