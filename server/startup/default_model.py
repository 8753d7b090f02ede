"""Default model: the largest of a few known ones that memory, disk and network permit, or that is downloaded.

`make serve` runs this file while pip installs the packages, so it needs the standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from windlass.clients.terminal import print_status
from windlass.engine.host_resources import available_memory
from windlass.server.startup.model_catalog import (
    DEMO,
    KNOWN,
    QWEN_CODER_0_5B,
    QWEN_CODER_1_5B,
    SMOLLM2,
    KnownModel,
    PullError,
    SlowDownloadError,
    decimal_size,
    is_downloaded,
    pull,
)

# From the best to the worst. The last one needs no download.
DEFAULT_MODELS = (QWEN_CODER_1_5B, QWEN_CODER_0_5B, SMOLLM2, DEMO)

# A first start, from a clone to an answer, should take about 100 seconds, so the default needs a link of about 100 Mbit/s.
_DOWNLOAD_SECONDS = 90


def pull_default_model() -> KnownModel:
    """The best of DEFAULT_MODELS for this machine, downloaded if necessary.

    One of the first two that has been downloaded is used without a network. Every step to a smaller one is reported on standard
    error, with the reason.
    """
    best, *smaller, last = DEFAULT_MODELS
    models = [model for model in (best, *smaller) if _fits(model)]
    downloaded = [model for model in models if model in DEFAULT_MODELS[:2] and is_downloaded(model)]
    return downloaded[0] if downloaded else _first_available([*models, last])


def _first_available(models: Sequence[KnownModel]) -> KnownModel:
    """The first model that is downloaded or can be. The last one needs no download."""
    model, *smaller = models
    if is_downloaded(model):
        return model
    try:
        pull(model, _DOWNLOAD_SECONDS if model is DEFAULT_MODELS[0] else None)
        return model
    except SlowDownloadError as slow:
        reason = f"the download of {model.name} would take {slow}"
    except PullError as error:
        reason = str(error)
        if error.any_model:
            smaller = [other for other in smaller if is_downloaded(other)]
    print_status(f"note: {reason}; continuing with {smaller[0].name} ({smaller[0].about})")
    return _first_available(smaller)


def _fits(model: KnownModel) -> bool:
    """Whether the main memory suffices; if not, a line reports it."""
    free = available_memory()
    if free is None or model.memory <= free:
        return True
    print_status(f"note: {model.name} needs {decimal_size(model.memory)} of memory, and {decimal_size(free)} are free")
    return False


def main(models: Sequence[str]) -> int:
    """Download the known models among these, or the default model if none is named.

    The server reports what failed, and continues the download.
    """
    try:
        if not models:
            pull_default_model()
        for name in models:
            if name in KNOWN and KNOWN[name].file is not None:
                pull(KNOWN[name])
    except PullError:
        pass
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
