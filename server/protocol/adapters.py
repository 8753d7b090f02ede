"""Bodies and answers of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from windlass.server.protocol.base import StrictModel

Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoadAdapterRequest(StrictModel):
    """`lora_path`: a directory as PEFT writes it, in the server's folder of adapters or relative to it."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(StrictModel):
    """`lora_name`: of a loaded adapter."""

    lora_name: Name


class AdapterAnswer(StrictModel):
    """`draining`: requests still run with it; it goes when they end. `rank`, `targets`: of one that was loaded."""

    id: str
    object: Literal["lora_adapter"] = "lora_adapter"
    status: Literal["loaded", "unloaded", "draining"]
    rank: int | None = None
    targets: list[str] | None = None
