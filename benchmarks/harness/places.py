"""Paths of the benchmark models and of the installed peers in the work folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Places:
    """work: the folder that git ignores. shape: a key of SHAPES."""

    work: Path
    shape: str = "1b"

    @property
    def _models(self) -> Path:
        return self.work / f"bench-{self.shape}"

    @property
    def model(self) -> Path:
        """The safetensors checkpoint."""
        return self._models / "model"

    @property
    def quality(self) -> Path:
        """The report of `peers.py quality`."""
        return self._models / "quality.json"

    def gguf(self, kind: str) -> Path:
        """kind: f16, q8_0, q4_0 or q4_k_m."""
        return self._models / "gguf" / f"model-{kind}.gguf"

    def openvino_model(self, kind: str) -> Path:
        """kind: int8 or int4."""
        return self._models / f"openvino-{kind}"

    @property
    def export_python(self) -> Path | None:
        return _existing(self.work / "peers" / "openvino-export" / "bin" / "python")

    @property
    def openvino_python(self) -> Path | None:
        return _existing(self.work / "peers" / "openvino" / "bin" / "python")

    @property
    def vllm_python(self) -> Path | None:
        return _existing(self.work / "peers" / "vllm" / "bin" / "python")

    def llama_tool(self, name: str, program: str = "llama.cpp") -> Path | None:
        """llama-bench, llama-batched-bench, llama-quantize, llama-perplexity or our llama-depth. program: whose."""
        return _existing(self.work / "peers" / f"{program}-build" / "bin" / name)


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None
