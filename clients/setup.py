"""Builds in a folder that goes away: what an earlier build left must get neither into a wheel nor into the package."""

from tempfile import TemporaryDirectory

from setuptools import setup  # type: ignore[import-untyped]

if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        # Under its own name this file is left out of the package in whose folder it lies.
        setup(script_name="setup.py", options={"build": {"build_base": folder}})
