r"""ASCII meaning of \d, \w and \s in patterns; other parts of patterns are unchanged."""

from __future__ import annotations

import pytest
from unit_helpers.grammar_draws import accepts

from windlass.engine.errors import RequestError
from windlass.server.text.schema_rewriting import expand_ascii_classes, expand_ascii_classes_in_lark

ARABIC, NO_BREAK, KELVIN = "\u0661", "\u00a0", "\u212a"


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        (r"\d", "07", [ARABIC, "\U0001fbf8", "a"]),
        (r"\D", f"aé{ARABIC}", "5"),
        (r"\w", "aZ0_", ["é", ARABIC, KELVIN, "-"]),
        (r"\W", f"é-{ARABIC}", "a_0"),
        (r"\s", [" ", "\t", "\n", "\v", "\f", "\r"], [NO_BREAK, "\u2028", "a"]),
        (r"\S", ["a", NO_BREAK], [" ", "\n"]),
        (r"[\d_]", "5_", [ARABIC, "a"]),
        (r"[^\d]", f"aé_{ARABIC}", "5"),
        (r"[^\d\s]", f"aé{NO_BREAK}", "5 "),
        (r"[^\D]", "5", f"a{ARABIC}"),
        (r"[\D\d]", f"a5{ARABIC}", []),
        (r"[a-c\d]", "ab5", f"-d{ARABIC}"),
        (r"[a-c-\d]", "ab5-", f"d{ARABIC}"),
        (r"[-\d]", "-5", ARABIC),
        (r"[\w.-]", "a.-", ["é"]),
        (r"[]\d]", "]5", ARABIC),
        (r"[^]\d]", f"a{ARABIC}", "]5"),
        (r"[\]\d]", "]5", ARABIC),
        (r"[[a-c]\d]", "a5", ARABIC),
        (r"[\w&&[^\d]]", "a_", f"5é{ARABIC}"),
        (r"[\w--\d]", "a_", f"5é{ARABIC}"),
        (r"\\d", ["\\d"], ["5", "\\5"]),
        (r"[\\d]", "\\d", "5"),
        (r"\\\d", ["\\5"], ["\\d", f"\\{ARABIC}"]),
        (r"\[\d-\d\]", ["[5-5]"], ["5", f"[{ARABIC}-5]"]),
        (r"a-\d", ["a-5"], [f"a-{ARABIC}"]),
        (r"(?x) \d \s # [ \d", ["5 "], ["5", f"{ARABIC} "]),
        (r"(?i)a\d", ["A5"], [f"A{ARABIC}"]),
        (r"\p{Nd}", f"5{ARABIC}", "a"),
    ],
)
def test_classes_are_ascii(pattern: str, accepted: str | list[str], refused: str | list[str]) -> None:
    assert all(accepts("regex", pattern, text) for text in accepted)
    assert not any(accepts("regex", pattern, text) for text in refused)


@pytest.mark.parametrize("pattern", [r"[A-\d]", r"[+-\w]", r"[a\-\d-", "[\\d"])
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="cannot be followed"):
        accepts("regex", pattern, "B")


def test_patterns_in_grammars() -> None:
    lark = '// no \\d/ "\nstart: "/\\\\d/" A <[5]> B # \\d/\nA: /"\\d\\/"/\nB[lazy]: /[^\\d]/i'
    assert expand_ascii_classes_in_lark(lark) == lark.replace('/"\\d', '/"[0-9]').replace("[^\\d]", "[^[0-9]]")
    grammar = 'start: "/\\\\d/" A\nA: /\\d{2}/'
    assert accepts("grammar", grammar, "/\\d/12")
    assert not accepts("grammar", grammar, f"/\\d/{ARABIC}2") and not accepts("grammar", grammar, "/5/12")
    schema = 'start: %json {"const": "/\\\\d/"} /\\d/'
    assert accepts("grammar", schema, '"/\\\\d/"5') and not accepts("grammar", schema, f'"/\\\\d/"{ARABIC}')


def test_other_patterns_are_unchanged() -> None:
    for pattern in ("", "é+x", r"(a|b\.)[a-z\-]{2}\x{41}\p{L}", r"[[:digit:]]\\w"):
        assert expand_ascii_classes(pattern) == pattern
    tags = "start: <s> /a/ </s> /b\\/[c]/"
    assert expand_ascii_classes_in_lark(tags) == tags
