"""Windlass: an inference server for language models with rotary attention."""

__version__ = "0.1.0"
