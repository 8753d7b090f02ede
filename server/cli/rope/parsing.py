"""How a scaling on the command line is read."""

from __future__ import annotations

import json
from typing import Any

from windlass.engine.errors import LoadError


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(
            f'the scaling is not valid JSON ({error}): write it like \'{{"rope_type": "yarn", "factor": 4}}\''
        ) from None
