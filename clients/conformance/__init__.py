"""Black-box checks of rotary positions, over any OpenAI-compatible server. Knows no server's inside."""
