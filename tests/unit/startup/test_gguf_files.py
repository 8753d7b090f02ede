"""Selection among several GGUF files: names that an error proposes are unambiguous."""

from __future__ import annotations

import pytest

from windlass.engine.errors import LoadError
from windlass.server.startup.model_files import choose_file, models_by_short_name


@pytest.mark.parametrize(
    "names",
    [
        ("m-Q8_0.gguf", "m-UD-Q8_0.gguf"),
        ("m-Q8_0.gguf", "m-UD-Q8_0.gguf", "m-Q4_0.gguf"),
        ("m-Q8_0.gguf", "m-UD-Q8_0.gguf", "a-Q4_0.gguf", "b-Q4_0.gguf"),
        ("m.gguf", "sub/m.gguf"),
        ("a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf", "b-Q8_0.gguf"),
    ],
)
def test_proposed_names_are_unambiguous(names: tuple[str, ...]) -> None:
    for spoken, name in models_by_short_name(names).items():
        assert choose_file(names, spoken, "here", "org/m") == name
    with pytest.raises(LoadError, match="several") as refused:
        choose_file(names, None, "here", "org/m")
    assert choose_file(names, str(refused.value).rpartition("org/m:")[2], "here", "org/m") in names


def test_exact_names_win_over_suffixes() -> None:
    names = ("m-UD-Q8_0.gguf", "m-Q8_0.gguf", "a-Q4_0.gguf", "b-Q4_0.gguf")
    assert choose_file(names, "q8_0", "here", "org/m") == "m-Q8_0.gguf"
    with pytest.raises(LoadError, match=r"\(a-Q4_0.gguf, b-Q4_0.gguf\)"):
        choose_file(names, "Q4_0", "here", "org/m")
