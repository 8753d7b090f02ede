"""Build in a temporary folder, so that files of an earlier build are neither in a wheel nor in the package."""

from tempfile import TemporaryDirectory

from setuptools import setup  # type: ignore[import-untyped]

if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        # With this name the file is excluded from the package, whose folder it is in.
        setup(script_name="setup.py", options={"build": {"build_base": folder}})
