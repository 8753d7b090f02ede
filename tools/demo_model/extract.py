"""Plain-text documents and question-and-answer pairs from unpacked documentation packages.

Reads the formats of the sources (HTML, the `bible` program, WordNet's data files) and selects prose.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

SKIPPED_TAGS = {"script", "style", "pre", "table", "nav", "head", "svg", "form", "dt", "button", "select", "sup"}
SKIPPED_CLASSES = {
    "sphinxsidebar", "related", "navheader", "navfooter", "nosearch", "toc", "contents", "footer", "menu-wrapper",
    "mobile-nav", "refnamediv", "refsynopsisdiv", "toctree-wrapper", "fancy_toc", "headerlink", "versionmodified",
    "calloutlist", "footnotes", "indexterm", "fancy-toc1", "fancy-toc2", "fancy-toc3",
}  # fmt: skip
BLOCK_TAGS = {"p", "li", "h1", "h2", "h3", "h4", "h5", "dd", "div", "blockquote", "ul", "ol", "dl", "section", "body"}
TYPOGRAPHY = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\xa0": " ", "¶": "", "…": "..."}
)
BOOKS = (
    "Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy", "Joshua", "Judges", "Ruth", "1 Samuel", "2 Samuel",
    "1 Kings", "2 Kings", "1 Chronicles", "2 Chronicles", "Ezra", "Nehemiah", "Esther", "Job", "Psalms", "Proverbs",
    "Ecclesiastes", "Song of Solomon", "Isaiah", "Jeremiah", "Lamentations", "Ezekiel", "Daniel", "Hosea", "Joel",
    "Amos", "Obadiah", "Jonah", "Micah", "Nahum", "Habakkuk", "Zephaniah", "Haggai", "Zechariah", "Malachi",
    "Matthew", "Mark", "Luke", "John", "Acts", "Romans", "1 Corinthians", "2 Corinthians", "Galatians", "Ephesians",
    "Philippians", "Colossians", "1 Thessalonians", "2 Thessalonians", "1 Timothy", "2 Timothy", "Titus", "Philemon",
    "Hebrews", "James", "1 Peter", "2 Peter", "1 John", "2 John", "3 John", "Jude", "Revelation",
)  # fmt: skip


SAME_AS_TITLE = {"overview", "description", "introduction", "summary", "in brief"}
GENERIC = {
    "notes", "parameters", "examples", "example", "compatibility", "see also", "outputs", "options", "environment",
    "diagnostics", "usage", "functions", "limitations", "background", "concepts", "configuration", "caveats",
    "return value", "restrictions", "author", "authors", "overview", "description", "introduction", "arguments",
    "miscellaneous",
}  # fmt: skip


@dataclass(slots=True)
class Document:
    """One whole document: `group` is the unit that is held out or trained on as a whole."""

    source: str
    group: str
    text: str
    pairs: list[tuple[str, str]] = field(default_factory=list)  # (question, answer) drawn from this document alone


class _Blocks(HTMLParser):
    """Collects (tag, text) for headings, paragraphs and list items; markup that is not prose is dropped."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []
        self._kind = "p"
        self._parts: list[str] = []
        self._skip_tag: str | None = None
        self._skip_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skip_tag is not None:
            self._skip_depth += tag == self._skip_tag
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag in SKIPPED_TAGS or classes & SKIPPED_CLASSES:
            if tag in {"pre", "table"}:
                self.flush()
                self.blocks.append(("cut", ""))
            self._skip_tag, self._skip_depth = tag, 1
        elif tag in BLOCK_TAGS:
            self.flush()
            self._kind = tag

    def handle_endtag(self, tag: str) -> None:
        if self._skip_tag is not None:
            self._skip_depth -= tag == self._skip_tag
            if self._skip_depth == 0:
                self._skip_tag = None
        elif tag in BLOCK_TAGS:
            self.flush()
            self._kind = "p"

    def handle_data(self, data: str) -> None:
        if self._skip_tag is None:
            self._parts.append(data)

    def flush(self) -> None:
        text = " ".join("".join(self._parts).translate(TYPOGRAPHY).split())
        self._parts.clear()
        if text:
            self.blocks.append((self._kind, text))


def clean_heading(text: str) -> str:
    text = re.sub(r"^(Chapter|Appendix|Part)\s+[\dA-Z]+\.\s*", "", text)
    return re.sub(r"^[\dA-Z]?[\d.]*\.\s+(?=\S)", "", text).strip(" :#-")


def prose(text: str) -> str | None:
    """The paragraph cut back to whole sentences, or None where it reads like code, a table row or a fragment."""
    text = re.sub(r"\s+([,.;])", r"\1", text)
    end = max(text.rfind("."), text.rfind("!"), text.rfind("?"))
    if text.endswith(":") or not text.endswith((".", "!", "?", ")", '"')):
        text = text[: end + 1]
    if len(text) < 60 or not text[0].isupper():
        return None
    odd = sum(text.count(c) for c in "_={}<>[]|\\/@#$%^&*+~`") + sum(not c.isascii() for c in text)
    letters = sum(c.isalpha() or c == " " for c in text)
    return text if odd <= 0.012 * len(text) and letters >= 0.9 * len(text) else None


def html_document(path: Path, source: str, product: str, seen: set[str]) -> Document | None:
    """One page: its headings and prose as text, and one pair per section. Paragraphs in `seen` are left out."""
    page = path.read_text("utf-8", errors="replace")
    parser = _Blocks()
    parser.feed(page)
    parser.flush()
    named = re.search(r"<title>(.*?)</title>", page, re.S)
    sections: list[tuple[str, list[str]]] = []
    if source == "sqlite" and named:  # SQLite's pages carry their title outside any heading
        sections.append((clean_heading(unescape(named[1])), []))
    for tag, raw in parser.blocks:
        if tag in {"h1", "h2", "h3", "h4", "h5"}:
            sections.append((clean_heading(raw), []))
        elif sections and (text := prose(raw)) and text not in seen:
            seen.add(text)
            sections[-1][1].append(f"- {text}" if tag == "li" else text)
    sections = [(h, ps) for i, (h, ps) in enumerate(sections) if ps or i == 0]
    body = "\n\n".join("\n\n".join([f"# {h}", *ps]) for h, ps in sections)
    if sum(len(p) for _, ps in sections for p in ps) < 400:
        return None
    document = Document(source, f"{source}/{path.name}", body)
    rng = random.Random(document.group)
    for heading, paragraphs in sections:
        subject = sections[0][0] if heading.lower() in SAME_AS_TITLE else heading
        if not paragraphs or not 4 <= len(subject) <= 70 or not subject.isascii() or paragraphs[0].startswith("-"):
            continue
        if subject.lower() in GENERIC:
            continue
        answer = paragraphs[0]
        for paragraph in paragraphs[1:]:
            if len(answer) + len(paragraph) > 500 or paragraph.startswith("-"):
                break
            answer += "\n\n" + paragraph
        if len(answer) <= 900:
            document.pairs.append((_question(subject, product, rng), answer))
    return document


def _question(subject: str, product: str, rng: random.Random) -> str:
    if subject.endswith("?"):
        return subject
    if subject.split()[0].lower() in {"how", "why", "what", "when", "where", "which", "can", "is", "does", "do"}:
        return f"{subject}?"
    forms = ("Tell me about {}.", "Tell me about {} in " + product + ".", "Explain {}.", "What is {}?",
             "What does the " + product + " manual say about {}?")  # fmt: skip
    return rng.choice(forms).format(subject.rstrip("."))


def html_documents(root: Path, source: str, product: str, folders: tuple[str, ...]) -> Iterator[Document]:
    seen: set[str] = set()
    for folder in folders:
        for path in sorted((root / folder).glob("*.html")):
            document = html_document(path, source, product, seen)
            if document is not None:
                yield document


def bible_documents(program: Path, data: Path) -> Iterator[Document]:
    """One document per chapter, one verse a line; the group is the book, so books are held out whole."""
    listing = subprocess.run(
        [str(program), "-p", str(data), "-f", "gen1:1-rev22:21"], capture_output=True, check=True, text=True
    ).stdout
    names: dict[str, str] = {}
    chapters: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for line in listing.splitlines():
        match = re.match(r"(\d?[A-Za-z]+?)(\d+):(\d+) (.*)", line)
        if match:
            short, chapter, verse, text = match.groups()
            if short not in names:
                names[short] = BOOKS[len(names)]
            chapters.setdefault((names[short], chapter), []).append((verse, " ".join(text.split())))
    if len(names) != len(BOOKS):
        raise SystemExit(f"expected {len(BOOKS)} books of the Bible, read {len(names)}")
    for (book, chapter), verses in chapters.items():
        text = f"# {book} {chapter}\n\n" + "\n".join(verse for _, verse in verses)
        rng = random.Random(f"{book} {chapter}")
        pairs = []
        for index in sorted(rng.sample(range(len(verses)), min(3, len(verses)))):
            number, verse = verses[index]
            question = rng.choice(["What does {} say?", "Read me {}.", "Quote {}."])
            pairs.append((question.format(f"{book} {chapter}:{number}"), verse))
        yield Document("bible", book, text, pairs)


WORD_CLASS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def wordnet_documents(root: Path, limit: int) -> Iterator[Document]:
    """Question-and-answer pairs from glosses, one document per synset; sense-tagged synsets are taken first."""
    tagged = {line.split("%")[0] for line in (root / "cntlist.rev").read_text("latin-1").splitlines()}
    synsets: dict[tuple[str, str], tuple[str, list[str], str | None, str]] = {}
    for name in ("noun", "verb", "adj", "adv"):
        for line in (root / f"data.{name}").read_text("latin-1").splitlines():
            if line.startswith("  "):
                continue
            head, _, gloss = line.partition(" | ")
            parts = head.split()
            count = int(parts[3], 16)
            words = [re.sub(r"\(.*\)", "", parts[4 + 2 * i]).replace("_", " ") for i in range(count)]
            pointers = parts[5 + 2 * count :]
            kinds = {pointers[4 * i]: pointers[4 * i + 1] for i in range(int(parts[4 + 2 * count]))}
            if "@i" not in kinds:  # instances are people and places: names, not words
                synsets[parts[2].replace("s", "a"), parts[0]] = (parts[2], words, kinds.get("@"), gloss.strip())
    usable = []
    for key, (_, words, _, gloss) in synsets.items():
        plain = all(re.fullmatch(r"[a-z][a-z' -]+", word) for word in words)
        if plain and not re.match(r"(the |a |type )?(genus|family|order|class)\b", gloss) and not gloss.startswith("("):
            usable.append((words[0].replace(" ", "_") not in tagged, random.Random(gloss).random(), key))
    for _, _, key in sorted(usable)[:limit]:
        kind, words, above, gloss = synsets[key]
        pairs = list(_synset_pairs(kind, words, synsets.get((key[0], above or "")), gloss))
        if pairs:
            yield Document("wordnet", "/".join(key), "", pairs)


def _synset_pairs(
    kind: str, words: list[str], above: tuple[str, list[str], str | None, str] | None, gloss: str
) -> Iterator[tuple[str, str]]:
    rng = random.Random(gloss)
    meaning, *examples = re.split(r';\s*"', gloss)
    meaning = re.sub(r"\s*\([^)]*$", "", meaning.strip(' ";:'))
    if not 10 <= len(meaning) <= 250:
        return
    word = words[0]
    answer = f"{word[0].upper()}{word[1:]} is {'an' if kind in 'asr' else 'a'} {WORD_CLASS[kind]}. It means {meaning}."
    if above is not None and kind == "n":
        answer += f" It is a kind of {above[1][0]}."
    if examples and len(example := examples[0].split('"')[0].strip(' ";')) > 12:
        answer += f' For example, "{example}".'
    question = rng.choice(["What does {} mean?", "Define {}.", "What is the meaning of {}?", "What is {}?"])
    yield question.format(f"the word {word}" if rng.random() < 0.2 else word), answer
    if len(words) > 1 and rng.random() < 0.3:
        yield f"What is another word for {word}?", f"Another word for {word} is {words[1]}."
