"""The client's types compared with the server's models: equal field names, and defaults for fields that may be absent."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING

import pytest
from pydantic import BaseModel

import windlass.clients
from windlass.server.api import introspection, models, rotary, tokenize
from windlass.server.api.health import Status
from windlass.server.schemas import chat, completions, messages, pooling, response_parts, responses, tools

# By the name in `windlass.clients`: the server's models that it represents.
MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "AttentionMap": (introspection.AttentionMap,),
    "CacheGroup": (introspection.CacheGroup,),
    "CachePages": (introspection.CachePages,),
    "CacheSequence": (introspection.CacheSequence,),
    "ChatChoice": (chat.ChatChoice,),
    "ChatChunkChoice": (chat.ChatChunkChoice,),
    "ChatCompletion": (chat.ChatCompletion,),
    "ChatCompletionChunk": (chat.ChatChunk,),
    "ChatDelta": (chat.ChatDelta,),
    "ChatLogprobs": (chat.ChatLogprobs,),
    "ChatMessage": (chat.ChatAnswer,),
    "Classification": (pooling.ClassList,),
    "Completion": (completions.Completion,),
    "CompletionChoice": (completions.CompletionChoice, completions.CompletionChunkChoice),
    "CompletionChunk": (completions.CompletionChunk,),
    "CompletionTokensDetails": (response_parts.CompletionTokensDetails,),
    "ContentBlock": (messages.AnsweredText, messages.AnsweredThinking, messages.AnsweredToolUse),
    "ContextUse": (response_parts.ContextUse,),
    "Detokenization": (tokenize.DetokenizeAnswer,),
    "DocumentText": (pooling.RankedText,),
    "EmbeddedText": (pooling.Embedding,),
    "Embeddings": (pooling.EmbeddingList,),
    "FunctionCall": (tools.AnsweredFunction, tools.FunctionDelta),
    "Health": (Status,),
    "Infill": (completions.Infill,),
    "InfillTimings": (completions.InfillTimings,),
    "InputTokensDetails": (responses.InputTokensDetails,),
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
    "MessageUsage": (messages.MessageUsage,),
    "Model": (models.Model,),
    "OutputTokensDetails": (responses.OutputTokensDetails,),
    "PairScores": (pooling.ScoreList,),
    "PooledStates": (pooling.RowsList,),
    "PromptTokensDetails": (response_parts.PromptTokensDetails,),
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
    ),
    "ResponseItem": (
        responses.OutputMessage,
        responses.OutputReasoning,
        responses.OutputCall,
        responses.ListedMessage,
        responses.ListedCallOutput,
        responses.ListedReasoning,
    ),
    "ResponseItems": (responses.ItemList,),
    "ResponsePart": (responses.OutputText, responses.ReasoningText),
    "ResponseUsage": (responses.ResponseUsage,),
    "Rotary": (response_parts.Rotary,),
    "RotaryChosen": (response_parts.RotaryChosen,),
    "RotaryCurves": (rotary.RotaryCurves,),
    "RotaryGroup": (response_parts.RotaryOfGroup,),
    "RotaryInspection": (rotary.RotaryInspection,),
    "RotaryInspectionGroup": (rotary.InspectedGroup,),
    "RotarySettings": (rotary.RotarySettings,),
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
