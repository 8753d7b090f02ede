"""Requests and responses of the endpoints that do not generate: embeddings, pooling, scores, rerankings, classes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from windlass.server.schemas.base import INT32_MAX, EngineRequestFields, StrictModel, TextsOrTokens
from windlass.server.schemas.response_parts import Envelope

MAX_INPUTS = 2048  # as OpenAI has it

MAX_INSTRUCTION = 16_384  # characters: it stands in the prompt of every pair

Input = Annotated[
    TextsOrTokens,
    Field(description="A text, a list of texts, token ids, or a list of lists of token ids; at most 2,048."),
]

PoolingField = Annotated[
    Literal["last", "mean", "first"] | None,
    Field(
        description="How the tokens' final hidden states become one vector: the last token's, the mean of all, or the first "
        "token's. Default: what the model's files say, else `last`."
    ),
]

NormalizeField = Annotated[
    bool | None,
    Field(description="Whether vectors are brought to length 1. Default: what the model's files say, else true."),
]

EncodingField = Annotated[
    Literal["float", "base64"] | None,
    Field(description="Numbers, or the base64 of little-endian float32. Default: `float`."),
]


class PromptRequest(EngineRequestFields):
    """What requests have in common that compute prompts and generate nothing. None always means "not given"."""

    hints: ClassVar[dict[str, str]] = {
        "prompt": "here it is called input",
        "messages": "it belongs to /v1/chat/completions; this takes input",
        "max_tokens": "nothing is generated here: leave it out",
        "stream": "the answer comes whole: leave it out",
    }

    truncate_prompt_tokens: Annotated[
        Annotated[int, Field(ge=-1, le=INT32_MAX)] | None,
        Field(description="A longer text is cut to so many tokens; -1: to the context."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, Field(description="Which end of it is cut off. Default: `right`.")
    ] = None


class EmbeddingRequest(PromptRequest):
    """OpenAI's, with fields beside them."""

    input: Input
    encoding_format: EncodingField = None
    dimensions: Annotated[
        Annotated[int, Field(ge=1, le=INT32_MAX)] | None,
        Field(description="Leading values of each vector that are kept; normalized vectors are so again."),
    ] = None
    pooling: PoolingField = None
    normalize: NormalizeField = None


class PromptUsage(StrictModel):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class _InputResults(Envelope):
    object: Literal["list"]
    data: list[Any]
    usage: PromptUsage


class Embedding(StrictModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: Annotated[int, Field(description="The text's place in `input`, from 0.")]
    embedding: Annotated[list[float] | str, Field(description="The vector, as `encoding_format` has it.")]


class EmbeddingList(_InputResults):
    """A vector for each text."""

    data: list[Embedding]


class PoolingRequest(PromptRequest):
    """vLLM's: states as they are, or each token's, or the classes that the model's head makes of them."""

    input: Input
    task: Annotated[
        Literal["embed", "token_embed", "classify", "token_classify"] | None,
        Field(
            description="`embed`: a row for each text; `token_embed`: for each token; `classify`, `token_classify`: "
            "probabilities of classes. Default: `token_classify` where the model tells the classes of tokens, else as `pooling` "
            "says."
        ),
    ] = None
    encoding_format: EncodingField = None
    dimensions: Annotated[
        Annotated[int, Field(ge=1, le=INT32_MAX)] | None, Field(description="Leading values of each row that are kept.")
    ] = None
    pooling: Annotated[
        Literal["last", "mean", "first", "all"] | None,
        Field(description="As in embeddings, or `all`: a row for each token. Default: as in embeddings."),
    ] = None
    normalize: Annotated[bool | None, Field(description="Whether rows are brought to length 1. Default: false.")] = None
    use_activation: Annotated[
        bool | None,
        Field(description="Of classes: whether they are probabilities, or what the head gives. Default: true."),
    ] = None


class PooledText(StrictModel):
    """The states of one text."""

    object: Literal["pooling"]
    index: Annotated[int, Field(description="The text's place in `input`, from 0.")]
    shape: Annotated[
        list[int],
        Field(min_length=2, max_length=2, description="Rows and the values of each; base64 holds row after row."),
    ]
    data: Annotated[
        list[float] | list[list[float]] | str, Field(description="One row, with `all` a list of rows, or base64.")
    ]


class RowsList(_InputResults):
    """States of each text."""

    data: list[PooledText]


def _check_texts_shape(value: Any) -> Any:
    """Shape only: what is inside is looked at once its number is known to be small."""
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

_InstructionField = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_INSTRUCTION)] | None,
    Field(
        description="What pairs are judged by, of a model whose prompt has room for it, such as Qwen3-Reranker. "
        "Default: what its prompt or its files say."
    ),
]


class ScoreRequest(PromptRequest):
    """Pairs of texts: as many on both sides, or one on the first side."""

    hints: ClassVar[dict[str, str]] = {
        "input": "scores take text_1 and text_2",
        "query": "scores take text_1 and text_2; /v1/rerank takes query and documents",
        "documents": "scores take text_1 and text_2; /v1/rerank takes query and documents",
        "instruct": "here it is called instruction",
    }

    text_1: Annotated[
        Any,
        AfterValidator(_check_texts_shape),
        Field(description="A text, or a list of as many as `text_2` has; 2,048 at most.", json_schema_extra=_STRINGS),
    ]
    text_2: Annotated[
        Any,
        AfterValidator(_check_texts_shape),
        Field(description="A text, or a list of at most 2,048.", json_schema_extra=_STRINGS),
    ]
    pooling: PoolingField = None
    instruction: _InstructionField = None


class PairScore(StrictModel):
    """How well one pair goes together."""

    object: Literal["score"]
    index: Annotated[int, Field(description="The pair's place, from 0.")]
    score: Annotated[
        float,
        Field(
            description="The cosine of the texts' vectors; of a model with one class, its probability for the pair; of one "
            "that answers yes or no, that of yes."
        ),
    ]


class ScoreList(_InputResults):
    """A score for each pair."""

    data: list[PairScore]


class RerankRequest(PromptRequest):
    """Jina's and Cohere's, with fields beside them."""

    hints: ClassVar[dict[str, str]] = {
        "input": "rerankings take query and documents",
        "text_1": "it belongs to /v1/score; rerankings take query and documents",
        "texts": "here it is called documents",
        "instruct": "here it is called instruction",
    }

    query: Annotated[str, Field(min_length=1, description="What the documents are ranked by.")]
    documents: Annotated[
        Any,
        AfterValidator(_check_documents_shape),
        Field(
            description="Strings, or objects with a `text`; 2,048 at most.",
            json_schema_extra={"type": "array", "items": _DOCUMENT, "minItems": 1},
        ),
    ]
    top_n: Annotated[
        Annotated[int, Field(ge=1, le=INT32_MAX)] | None,
        Field(description="How many of the best are told. Default: all."),
    ] = None
    return_documents: Annotated[
        bool | None, Field(description="Whether results repeat their documents. Default: true.")
    ] = None
    max_tokens_per_doc: Annotated[
        Annotated[int, Field(ge=1, le=INT32_MAX)] | None,
        Field(description="A document is read to so many tokens. Default: whole."),
    ] = None
    pooling: PoolingField = None
    instruction: _InstructionField = None


class RankedText(StrictModel):
    """A document as it was given."""

    text: str


class RankedDocument(StrictModel):
    """One of the documents."""

    index: Annotated[int, Field(description="Its place in `documents`, from 0.")]
    relevance_score: Annotated[float, Field(description="As `/v1/score` has it.")]
    document: RankedText | None = None


class Reranking(Envelope):
    """The documents, the best one first; of equal ones the first."""

    object: Literal["list"]
    results: list[RankedDocument]
    usage: PromptUsage


class ClassifyRequest(PromptRequest):
    """vLLM's, with fields beside them."""

    input: Input
    use_activation: Annotated[
        bool | None, Field(description="Whether `probs` are probabilities, or what the head gives. Default: true.")
    ] = None


class ClassifiedText(StrictModel):
    """The classes of one text."""

    index: Annotated[int, Field(description="The text's place in `input`, from 0.")]
    label: Annotated[str, Field(description="The likeliest class.")]
    probs: Annotated[list[float], Field(description="Of each class, in the order of the model's `labels`.")]
    num_classes: int


class ClassList(_InputResults):
    """The classes of each text."""

    data: list[ClassifiedText]
