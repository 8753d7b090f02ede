"""The bar of `windlass.LLM` on a terminal."""

from __future__ import annotations

from api_helpers.pseudo_terminal import PseudoTerminal

_PROGRAM = """
from types import SimpleNamespace
from windlass.server.startup.in_process import answer_progress
with answer_progress(3) as answered:
    for tokens in (5, None, 7):
        answered(SimpleNamespace(usage=SimpleNamespace(completion_tokens=tokens)))
"""


def test_bar_counts_answers_and_tokens() -> None:
    with PseudoTerminal("-c", _PROGRAM) as terminal:
        terminal.wait(r"answers .* 3/3 .*\d tokens/s")
        assert terminal.end() == 0
