"""Requests and responses of the endpoints that do not generate: embeddings, pooling, scores, rerankings, classes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from windlass.server.schemas.base import INT32_MAX, EngineRequestFields, StrictModel, TextsOrTokens, optional
from windlass.server.schemas.response_parts import Envelope

MAX_INPUTS = 2048  # OpenAI's limit
MAX_INSTRUCTION = 16_384  # characters, as the prompt of every pair contains it

Input = Annotated[TextsOrTokens, Field(description="Texts or token ids; at most 2,048.")]

PoolingField = Annotated[
    Literal["last", "mean", "first"] | None,
    Field(
        description="Hidden state that becomes the vector: the last token's, the mean, or the first token's. "
        "Default: that of the model's files, else `last`."
    ),
]

EncodingField = Annotated[
    Literal["float", "base64"] | None,
    Field(description="`float`: numbers; `base64`: the bytes of little-endian float32 values. Default: `float`."),
]

_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}

_DOCUMENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    ]
}


class PromptRequest(EngineRequestFields):
    """Fields of requests that compute prompts and generate nothing. None means that the field was not given."""

    hints: ClassVar[dict[str, str]] = {
        "prompt": "here it is called input",
        "messages": "it belongs to /v1/chat/completions; this takes input",
        "max_tokens": "this endpoint does not generate: remove it",
        "stream": "this endpoint does not stream: remove it",
    }

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = optional(
        "A longer text is truncated to this many tokens. -1: to the context. Default: no truncation."
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "End at which a longer text is truncated. Default: `right`."
    )


class EmbeddingRequest(PromptRequest):
    """Texts whose embeddings are computed. OpenAI's fields and additional ones."""

    input: Input
    encoding_format: EncodingField = None
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Number of leading values of each vector to return, normalized again if vectors are normalized. Default: all."
    )
    pooling: PoolingField = None
    normalize: bool | None = optional(
        "Whether vectors are normalized to length 1. Default: that of the model's files, else true."
    )


class PromptUsage(StrictModel):
    """Number of tokens of all texts."""

    prompt_tokens: int = Field(description="Number of prompt tokens.")
    total_tokens: int = Field(description="Sum of input and output tokens.")

    @classmethod
    def of(cls, tokens: int) -> PromptUsage:
        """Usage of a request that generates nothing."""
        return cls(prompt_tokens=tokens, total_tokens=tokens)


class _InputResults(Envelope):
    object: Literal["list"]
    data: list[Any]
    usage: PromptUsage = Field(description="Numbers of tokens.")


class Embedding(StrictModel):
    """Vector of one text."""

    object: Literal["embedding"]
    index: int = Field(description="Index of the text in `input`, from 0.")
    embedding: list[float] | str = Field(description="The vector, in the requested `encoding_format`.")


class EmbeddingList(_InputResults):
    """Vectors of all texts."""

    data: list[Embedding] = Field(description="The entries.")


class PoolingRequest(PromptRequest):
    """Texts whose hidden states or classes are computed, in the form of vLLM."""

    input: Input
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = optional(
        "A row per text (`embed`) or token (`token_embed`), or class probabilities (`classify`, "
        "`token_classify`). Default: `token_classify` for a model that "
        "classifies tokens, else the task that `pooling` implies."
    )
    encoding_format: EncodingField = None
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Number of leading values of each row to return. Default: all."
    )
    pooling: Literal["last", "mean", "first", "all"] | None = optional(
        "`last`, `mean` or `first` as for embeddings, or `all`: a row per token. Default: that of "
        "the model's files, else `last`."
    )
    normalize: bool | None = optional("Whether rows are normalized to length 1. Default: false.")
    use_activation: bool | None = optional(
        "For classes: whether the result is probabilities instead of logits. Default: true."
    )


class PooledText(StrictModel):
    """Hidden states of one text."""

    object: Literal["pooling"]
    index: int = Field(description="Index of the text in `input`, from 0.")
    shape: Annotated[list[int], Field(min_length=2, max_length=2)] = Field(
        description="Number of rows and of values per row. base64 holds the rows one after the other."
    )
    data: list[float] | list[list[float]] | str = Field(
        description="One row, a list of rows if there is one per token, or base64."
    )


class RowsList(_InputResults):
    """Hidden states of all texts."""

    data: list[PooledText] = Field(description="The entries.")


def _check_texts_shape(value: Any) -> Any:
    """Check the outer shape only. The texts are checked after their number."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("type", "should be a string or a list of strings")
    if isinstance(value, list) and not value:
        raise PydanticCustomError("empty", "should not be an empty list")
    return value


def _check_documents_shape(value: Any) -> Any:
    if not isinstance(value, list):
        raise PydanticCustomError("type", "should be a list of strings, or of objects with a text")
    if not value:
        raise PydanticCustomError("empty", "should not be an empty list")
    return value


_InstructionField = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_INSTRUCTION)] | None,
    Field(
        description="Criterion for judging pairs, for models whose prompt has one, such as Qwen3-Reranker. Default: that "
        "of the model's prompt or files."
    ),
]


class ScoreRequest(PromptRequest):
    """Pairs of texts: equally many on both sides, or one on the first side."""

    hints: ClassVar[dict[str, str]] = {
        "input": "scores take text_1 and text_2",
        "query": "scores take text_1 and text_2; /v1/rerank takes query and documents",
        "documents": "scores take text_1 and text_2; /v1/rerank takes query and documents",
        "instruct": "here it is called instruction",
    }

    text_1: Annotated[Any, AfterValidator(_check_texts_shape), Field(json_schema_extra=_STRINGS)] = Field(
        description="One text, or a list of as many texts as `text_2`; at most 2,048."
    )
    text_2: Annotated[Any, AfterValidator(_check_texts_shape), Field(json_schema_extra=_STRINGS)] = Field(
        description="One text, or a list of at most 2,048."
    )
    pooling: PoolingField = None
    instruction: _InstructionField = None


class PairScore(StrictModel):
    """Score of one pair."""

    object: Literal["score"]
    index: int = Field(description="Index of the pair, from 0.")
    score: float = Field(
        description="Cosine of the texts' vectors; of a model with one class, its probability for the pair; of "
        "a model that answers yes or no, the probability of yes."
    )


class ScoreList(_InputResults):
    """Scores of all pairs."""

    data: list[PairScore] = Field(description="The entries.")


class RerankRequest(PromptRequest):
    """A query and documents. Jina's and Cohere's fields and additional ones."""

    hints: ClassVar[dict[str, str]] = {
        "input": "rerankings take query and documents",
        "text_1": "it belongs to /v1/score; rerankings take query and documents",
        "texts": "here it is called documents",
        "instruct": "here it is called instruction",
    }

    query: Annotated[str, Field(min_length=1)] = Field(description="Query by which the documents are ranked.")
    documents: Annotated[
        Any,
        AfterValidator(_check_documents_shape),
        Field(json_schema_extra={"type": "array", "items": _DOCUMENT, "minItems": 1}),
    ] = Field(description="Texts, or objects with a `text`; at most 2,048.")
    top_n: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Number of best documents to return. Default: all."
    )
    return_documents: Annotated[
        bool | None, Field(description="Whether results repeat their documents. Default: true.")
    ] = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Length to which documents are truncated. Default: no truncation."
    )
    pooling: PoolingField = None
    instruction: _InstructionField = None


class RankedText(StrictModel):
    """A document of the request."""

    text: str = Field(description="Text of the document.")


class RankedDocument(StrictModel):
    """A ranked document."""

    index: int = Field(description="Index of the document in `documents`, from 0.")
    relevance_score: float = Field(description="Score of query and document, as from `/v1/score`.")
    document: RankedText | None = optional("The document. Absent if `return_documents` is false.")


class Reranking(Envelope):
    """The documents, best first. Equal scores keep the order of the request."""

    object: Literal["list"]
    results: list[RankedDocument] = Field(description="Documents, best first.")
    usage: PromptUsage = Field(description="Numbers of tokens.")


class ClassifyRequest(PromptRequest):
    """Texts to classify. vLLM's fields and additional ones."""

    input: Input
    use_activation: bool | None = optional("Whether `probs` are probabilities instead of logits. Default: true.")


class ClassifiedText(StrictModel):
    """Classes of one text."""

    index: int = Field(description="Index of the text in `input`, from 0.")
    label: str = Field(description="Name of the most likely class.")
    probs: list[float] = Field(description="Probability of each class, in the order of the model's `classes.labels`.")
    num_classes: int = Field(description="Number of classes.")


class ClassList(_InputResults):
    """Classes of all texts."""

    data: list[ClassifiedText] = Field(description="The entries.")
