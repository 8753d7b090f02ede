"""The file of API keys: plain and named keys, and errors that name the place and never a key."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from windlass.engine.errors import LoadError
from windlass.server.config.api_keys import ApiKey, read_key_file

SECRET = "sk-very-secret"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    (found,) = read(tmp_path, f'\ufeff[alice]\nkey = "{SECRET}"\n')
    assert isinstance(found, ApiKey) and (found.name, found.digest) == ("alice", DIGEST)


def read(tmp_path: Path, text: str) -> tuple[ApiKey, ...] | tuple[str, ...]:
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return read_key_file(path)


def test_lines_without_a_table_are_plain_keys(tmp_path: Path) -> None:
    assert read(tmp_path, f"# ours\n  {SECRET} \n\nc2VjcmV0==\n{SECRET}\n") == (SECRET, "c2VjcmV0==")


def test_every_field(tmp_path: Path) -> None:
    text = f"""
    [alice]
    key = "{SECRET}"
    [bob]
    key_sha256 = "{"AB" * 32}"
    requests_per_minute = 60
    tokens_per_minute = 2.5e4
    concurrency = 4
    share = 0.5
    priority = -3
    admin = true
    """
    assert read(tmp_path, text) == (
        ApiKey(digest=DIGEST, name="alice", admin=False),
        ApiKey(
            digest="ab" * 32,
            name="bob",
            requests_per_minute=60.0,
            tokens_per_minute=25000.0,
            concurrency=4,
            share=0.5,
            priority=-3,
            admin=True,
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key: write one per line, or write a table such as [alice]"),
        ("# nothing\n", "has no key"),
        (f'[alice]\nkey = "{SECRET}', "): write a table such as [alice]"),
        (f'alice = "{SECRET}"', "alice: "),
        (f'# keys\nalice = {{ key = "{SECRET}", koncurrency = 3 }}', "alice.koncurrency: "),
        ("[alice]", "alice needs one of key and key_sha256"),
        (f'[alice]\nkey = "{SECRET}"\nkey_sha256 = "{DIGEST}"', "alice needs one of"),
        ('[alice]\nkey = ""', "alice.key: "),
        (f'[alice]\nkey_sha256 = "{SECRET}"', "alice.key_sha256: "),
        (f'[alice]\nkey = "{SECRET}"\nkoncurrency = 3', "alice.koncurrency: "),
        (f'[alice]\nkey = "{SECRET}"\nconcurrency = 0', "alice.concurrency: "),
        (f'[alice]\nkey = "{SECRET}"\nconcurrency = "{SECRET}"', "alice.concurrency: "),
        (f'[alice]\nkey = "{SECRET}"\ntokens_per_minute = nan', "alice.tokens_per_minute: "),
        (f'[alice]\nkey = "{SECRET}"\nrequests_per_minute = 0', "alice.requests_per_minute: "),
        (f'[alice]\nkey = "{SECRET}"\nshare = 0', "alice.share: "),
        (f'[alice]\nkey = "{SECRET}"\npriority = 4294967296', "alice.priority: "),
        (f'[alice]\nkey = "{SECRET}"\n[bob]\nkey = "{SECRET}"', "bob and alice have the same key"),
        (f'["a b"]\nkey = "{SECRET}"', "'a b' is not a name"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LoadError) as raised:
        read(tmp_path, text)
    assert message in str(raised.value) and "keys.toml" in str(raised.value)
    assert SECRET not in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot read"):
        read_key_file(tmp_path / "none.toml")
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LoadError, match="UTF-8"):
        read_key_file(path)
    path.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(LoadError, match="larger than"):
        read_key_file(path)
    path.write_text("".join(f'[c{i}]\nkey = "{i}"\n' for i in range(1001)))
    with pytest.raises(LoadError, match="names 1001 callers"):
        read_key_file(path)
