"""The client's types compared with the server's models: equal field names, and defaults for fields that may be absent."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING

import pytest
from pydantic import BaseModel

import windlass.clients
from windlass.server.api import introspection, models, rotary, tokenize
from windlass.server.api.introspection import Status
from windlass.server.schemas import chat, completions, messages, pooling, response_parts, responses, tools

# By the name in `windlass.clients`: the server's models that it represents, first those of the same name.
SAME_NAME = """
    AttentionMap CacheGroup CachePages CacheSequence ChatChoice ChatChunkChoice ChatCompletion ChatDelta
    ChatLogprobs Completion CompletionChunk CompletionTokensDetails ContextUse Infill InfillTimings
    InputTokensDetails MessageUsage Model OutputTokensDetails PromptTokensDetails ResponseUsage Rotary
    RotaryChosen RotaryCurves RotaryInspection RotarySettings
""".split()
MODULES = (chat, completions, introspection, messages, models, response_parts, responses, rotary)
OTHER_NAMES: dict[str, tuple[type[BaseModel], ...]] = {
    "ChatCompletionChunk": (chat.ChatChunk,),
    "ChatMessage": (chat.ChatAnswer,),
    "Classification": (pooling.ClassList,),
    "CompletionChoice": (completions.CompletionChoice, completions.CompletionChunkChoice),
    "ContentBlock": (messages.AnsweredText, messages.AnsweredThinking, messages.AnsweredToolUse),
    "Detokenization": (tokenize.DetokenizeAnswer,),
    "DocumentText": (pooling.RankedText,),
    "EmbeddedText": (pooling.Embedding,),
    "Embeddings": (pooling.EmbeddingList,),
    "FunctionCall": (tools.AnsweredFunction, tools.FunctionDelta),
    "Health": (Status,),
    "Logprobs": (completions.CompletionLogprobs,),
    "Message": (messages.MessageAnswer,),
    "MessageDelta": (messages.TextDelta, messages.ThinkingDelta, messages.InputDelta, messages.MessageEnding),
    "MessageEvent": (
        messages.MessageStart,
        messages.BlockStart,
        messages.BlockDelta,
        messages.BlockStop,
        messages.MessageDelta,
        messages.MessageSign,
    ),
    "PairScores": (pooling.ScoreList,),
    "PooledStates": (pooling.RowsList,),
    "Ranking": (pooling.Reranking,),
    "RankingResult": (pooling.RankedDocument,),
    "Response": (responses.ResponseAnswer,),
    "ResponseEvent": (
        responses.StateEvent,
        responses.ItemEvent,
        responses.PartEvent,
        responses.TextDeltaEvent,
        responses.ReasoningDeltaEvent,
        responses.ArgumentsDeltaEvent,
        responses.CustomInputDeltaEvent,
    ),
    "ResponseItem": (
        responses.OutputMessage,
        responses.OutputReasoning,
        responses.OutputCall,
        responses.OutputCustomCall,
        responses.ListedMessage,
        responses.ListedCallOutput,
        responses.ListedReasoning,
    ),
    "ResponseItems": (responses.ItemList,),
    "ResponsePart": (responses.OutputText, responses.ReasoningText),
    "RotaryGroup": (response_parts.RotaryOfGroup,),
    "RotaryInspectionGroup": (rotary.InspectedGroup,),
    "ScoredPair": (pooling.PairScore,),
    "TextClass": (pooling.ClassifiedText,),
    "TextStates": (pooling.PooledText,),
    "TokenLogprob": (chat.ChatTokenLogprob,),
    "Tokenization": (tokenize.TokenizeAnswer,),
    "ToolCall": (tools.AnsweredCall,),
    "ToolCallDelta": (tools.CallDelta,),
    "TopLogprob": (chat.ChatTopLogprob,),
    "Usage": (response_parts.Usage, pooling.PromptUsage),
}
MODELS = OTHER_NAMES | {
    name: tuple(getattr(module, name) for module in MODULES if hasattr(module, name)) for name in SAME_NAME
}

# Fields that the client adds, or that older servers and other vendors' servers send.
CLIENT_FIELDS = {
    "ChatDelta": {"refusal"},
    "Health": {"ok"},  # of the status code
    "TextStates": {"rows"},  # decoded from `data`
}

EVERYWHERE = {"request_id"}  # of the header

# Types without a JSON object of the server.
WITHOUT_MODEL = {"MetricSample", "Metrics", "RetryPolicy"}


def client_fields(name: str) -> dict[str, dataclasses.Field[object]]:
    fields = dataclasses.fields(getattr(windlass.clients, name))
    return {field.name: field for field in fields if not field.name.startswith("_")}


def test_every_type_of_the_client_has_a_model() -> None:
    exported = {name for name in dir(windlass.clients) if dataclasses.is_dataclass(getattr(windlass.clients, name))}
    assert exported == MODELS.keys() | WITHOUT_MODEL


@pytest.mark.parametrize("name", sorted(MODELS))
def test_fields_of_the_client_are_fields_of_the_model(name: str) -> None:
    known = {field for model in MODELS[name] for field in model.model_fields}
    added = CLIENT_FIELDS.get(name, set())
    assert not added & known
    assert client_fields(name).keys() - known == added | (client_fields(name).keys() & EVERYWHERE)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_fields_that_may_be_absent_have_defaults(name: str) -> None:
    for field in client_fields(name).values():
        found = [model.model_fields.get(field.name) for model in MODELS[name]]
        if any(info is None or not info.is_required() for info in found) and field.name not in CLIENT_FIELDS.get(
            name, set()
        ):
            assert field.default is not MISSING or field.default_factory is not MISSING, field.name
