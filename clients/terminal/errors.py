"""The error of a command for what a person can correct."""

from __future__ import annotations


class CommandError(Exception):
    """An option, an argument or a file is at fault; the message is one line that says what to change."""
