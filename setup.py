"""What pyproject.toml cannot say: where the client comes from, and how the kernels are compiled."""

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
    """Those of pyproject.toml, and the client: from its folder in a clone, so that `pip install .` needs no index that has it.

    By its version where a source archive has no such folder, and in a wheel for others: pip builds a wheel for `pip install .`
    too and does not say which it wants, so whoever makes one to hand on sets WINDLASS_RELEASE=1.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    client = ROOT / "clients"
    if (client / "pyproject.toml").is_file() and os.environ.get("WINDLASS_RELEASE") != "1":
        place = f" @ {client.as_uri()}"
    else:
        place = "==" + runpy.run_path(str(ROOT / "src" / "windlass" / "_version.py"))["__version__"]
    return [*settings["tool"]["windlass"]["dependencies"], "windlass-client" + place]


class BuildKernels(build_ext):
    """Compiles the files side by side, and only where what an editable install left beside them came from other ones."""

    def build_extension(self, extension: Extension) -> None:
        kept = Path("src", self.get_ext_filename(extension.name))
        # By what is in them: files may come with any time, or go. How they are compiled stands here.
        if (
            kept.exists()
            and SOURCES.encode() in kept.read_bytes()
            and not newer_group([str(ROOT / "setup.py")], str(kept))
        ):
            target = Path(self.get_ext_fullpath(extension.name))
            self.mkpath(str(target.parent))
            self.copy_file(str(kept), str(target))
            return
        # Nothing takes them any more. Where these do not compile there are to be none: then a compiler that comes makes them.
        kept.unlink(missing_ok=True)
        compile_files = self.compiler.compile

        def side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiled = pool.map(lambda source: compile_files([source], **options), sources)
                return [name for names in compiled for name in names]

        self.compiler.compile = side_by_side
        super().build_extension(extension)


# A plain shared object, loaded by ctypes. Without a compiler the package installs all the same and says at run time that it
# works without it. No -march: each file names its own instruction set, chosen at run time.
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
    # In a folder that goes away: what an earlier build left behind must not come into a wheel.
    with TemporaryDirectory() as folder:
        setup(
            install_requires=requirements(),
            ext_modules=[kernels],
            cmdclass={"build_ext": BuildKernels},
            options={"build": {"build_base": folder}},
        )
