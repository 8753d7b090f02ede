"""Tells values that JSON can hold from NaN and infinity, which it has no numbers for though Python reads them."""

from __future__ import annotations

import json
from typing import Any


def fits_json(value: Any) -> bool:
    """Whether a value can be sent to a server and written into a report."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True
