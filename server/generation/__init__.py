"""What a request asks of the engine (prompts, sampling, rotation), and the text of its outputs."""
