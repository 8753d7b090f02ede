"""What holds for requests that do not say how to sample: as the model's generation_config.json has it, or what stands for it.

Reads the file; knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.engine.model.loading.model_description import read_json
from windlass.server.options.answer_defaults import FILE, NONE, OVERRIDE, read_override, read_sampling, sampling_file
from windlass.server.options.settings import SamplingDefaults

RECOMMENDED = "recommended by its authors"
_ADVICE = "correct the file, or start with --generation-config none"


@dataclass(frozen=True, slots=True)
class ModelSampling:
    """sampling: what holds. sources: for people, where each field that is set comes from."""

    sampling: SamplingDefaults
    sources: Mapping[str, str] = field(default_factory=dict)


def find_sampling(
    directory: Path, recommended: Mapping[str, float], given: str = "auto", override: str | None = None
) -> ModelSampling:
    """What the model's file sets, and where that says nothing what is recommended; neutral values for the rest.

    recommended: what is known of the model beside its file. given, override: the operator's options of these names. Lengths
    (`max_new_tokens`) are not taken: they are the operator's. Raises LoadError, one line, for values that no request could set
    either.
    """
    other = sampling_file(given)
    path = directory / FILE if other is None else other
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if other is None and given not in NONE:
        values |= recommended
        sources |= dict.fromkeys(recommended, RECOMMENDED)
    if other is not None or (given not in NONE and path.is_file()):
        of_file = {name: value for name, value in read_json(path).items() if value is not None}
        values |= of_file
        sources |= dict.fromkeys(read_sampling(of_file, str(path), _ADVICE), FILE if other is None else str(path))
    replaced = read_override(override)
    if "temperature" in replaced and "do_sample" not in replaced:
        values.pop("do_sample", None)  # whoever gives a temperature wants that one
    values |= replaced
    sources |= dict.fromkeys([*replaced, *read_sampling(replaced, OVERRIDE, "")], OVERRIDE)
    found = read_sampling(values, str(path), _ADVICE)
    return ModelSampling(SamplingDefaults(**found), {name: sources[name] for name in found})
