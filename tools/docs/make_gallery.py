"""Generate docs/gallery.md, which explains every kind of `windlass rope picture`, and its pictures.

.venv/bin/python tools/docs/make_gallery.py

Formulas are shown with Llama 2's parameters.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from windlass.lab.gallery import KINDS, Extras, draw
from windlass.lab.gallery_subject import make_subject
from windlass.lab.plotting import save_figure
from windlass.server.startup.derived_files import ensure_tokenizer
from windlass.server.text.tokenizer import Tokenizer

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = ("rotation", "invariance", "encodings", "extrapolation", "scalings")  # the others would only enlarge the clone

HEAD = """# Pictures of rotary embeddings

Every picture can be drawn by one command, for any model or parameters, as PNG or SVG. Here they show Llama 2's parameters:
θ = 10,000, heads of 128, trained on 4,096 tokens. Where it matters they extend to 100,000 tokens. Frequencies come from the
functions that the server uses.

`. .venv/bin/activate` in the clone puts `windlass` on your path ([how to install it](../README.md#start)).

```bash
windlass rope picture scalings --out scalings.png
windlass rope picture decay --theta 500000 --dim 128 --trained-len 8192 --length 131072 --out decay.svg
windlass rope picture rotation --model /path/to/model --scaling '{"rope_type": "yarn", "factor": 4}' --out rotation.png
windlass rope picture attention --model smollm2 --layer 5 --text "One two three. One two three." --out attention.png
windlass rope picture encodings --learned /path/to/gpt2 --out encodings.png
```

They need matplotlib: `pip install -c constraints.txt -e '.[plots]'`. `--scaling` may be repeated for `scalings` and
`extrapolation`, which compare several. In Python, use `windlass.lab.gallery.draw`. This page is generated
by `tools/docs/make_gallery.py`.

Explanation of the pictures, step by step: [the guide](guide/index.md). Scalings: [rotary scaling](rotary.md). Their effect on a
real model: [longer than a model was trained for](longer-context.md).
"""


def page() -> str:
    subject = make_subject(None, None, [], None, "Llama 2")
    parts = [HEAD]
    for name, kind in KINDS.items():
        parts += [
            f"## {kind.title}",
            *([f"![{kind.title}](gallery/{name}.png)"] if name in SHOWN else []),
            textwrap.fill(kind.explain(subject), 140, break_long_words=False, break_on_hyphens=False),
            f"`windlass rope picture {name}`",
        ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    (DOCS / "gallery.md").write_text(page(), encoding="utf-8")
    extras = Extras(load_tokenizer=lambda path: Tokenizer.from_directory(ensure_tokenizer(path)))
    for name in SHOWN:
        subject = make_subject(None, None, [], None, "Llama 2")
        save_figure(draw(name, subject, extras), DOCS / "gallery" / f"{name}.png")


if __name__ == "__main__":
    main()
