"""Backend selector: the fastest backend that supports the device and the options, else plain torch.

The only module that knows all backends. Also reports why Triton kernels cannot run on a device; it does not import Triton to
do so.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from windlass.kernels.backend import Activations, Backend, BackendOptions
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.device_memory import SharedWeights
from windlass.kernels.rank_group import RankGroup
from windlass.kernels.torch.collectives import collectives_refusal
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

LEAST_CAPABILITY = (8, 0)  # Ampere: bfloat16 in its tensor cores


def triton_refusal(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: torch's CUDA builds bring it"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        name = torch.cuda.get_device_name(device)
        return f"{name} ({device}) has compute capability {own}, and {least} or later is needed"
    return compiler_refusal()


def compiler_refusal() -> str | None:
    """Why Triton cannot compile its launchers (a small C file per kernel), or None."""
    if os.environ.get("CC") is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton finds no C compiler, which it needs to launch kernels: install gcc, or set CC"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton finds no Python.h, which it needs to launch kernels: install Python's headers (python3-dev)"
    return None


class _NativeBackend(NamedTuple):
    """The backend with kernels for one kind of device.

    refusal: why it cannot be used with these options, or None. narrow, pairs: see `reads_16bit_weights` and `has_native_bf16`.
    share_memory: whether ranks communicate through shared memory.
    """

    refusal: Callable[[BackendOptions], str | None]
    make: Callable[[BackendOptions], Backend]
    narrow: bool
    pairs: Callable[[BackendOptions], bool] = lambda _: False
    share_memory: bool = False


def _triton(options: BackendOptions) -> Backend:
    # Triton takes a second to import, and is installed with CUDA builds of torch only.
    from windlass.kernels.triton.triton_backend import TritonBackend

    host = BackendOptions(torch.device("cpu"))
    return TritonBackend(options, CompiledBackend(host) if CompiledBackend.refusal(host) is None else None)


_NATIVE_BACKENDS = {  # by kind of device
    "cpu": _NativeBackend(
        CompiledBackend.refusal,
        CompiledBackend,
        narrow=True,
        pairs=lambda options: CompiledBackend(options).has_bf16_dot,
        share_memory=True,
    ),
    "cuda": _NativeBackend(lambda options: triton_refusal(options.device), _triton, narrow=False),
}


def select_backend(
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    *,
    activations: Activations = "int8",
    deterministic: bool = False,
    bf16_prefill: bool = False,
    shared: SharedWeights | None = None,
    ranks: RankGroup | None = None,
) -> Backend:
    """The backend for a model that computes in `dtype` on this device.

    weight_dtype: of its matrices; None: `dtype`. deterministic: see the module `backend`. shared: memory for its weights; None:
    memory of this process. ranks: see `BackendOptions`, as for activations and bf16_prefill.
    """
    options = BackendOptions(
        torch.device(device), dtype, weight_dtype or dtype, deterministic, activations, bf16_prefill, shared, ranks
    )
    native, refusal = _native(options)
    if native is not None:
        return native.make(options)
    return (RowIndependentBackend if deterministic else TorchBackend)(options, refusal)


def _native(options: BackendOptions) -> tuple[_NativeBackend | None, str | None]:
    """The native backend of the device if it can be used, and why it cannot (None if there is none)."""
    native = _NATIVE_BACKENDS.get(options.device.type)
    refusal = None if native is None else native.refusal(options)
    return native if refusal is None else None, refusal


def device_refusal(device: torch.device | str) -> str | None:
    """Why the kernels for this kind of device cannot run on this one; None if they can, or if there are none."""
    return _native(BackendOptions(torch.device(device)))[1]


def reads_16bit_weights(device: torch.device | str) -> bool:
    """Whether `linear` on this device reads bfloat16 or float16 weights directly when multiplying float32 rows."""
    options = BackendOptions(torch.device(device))
    native = _NATIVE_BACKENDS.get(options.device.type)
    return native is not None and native.narrow and native.refusal(options) is None


def has_native_bf16(device: torch.device | str) -> bool:
    """Whether the kernels for this device use native bfloat16 products for bfloat16 rows and weights."""
    options = BackendOptions(torch.device(device), torch.bfloat16, torch.bfloat16)
    native, _ = _native(options)
    return native is not None and native.pairs(options)


def ranks_refusal(device: torch.device | str) -> str | None:
    """Why a rank group is not possible on this kind of device, or None."""
    options = BackendOptions(torch.device(device))
    native = _NATIVE_BACKENDS.get(options.device.type)
    if native is not None and native.share_memory and native.refusal(options) is None:
        return None
    return collectives_refusal(options.device)
