"""Which kind of device an engine will run on, as far as that can be told without importing torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from windlass.engine.errors import LoadError

_CUDA_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so", "torch_cuda.dll")


def expect_device(name: str) -> str | None:
    """ "cpu", "cuda", or None where only torch can tell. Raises LoadError for a device that this torch cannot have."""
    if name == "cpu":
        return "cpu"
    if name == "auto":
        return None if _torch_has_cuda() else "cpu"
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise LoadError(f"`compute.device={name}` is not known: use auto, cpu, cuda, or cuda:1 for the second GPU")
    if not _torch_has_cuda():
        raise LoadError(
            f"`compute.device={name}`: the installed torch has no CUDA: use `compute.device=cpu`, or install a CUDA build"
        )
    return "cuda"


def check_rank_device(name: str, ranks: int) -> None:
    """LoadError for one named GPU, where each of several ranks has one."""
    if ranks > 1 and ":" in name:
        raise LoadError(
            f"`compute.device={name}` is one GPU, and `compute.tensor_parallel={ranks}` takes one for each rank: use "
            "`compute.device=cuda`, and name those it may see in CUDA_VISIBLE_DEVICES"
        )


def _torch_has_cuda() -> bool:
    """Whether the installed torch brings its CUDA (or ROCm) library; there may still be no GPU."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    return any(Path(folder, "lib", name).is_file() for folder in folders or () for name in _CUDA_LIBRARIES)
