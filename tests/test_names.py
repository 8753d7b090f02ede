"""One name for one thing: no class of the four packages has the name of another."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ("server", "engine", "kernels", "clients")

# Objects of the API. The client describes them for whoever reads an answer, the server, or the engine for scalings, for
# whoever writes it: one thing, seen from both sides.
OF_THE_API = {
    "AttentionMap",
    "CacheGroup",
    "CachePages",
    "CacheSequence",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionTokensDetails",
    "ContextUse",
    "Infill",
    "InfillTimings",
    "InputTokensDetails",
    "MessageDelta",
    "MessageEvent",
    "MessageUsage",
    "Model",
    "OutputTokensDetails",
    "PromptTokensDetails",
    "ResponseEvent",
    "ResponseUsage",
    "RopeScaling",
    "Rotary",
    "RotaryChosen",
    "RotaryCurves",
    "RotaryGroup",
    "RotaryInspection",
    "RotarySettings",
    "TokenLogprob",
    "Usage",
}
CLIENT_TYPES = {
    f"clients/{name}.py"
    for name in (
        "chat_types",
        "infill_types",
        "looking_types",
        "message_types",
        "response_types",
        "rope",
        "rotary_types",
        "types",
    )
}


def places() -> dict[str, list[str]]:
    """The files that define a class at their top, by its name without a leading underscore."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in (path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    return found


def test_no_two_classes_have_one_name() -> None:
    found = places()
    assert len(found) > 300
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in OF_THE_API} == {}
    for name in OF_THE_API:
        here, *there = sorted(twice[name], key=lambda file: file not in CLIENT_TYPES)
        assert here in CLIENT_TYPES, name
        assert len(there) == 1 and there[0].startswith(("server/protocol/", "engine/rotary/")), name
