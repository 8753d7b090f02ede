"""Takes the text of a chat's answer apart while it streams: content, reasoning, calls. Knows no JSON layout and no engine."""
