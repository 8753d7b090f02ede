"""The version of Windlass. The server links to this file, so both distributions have the same version."""

__version__ = "0.1.0"
