"""Parts that perplexity and retrieval sweeps share: options, loading of the model, output of the reports."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from windlass.clients.terminal import LoadingDisplay, check_outputs, write_output
from windlass.engine.interface.context import ContextRule
from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.lab.sweep_texts import Encoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSweepOptions:
    """Options of every sweep.

    model: its directory. model_name: the argument of `windlass serve`. html, json, png, markdown: files to write. keep: the
    result log. scalings, policies: empty for the sweep's own choice. attention_window, attention_sinks: of one candidate with
    a window; None for none. load_tokenizer: from the model's directory.
    """

    model: Path
    model_name: str
    html: Path
    load_tokenizer: Callable[[Path], Encoder]
    trained_len: int | None = None
    scalings: tuple[dict[str, Any], ...] = ()
    policies: tuple[RopeUpdate, ...] = ()
    cut: bool = True
    attention_window: int | None = None
    attention_sinks: int = 4
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    json: Path | None = None
    png: Path | None = None
    markdown: Path | None = None
    keep: Path | None = None

    @property
    def window(self) -> ContextRule | None:
        """The rule of the candidate with a window."""
        if self.attention_window is None:
            return None
        return ContextRule(attention_window=self.attention_window, attention_sinks=self.attention_sinks)

    def load_scorer(self, load: Callable[..., T], **more: Any) -> T:
        """Call the `load` of a scorer for the model, with a display of its progress. Raises LoadError."""
        display = LoadingDisplay()
        types = {"device": self.device, "dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype}
        try:
            return load(self.model, **types, progress=display, **more)
        finally:
            display.stop()

    def check_outputs(self, texts: Sequence[Path]) -> None:
        """Raise CommandError for a file that cannot be written, or that is also one of `texts`."""
        outputs = {
            "--out": self.html,
            "--json": self.json,
            "--png": self.png,
            "--markdown": self.markdown,
            "--keep": self.keep,
        }
        check_outputs(outputs)
        for text in texts:
            check_outputs(outputs, {"--text": text})

    def write_reports(
        self,
        *,
        html: Callable[[str, str], str],
        markdown: Callable[[str | None, str], str],
        content: dict[str, Any],
        draw: Callable[[str], Figure],
    ) -> None:
        """Write the requested files. html: from the SVG and the date. markdown: from the picture's file name and the date.

        content: of the JSON file. draw: the figure with text of a given colour. Raises CommandError and LoadError.
        """
        from windlass.lab.plotting import INK, save_png, to_svg

        date = datetime.date.today().isoformat()
        write_output(self.html, html(to_svg(draw(INK)), date))
        if self.json is not None:
            write_output(self.json, json.dumps({"date": date, **content}, indent=1) + "\n")
        if self.png is not None:
            save_png(draw("#222222"), self.png)
        if self.markdown is not None:
            write_output(self.markdown, markdown(None if self.png is None else self.png.name, date))
