"""The methods of the synchronous client for what generates nothing. No rule lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from windlass.clients import _retrieval_calls as calls
from windlass.clients._calls import Call
from windlass.clients.options import (
    ClassifyOptions,
    EmbeddingOptions,
    PoolingOptions,
    Prompt,
    RerankOptions,
    ScoreOptions,
    Timeout,
)
from windlass.clients.retrieval_types import Classification, Embeddings, PairScores, PooledStates, Ranking

T = TypeVar("T")


class RetrievalMethods:
    """What `Client` has beside generating."""

    def embeddings(
        self,
        input: Prompt,
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> Embeddings:
        """A vector for each text: a string, token ids, or a list of either. See `completions` for the other arguments."""
        fixed = {"input": input, "model": model, "timeout": deadline}
        return self._run(calls.embeddings(fixed, options, extra_body, timeout))

    def pooling(
        self,
        input: Prompt,
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> PooledStates:
        """The hidden states of texts: one row each, or with `pooling` "all" one for each token; or their classes, by `task`."""
        fixed = {"input": input, "model": model, "timeout": deadline}
        return self._run(calls.pooling(fixed, options, extra_body, timeout))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ScoreOptions],
    ) -> PairScores:
        """How well texts go together: one with one, as many with as many, or one with each of several."""
        fixed = {"text_1": text_1, "text_2": text_2, "model": model, "timeout": deadline}
        return self._run(calls.score(fixed, options, extra_body, timeout))

    def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, str]],
        top_n: int | None = None,
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Documents in the order in which they answer a query; the best `top_n` of them."""
        fixed = {"query": query, "documents": documents, "top_n": top_n, "model": model, "timeout": deadline}
        return self._run(calls.rerank(fixed, options, extra_body, timeout))

    def classify(
        self,
        input: Prompt,
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classification:
        """The classes of texts, by a model that classifies; raises BadRequestError where it does not."""
        fixed = {"input": input, "model": model, "timeout": deadline}
        return self._run(calls.classify(fixed, options, extra_body, timeout))

    def _run(self, call: Call[T]) -> T:
        raise NotImplementedError
