"""Long documents from Debian packages: a novel, the Bible and three manuals.

    python benchmarks/real_model.py texts --out texts [--work work/texts]

Downloads the packages (`apt-get download`; Debian 12), unpacks them under --work, and writes one text file per document and
`sources.json`: package, version, characters and SHA-256. Manuals are read in the order of their tables of contents, prose
only, by the rules of the bundled model's corpus (`tools/demo_model/extract.py`). The bundled model was trained on the Bible
and on the Python manual, which are no test of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "demo_model"))
from extract import bible_documents, html_document

NOVEL = "persuasion"


@dataclass(frozen=True, slots=True)
class LongText:
    """A document: its package, further required packages, and the function that reads the unpacked packages."""

    name: str
    package: str
    read: Callable[[Path], str]
    needs: tuple[str, ...] = ()


def manual(product: str, contents: str, chosen: str = "") -> Callable[[Path], str]:
    """Pages in the order in which the page `contents` (under usr/share/doc) links to them, where `chosen` matches."""

    def read(packages: Path) -> str:
        index = packages / product / "usr/share/doc" / contents
        links = re.findall(r'href="([^"#:]+\.html)', index.read_text("utf-8"))
        seen: set[str] = set()
        pages = [link for link in dict.fromkeys(links) if re.match(chosen, link) and (index.parent / link).is_file()]
        found = (html_document(index.parent / page, product, product, seen) for page in pages)
        return "\n\n".join(document.text for document in found if document is not None)

    return read


def bible(packages: Path) -> str:
    found = bible_documents(packages / "bible-kjv/usr/bin/bible", packages / "bible-kjv-text/usr/lib")
    return "\n\n".join(document.text for document in found)


def novel(packages: Path) -> str:
    """The novel of the R package's lazy-load database, its lines joined into paragraphs."""
    data = packages / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data"
    pieces = _lazy_load((data / "Rdata.rdb").read_bytes())
    lines = next(lines for lines in map(list, map(_strings, pieces)) if NOVEL.upper() in [x.upper() for x in lines[:5]])
    paragraphs = "\n".join(lines).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def _lazy_load(data: bytes) -> Iterator[bytes]:
    """Values of R's lazy-load file: each a length and a zlib stream behind each other."""
    place = 0
    while place < len(data):
        stream = zlib.decompressobj()
        yield stream.decompress(data[place + 4 :])
        place = len(data) - len(stream.unused_data)


def _strings(value: bytes) -> Iterator[str]:
    """Character strings of a serialized R vector (XDR): a word with the kind (9), a length, bytes."""
    place = value.index(struct.pack(">i", 16)) + 8  # behind the head of the vector
    while place + 8 <= len(value):
        kind, length = struct.unpack_from(">ii", value, place)
        if kind & 0xFF != 9:
            return
        yield value[place + 8 : place + 8 + max(length, 0)].decode("utf-8")
        place += 8 + max(length, 0)


TEXTS = (
    LongText("novel", "r-cran-janeaustenr", novel),
    LongText("bible", "bible-kjv-text", bible, ("bible-kjv",)),
    LongText("rust", "rust-doc", manual("rust-doc", "rust-doc/html/book/index.html", r"ch\d\d-")),
    LongText("handbook", "debian-handbook", manual("debian-handbook", "debian-handbook/html/en-US/index.html")),
    LongText(
        "python", "python3.11-doc", manual("python3.11-doc", "python3.11/html/contents.html", "tutorial|faq|howto")
    ),
)


def fetch(package: str, work: Path) -> str:
    """Download and unpack a package that is not there yet; returns its version."""
    archives = work / "debs"
    archives.mkdir(parents=True, exist_ok=True)
    if not list(archives.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", package], cwd=archives, check=True, capture_output=True)
    archive = next(archives.glob(f"{package}_*.deb"))
    if not (work / package).exists():
        subprocess.run(["dpkg-deb", "-x", str(archive), str(work / package)], check=True)
    show = ["dpkg-deb", "--showformat=${Version}", "--show", str(archive)]
    return subprocess.run(show, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the texts")
    parser.add_argument("--work", type=Path, default=Path("work/texts"), help="folder for the packages")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sources = []
    for text in TEXTS:
        versions = {package: fetch(package, options.work) for package in (text.package, *text.needs)}
        written = text.read(options.work) + "\n"
        (options.out / f"{text.name}.txt").write_text(written, encoding="utf-8")
        digest = hashlib.sha256(written.encode()).hexdigest()
        sources.append({"name": text.name, "packages": versions, "characters": len(written), "sha256": digest})
        print(f"{text.name}: {len(written):,} characters", flush=True)
    (options.out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
