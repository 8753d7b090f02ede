"""Answers that fill a gap in a text: how prompts with a gap are made, and llama.cpp's endpoint for them."""
