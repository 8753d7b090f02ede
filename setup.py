"""Build steps that pyproject.toml cannot express: the source of the client and the compilation of the kernels."""

from __future__ import annotations

import os
import runpy
import shutil
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
KERNELS = runpy.run_path(str(ROOT / "src" / "windlass" / "kernels" / "cpu" / "build.py"))


def requirements() -> list[str]:
    """The dependencies of pyproject.toml and the client: by its folder in a clone, since no package index may have it.

    In a source archive without that folder and in a wheel for publication, the client is required by version. pip builds wheels
    for `pip install .` as well, so WINDLASS_RELEASE=1 marks those for publication.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    client = ROOT / "clients"
    if (client / "pyproject.toml").is_file() and os.environ.get("WINDLASS_RELEASE") != "1":
        source = f" @ {client.as_uri()}"
    else:
        source = "==" + runpy.run_path(str(ROOT / "src" / "windlass" / "_version.py"))["__version__"]
    return [*settings["tool"]["windlass"]["dependencies"], "windlass-client" + source]


class BuildKernels(build_ext):
    """Compile the kernels with kernels/cpu/build.py: for this processor in an editable install, for all in a wheel.

    WINDLASS_ISAS selects others. With `none` nothing is compiled, because the Makefile does so while pip installs.
    """

    def build_extension(self, extension: Extension) -> None:
        if os.environ.get("WINDLASS_ISAS") == "none":
            raise CompileError("left out, as WINDLASS_ISAS=none requests")
        if not self.editable_mode:
            os.environ.setdefault("WINDLASS_ISAS", "all")
        # In the source tree, where `make serve` compiles it too.
        library = Path("src", self.get_ext_filename(extension.name)).resolve()
        try:
            KERNELS["build"](library)
        except KERNELS["BuildError"] as error:
            raise CompileError(str(error)) from None
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)


# A shared object that ctypes loads. Without a compiler the package is installed without it and reports that at run time.
kernels = Extension("windlass.kernels.cpu._windlass_cpu", sources=[], optional=True)

if __name__ == "__main__":
    # In a temporary folder: files of an earlier build must not end up in a wheel.
    with TemporaryDirectory() as folder:
        setup(
            install_requires=requirements(),
            ext_modules=[kernels],
            cmdclass={"build_ext": BuildKernels},
            options={"build": {"build_base": folder}},
        )
