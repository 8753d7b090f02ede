"""Selection of the torch device, its free memory, and detection of out-of-memory errors.

What can be determined without torch is in `preflight`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from windlass import kernels
from windlass.engine.errors import LoadError
from windlass.engine.host_resources import available_memory
from windlass.engine.model.loading.preflight import check_rank_device

_CPU = "use `compute.device=cpu`"


class ChosenDevice(NamedTuple):
    """notices: one line each, on GPUs that cannot be used."""

    device: torch.device
    notices: tuple[str, ...] = ()


# Messages of torch's CPU allocator, of the system through torch, and of GPU libraries.
_OUT_OF_MEMORY_TEXTS = ("can't allocate", "not enough memory", "annot allocate memory", "out of memory", "ALLOC_FAILED")


def choose_device(name: str, rank: int = 0, ranks: int = 1) -> ChosenDevice:
    """The device for a name; "auto" is CUDA if there is a GPU that the kernels support. Raises LoadError for a named device that
    is missing or not supported.

    rank: of `ranks`, which get the GPUs in their order, or share the CPU.
    """
    chosen = _choose(name)
    if ranks == 1 or chosen.device.type != "cuda":
        return chosen
    check_rank_device(name, ranks)
    count = torch.cuda.device_count()
    if count < ranks:
        there = "there is one GPU" if count == 1 else f"there are {count} GPUs"
        raise LoadError(
            f"`compute.tensor_parallel={ranks}` takes a GPU for each rank, and {there}: use {count} or less, or "
            "`compute.device=cpu`"
        )
    own = torch.device("cuda", rank)
    _check_gpu(own)
    return ChosenDevice(own, chosen.notices)


def _choose(name: str) -> ChosenDevice:
    if name == "auto":
        if not torch.cuda.is_available():
            return ChosenDevice(torch.device("cpu"))
        gpu = torch.device("cuda")
        refusal = kernels.device_refusal(gpu)
        if refusal is None:
            return ChosenDevice(gpu)
        return ChosenDevice(torch.device("cpu"), (f"running on the CPU: {refusal}",))
    try:
        device = torch.device(name)
        if device.type == "cuda":
            _check_gpu(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"`compute.device={name}`: {_one_sentence(error)}: {_CPU}") from None
    return ChosenDevice(device)


def _check_gpu(device: torch.device) -> None:
    """Raise LoadError for an unsupported GPU, and what torch raises if it finds no driver."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        there = "there is one GPU, cuda:0" if count == 1 else f"there are {count} GPUs, cuda:0 to cuda:{count - 1}"
        raise LoadError(f"`compute.device={device}`: {there}: name one that is there, or {_CPU}")
    refusal = kernels.device_refusal(device)
    if refusal is not None:
        raise LoadError(f"`compute.device={device}`: {refusal}: {_CPU}")


def _one_sentence(error: Exception) -> str:
    """The first sentence of an error of torch, which may have several paragraphs."""
    return str(error).splitlines()[0].partition(". ")[0].rstrip(".:")


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device, None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() if device.type == "cpu" else None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; on a CPU torch raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or kernels.is_out_of_memory(error):
        return True
    plain = isinstance(error, RuntimeError) and not isinstance(error, torch.AcceleratorError | kernels.RankEndedError)
    return plain and any(words in str(error) for words in _OUT_OF_MEMORY_TEXTS)
