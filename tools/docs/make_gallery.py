"""Update the captions of `windlass rope picture` on docs/internals/rotary-embeddings.md, and draw its pictures.

.venv/bin/python tools/docs/make_gallery.py

Pictures and captions have Llama 2's parameters. A caption is between `<!-- picture: KIND -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from windlass.lab.gallery import KINDS, Extras, draw
from windlass.lab.gallery_subject import make_subject
from windlass.lab.plotting import save_figure
from windlass.server.startup.derived_files import ensure_tokenizer
from windlass.server.text.tokenizer import Tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "internals" / "rotary-embeddings.md"
PICTURES = PAGE.with_name("pictures")
SHOWN = ("rotation", "encodings", "extrapolation", "scalings")  # the others would only enlarge the clone

_CAPTION = re.compile(r"<!-- picture: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def caption(name: str) -> str:
    """Picture, if it is in the clone, and explanation."""
    kind = KINDS[name]
    text = kind.explain(make_subject(None, None, [], None, "Llama 2"))
    image = f"![{kind.title}]({PICTURES.name}/{name}.png)\n\n" if name in SHOWN else ""
    text = f"{kind.title} (`windlass rope picture {name}`). {text}"
    return image + textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)


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
