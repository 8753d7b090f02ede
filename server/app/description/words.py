"""Words of the description that stand beside no code: of the API, its tags and its parameters."""

from __future__ import annotations

from typing import Any

INFO = """An inference server for language models with rotary attention. Its endpoints are those of OpenAI's API and of Anthropic's Messages API, with further fields beside theirs.

A field that the server does not know is refused by name, and `null` counts as left out. Types are strict: an integer has no fraction, not even `.0`. Strings hold no null character. `HEAD` answers as `GET` does, without the body; `OPTIONS`, and the 405 of another method, name in `Allow` what a path takes. Bodies are UTF-8 JSON. An error has OpenAI's form, under `/v1/messages` Anthropic's; what is refused before it reaches an endpoint, such as a connection too many, has OpenAI's.
"""  # noqa: E501

TAGS = {
    "completions": ("Completions", "What follows a prompt."),
    "infill": ("Fill-in-the-middle", "What stands in a gap, in llama.cpp's form."),
    "chat": ("Chat", "The next turn of a conversation, in OpenAI's form."),
    "responses": ("Responses", "OpenAI's Responses API, and what is kept of its answers."),
    "messages": ("Messages", "Anthropic's Messages API."),
    "embeddings": ("Embeddings", "Texts as vectors."),
    "ranking": ("Ranking", "How well texts go together."),
    "classes": ("Classes", "What kind of text it is, where the model was trained to tell."),
    "text": ("Tokens", "Text to token ids and back."),
    "models": ("Models", "What is served."),
    "adapters": ("Adapters", "LoRA adapters, which come and go while the server runs."),
    "rotary": ("Rotary", "What the model rotates by, and what a scaling would make of it."),
    "looking": ("Inside", "What the cache holds, and what a layer attends to."),
    "health": ("Health", "How the server is."),
}

PARAMETERS = {
    "model": "A name of the served model.",
    "response_id": "The `id` of a response that is kept.",
    "X-Request-Id": "An id of 1 to 128 characters (letters, digits and `._:/-`) that the answer and the server's log repeat. "
    "Where it is left out or cannot be used, there is a new one.",
}

# An answer of `/v1/responses` has an id that the requests below take.
LINKS: dict[str, Any] = {
    "/v1/responses": {
        name: {"operationId": name, "parameters": {"response_id": "$response.body#/id"}, "description": text}
        for name, text in (
            ("get_response", "Reads the response again."),
            ("list_input_items", "What it answered."),
            ("delete_response", "Forgets it."),
        )
    }
}
