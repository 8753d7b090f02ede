"""From a validated body to requests to the engine, and the text of their answers."""
