"""Engine core: the step loop, its process, the messages between processes, memory budgeting and ranks."""

from __future__ import annotations
