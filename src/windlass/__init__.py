"""Windlass: an inference server for language models with rotary attention."""

from windlass._version import __version__ as __version__
