"""What a grammar may cost, for whoever compiles one: the server to refuse it early, the engine to follow it."""

from __future__ import annotations

from typing import Final, TypedDict

MAX_GRAMMAR_CHARACTERS = 4 << 20  # of a serialized grammar


class GrammarLimits(TypedDict):
    """In the names of llguidance's LLParserLimits."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


# A mask takes 40 microseconds as a rule and some 20 ms at most, a grammar about 100 MB at most.
GRAMMAR_LIMITS: Final[GrammarLimits] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
