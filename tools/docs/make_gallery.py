"""Update the captions of `windlass rope picture` on docs/internals/rotary-embeddings.md, and draw its pictures.

.venv/bin/python tools/docs/make_gallery.py

Pictures and captions have Llama 2's parameters. A caption is between `<!-- picture: KIND -->` and `<!-- end -->`.
"""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path

from windlass.lab.gallery import Extras, draw
from windlass.lab.gallery_subject import Subject, make_subject
from windlass.lab.plotting import save_figure
from windlass.server.startup.derived_files import ensure_tokenizer
from windlass.server.text.tokenizer import Tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "internals" / "rotary-embeddings.md"
PICTURES = PAGE.with_name("pictures")
_CAPTION = re.compile(r"<!-- picture: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def _turns_within(subject: Subject, tokens: int) -> int:
    """Number of pairs that make at least one full turn within `tokens` tokens, unscaled."""
    return int((subject.frequencies(subject.compared[0][1]) * tokens >= 2 * math.pi).sum())


def _slowest(subject: Subject) -> float:
    return float(subject.frequencies(subject.compared[0][1])[-1])


def _rotation(subject: Subject) -> str:
    return (
        f"The {2 * subject.pairs} dimensions of a head form {subject.pairs} pairs, each an arrow in a plane. The first pair "
        "repeats after a few tokens, the last hardly move, like the hands of a clock. Lengths do not change."
    )


def _extrapolation(subject: Subject) -> str:
    done = _turns_within(subject, subject.base.trained_len)
    largest = subject.base.trained_len * _slowest(subject)
    return (
        f"Within {subject.base.trained_len:,} tokens the first {done} pairs pass through every angle, the slowest only up to "
        f"{largest:.2f} radians. A text of {subject.length:,} tokens rotates it to {subject.length * _slowest(subject):.1f}, an "
        "untrained angle. Right: PI limits every pair to trained angles; YaRN and Llama 3 those that need it; NTK-aware "
        "scaling only the slowest, so its factor is usually chosen larger than the length requires."
    )


# Titles and explanations. Pictures of the other kinds would only enlarge the clone.
SHOWN = {
    "rotation": ("Rotating arrows", _rotation),
    "extrapolation": ("Beyond the trained length", _extrapolation),
}


def caption(name: str) -> str:
    """Picture and explanation."""
    title, explain = SHOWN[name]
    text = f"{title} (`windlass rope picture {name}`). {explain(make_subject(None, None, [], None, 'Llama 2'))}"
    text = textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)
    return f"![{title}]({PICTURES.name}/{name}.png)\n\n{text}"


def kinds_of(page: str) -> list[str]:
    """Kinds of pictures with a caption on the page, in order."""
    return [match[1] for match in _CAPTION.finditer(page)]


def updated(page: str) -> str:
    """The page with the present captions."""
    return _CAPTION.sub(lambda match: f"<!-- picture: {match[1]} -->\n\n{caption(match[1])}\n\n<!-- end -->", page)


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    extras = Extras(load_tokenizer=lambda path: Tokenizer.from_directory(ensure_tokenizer(path)))
    for name in SHOWN:
        subject = make_subject(None, None, [], None, "Llama 2")
        save_figure(draw(name, subject, extras), PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
