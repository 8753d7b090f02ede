"""What a generation request has become once it is checked. Knows no route and does nothing."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.api.context import ContextRule, PassageReuse
from windlass.engine.api.context_size import ContextSize
from windlass.engine.api.request import ModelInfo, SamplingParams
from windlass.server.answers.base import AnswerOptions
from windlass.server.exchange.adapters import ServedAdapter
from windlass.server.exchange.state import ServerState
from windlass.server.generation.request_rotation import Rotation
from windlass.server.generation.structured import StructuredOutput
from windlass.server.options.settings import ContextOverflow
from windlass.server.protocol.generation_request import GenerationRequest
from windlass.server.text.line_limits import LineLimits
from windlass.server.text.parsing.events import ParsingPlan
from windlass.server.text.parsing.reasoning.formats import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A checked request that waits for its prompts. Made by `pipeline.check`, run by `pipeline.run`.

    sampling: what all prompts share; max_tokens is clamped per prompt.
    overflow: what is done where prompt and answer are longer than the context; rule, size, reuse: what the engine does, what
    that comes to, and what is taken of other prompts.
    parsing: how answers are taken apart; None where all text is content.
    structured: the form that answers have to have, None for any. place: where they begin, seen from the thinking.
    """

    state: ServerState
    body: GenerationRequest
    info: ModelInfo
    request_id: str
    caller: str  # whose request it is, for taking turns
    arrival: float  # time.monotonic() seconds
    deadline: float | None
    sampling: SamplingParams
    rotation: Rotation
    options: AnswerOptions
    chat: bool
    echo: bool
    overflow: ContextOverflow
    rule: ContextRule
    reuse: PassageReuse
    size: ContextSize
    parsing: ParsingPlan | None
    structured: StructuredOutput | None
    place: Place = "behind"
    priority: int = 0
    adapter: ServedAdapter | None = None
    line_limits: LineLimits | None = None

    @property
    def model_name(self) -> str:
        """What the answer says that it comes from."""
        return self.state.settings.served_model_name if self.adapter is None else self.adapter.source.name
