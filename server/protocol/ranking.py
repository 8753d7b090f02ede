"""Bodies and answers of `/v1/score`, `/v1/rerank` and `/classify`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from windlass.server.protocol.base import INT32_MAX, StrictModel
from windlass.server.protocol.retrieval import MAX_INSTRUCTION, Input, PoolingField, PromptRequest, PromptUsage


def _texts(value: Any) -> Any:
    """Shape only: what is inside is looked at once its number is known to be small."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("type", "should be a string or a list of strings")
    if isinstance(value, list) and not value:
        raise PydanticCustomError("empty", "should not be an empty list")
    return value


def _documents(value: Any) -> Any:
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
        AfterValidator(_texts),
        Field(description="A text, or a list of as many as `text_2` has; 2,048 at most.", json_schema_extra=_STRINGS),
    ]
    text_2: Annotated[
        Any,
        AfterValidator(_texts),
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


class ScoreList(StrictModel):
    """A score for each pair."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage


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
        AfterValidator(_documents),
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


class Reranking(StrictModel):
    """The documents, the best one first; of equal ones the first."""

    id: str
    object: Literal["list"]
    created: int
    model: str
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


class ClassList(StrictModel):
    """The classes of each text."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedText]
    usage: PromptUsage
