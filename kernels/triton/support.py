"""Whether Triton's programs can run on a device. Imports no Triton."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

LEAST_CAPABILITY = (8, 0)  # Ampere: bfloat16 in its tensor cores


def triton_refusal(device: torch.device) -> str | None:
    """Why the programs cannot run there, or None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: torch's CUDA builds bring it"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        name = torch.cuda.get_device_name(device)
        return f"{name} ({device}) has compute capability {own}, and {least} or later is needed"
    return compiler_refusal()


def compiler_refusal() -> str | None:
    """Why Triton cannot build what starts its programs, a small file of C for each; None where it can."""
    if os.environ.get("CC") is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton finds no C compiler, which it starts its programs with: install gcc, or name one in CC"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton finds no Python.h, which it starts its programs with: install Python's headers (python3-dev)"
    return None
