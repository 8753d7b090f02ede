"""What the server answers where it generates nothing: vectors, scores, rankings, classes. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.clients.types import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedText:
    """The vector of one text. index: its place in the input."""

    index: int
    embedding: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """A vector for each text, in order."""

    id: str = ""
    model: str = ""
    data: tuple[EmbeddedText, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None

    @property
    def vectors(self) -> list[tuple[float, ...]]:
        """The vectors alone."""
        return [item.embedding for item in self.data]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStates:
    """Hidden states of one text. rows: one, or with `pooling` "all" one for each token."""

    index: int
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledStates:
    """Hidden states of each text, in order."""

    id: str = ""
    model: str = ""
    data: tuple[TextStates, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """How well one pair goes together."""

    index: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScores:
    """A score for each pair, in order."""

    id: str = ""
    model: str = ""
    data: tuple[ScoredPair, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None

    @property
    def scores(self) -> list[float]:
        """The scores alone."""
        return [item.score for item in self.data]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentText:
    """A document as it was sent."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingResult:
    """One of the documents. index: its place among those that were sent."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The documents, the best one first."""

    id: str = ""
    model: str = ""
    results: tuple[RankingResult, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClass:
    """The likeliest class of one text, and how likely each is, in the order of the model's labels."""

    index: int
    label: str
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The classes of each text, in order."""

    id: str = ""
    model: str = ""
    data: tuple[TextClass, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None
