"""Hypothesis strategy of texts on which tokenizers tend to differ: scripts, white space, control characters, emoji, bytes."""

from __future__ import annotations

from hypothesis import strategies as st

_PARTS = (
    *("the quick brown ", "hello", " ", "  ", "   ", "\n", "\r\n", "\t", "\u3000", "\u200b", "▁", "\x00", "\x1b", "\x7f"),
    *("Größe", "naïve", "é", "e\u0301", "日本語", "東京", "가나각", "ᄀ", "कि", "Привет", "שלום", "مرحبا", "ไทย", "𝒳", "ſ"),
    *("😀", "👨‍👩‍👧", "🏳️‍🌈", "don't", "I'LL", "x²", "½", "１２", "1234567", "3.14", "==", "!?…", "<0x41>", "\ufffd", "\ud7ff"),
)  # fmt: skip
_FROM_BYTES = st.binary(max_size=24).map(lambda data: data.decode("utf-8", "replace"))

ANY_TEXT = st.one_of(
    st.lists(st.sampled_from(_PARTS), max_size=16).map("".join),
    st.text(max_size=24),
    st.text("ab c", max_size=24),
    _FROM_BYTES,
)
