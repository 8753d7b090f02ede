"""Turns deltas into the JSON of completions and chats, streamed or whole. Knows layouts; knows no engine and no HTTP."""
