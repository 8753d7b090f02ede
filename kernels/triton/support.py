"""Whether Triton's programs can run on a device. Imports no Triton."""

from __future__ import annotations

import importlib.util

import torch

LEAST_CAPABILITY = (8, 0)  # Ampere: bfloat16 in its tensor cores


def refusal(device: torch.device) -> str | None:
    """Why the programs cannot run there, or None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: torch's CUDA builds bring it"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        name = torch.cuda.get_device_name(device)
        return f"{name} ({device}) has compute capability {own}, and {least} or later is needed"
    return None
