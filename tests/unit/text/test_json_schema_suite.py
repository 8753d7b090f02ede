"""JSON-Schema-Test-Suite: documents sampled under a strict schema are valid, or the schema is refused with a reason.

The suite is part of the source archive of the `jsonschema` package, which pip downloads if an index is available.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing.exceptions
from unit_helpers.grammar_draws import demo_compiler, drawn

from windlass.engine.errors import RequestError

DRAFTS = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "jsonschema==4.26.0"]
    command += ["--retries=1", "--timeout=15", "-d", str(folder)]
    try:
        fetched = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the suite was not downloaded within 120 s")
    archives = list(folder.glob("*.tar.gz"))
    if fetched.returncode or not archives:
        pytest.skip(f"the suite cannot be downloaded: {fetched.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/json/tests"))


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_sampled_documents_are_valid_or_the_schema_is_refused(suite: Path, draft: str) -> None:
    seen: Counter[str] = Counter()
    wrong = []
    for file in sorted((suite / draft).rglob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema: Any = group["schema"]
            try:
                grammar = demo_compiler().compile("strict_json_schema", json.dumps(schema))
            except RequestError as error:
                assert len(error.message) > 30, (file.name, group["description"])
                seen["refused"] += 1
                continue
            for seed in range(4):
                text = drawn(grammar, seed)
                if text is None:
                    seen["not ended"] += 1
                    continue
                seen["written"] += 1
                try:
                    fits = DRAFTS[draft](schema).is_valid(json.loads(text))
                except (jsonschema.exceptions.SchemaError, re.error, referencing.exceptions.Unresolvable):
                    seen["not checked"] += 1  # the validator cannot read this schema, a \\p{Letter} for one
                    continue
                if not fits:
                    wrong.append((file.name, group["description"], text[:120], json.dumps(schema)[:300]))
    print(draft, dict(seen))
    assert not wrong, wrong
    assert seen["written"] > 30 and seen["refused"] > 10
