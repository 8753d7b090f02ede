"""Build steps that pyproject.toml cannot express: the source of the client and the compilation of the kernels."""

from __future__ import annotations

import os
import runpy
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "src" / "windlass" / "kernels" / "cpu" / "src"
SOURCES = runpy.run_path(str(KERNELS.parent / "sources.py"))["fingerprint"](KERNELS)


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
    """Compile the files in parallel, unless the library of an editable install was compiled from the same sources."""

    def build_extension(self, extension: Extension) -> None:
        existing = Path("src", self.get_ext_filename(extension.name))
        # Sources are compared by content, since times in a clone mean nothing. The compiler flags are in this file.
        if (
            existing.exists()
            and SOURCES.encode() in existing.read_bytes()
            and not newer_group([str(ROOT / "setup.py")], str(existing))
        ):
            target = Path(self.get_ext_fullpath(extension.name))
            self.mkpath(str(target.parent))
            self.copy_file(str(existing), str(target))
            return
        # The library would be refused at run time. Without it, a later build with a compiler creates a new one.
        existing.unlink(missing_ok=True)
        compile_files = self.compiler.compile

        def compile_in_parallel(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiled = pool.map(lambda source: compile_files([source], **options), sources)
                return [name for names in compiled for name in names]

        self.compiler.compile = compile_in_parallel
        super().build_extension(extension)


# A shared object that ctypes loads. Without a compiler the package is installed without it and reports that at run time.
# No -march: each file has its own instruction set, and one is chosen at run time.
kernels = Extension(
    "windlass.kernels.cpu._windlass_cpu",
    sources=sorted(str(path.relative_to(ROOT)) for path in KERNELS.glob("isa_*.cpp")),
    extra_compile_args=[
        "-O3",
        "-std=c++17",
        "-fopenmp",
        "-fvisibility=hidden",
        "-Wno-psabi",
        "-g0",
        f'-DWINDLASS_SOURCES="{SOURCES}"',
    ],
    extra_link_args=["-fopenmp"],
    language="c++",
    optional=True,
)

if __name__ == "__main__":
    # In a temporary folder: files of an earlier build must not end up in a wheel.
    with TemporaryDirectory() as folder:
        setup(
            install_requires=requirements(),
            ext_modules=[kernels],
            cmdclass={"build_ext": BuildKernels},
            options={"build": {"build_base": folder}},
        )
