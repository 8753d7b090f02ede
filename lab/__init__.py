"""Offline studies of rotary scalings: sweeps, retrieval tasks, pictures, conformance of any server, and scoring.

No serving process imports it. It may use windlass.clients and windlass.engine, not windlass.server.
"""

from __future__ import annotations
