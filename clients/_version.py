"""The one version of Windlass: the server has it through a link, so both distributions are built with it."""

__version__ = "0.1.0"
