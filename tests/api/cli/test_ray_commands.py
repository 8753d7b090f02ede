"""`windlass ray`: error without Ray, and values of options. Deployments are in tests/e2e/test_ray.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from windlass.engine.errors import LoadError
from windlass.server.config.server_options import ClusterOptions, ReplicaOptions


def test_without_ray_the_error_has_the_installation() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; sys.modules['ray.serve'] = None\n"
        "from windlass.server.cli.main import run\n"
        "sys.exit(run(['ray', 'deploy', 'demo']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert done.stderr.startswith("error: windlass ray needs Ray: run pip install -c constraints.txt -e '.[ray]'")


@pytest.mark.parametrize(
    ("given", "found"), [("1", (1, 1)), ("2..8", (2, 8)), (" 3 ", (3, 3)), ("4..4", (4, 4)), ("1..1024", (1, 1024))]
)
def test_numbers_of_replicas(given: str, found: tuple[int, int]) -> None:
    assert ClusterOptions(replicas=given).replica_bounds() == found


@pytest.mark.parametrize("given", ["", "0", "0..2", "3..2", "2...8", "-1", "many", "1..2000", "99999999999"])
def test_invalid_numbers_of_replicas(given: str) -> None:
    with pytest.raises(LoadError, match=r"`replicas` must be a number between 1 and 1024, or two such as 2\.\.8"):
        ClusterOptions(replicas=given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "a/b"}, "`name` must be letters"),
        ({"listener": "nobody"}, "`listener` must be ingress or proxy"),
        ({"target_requests": 0}, "`target_requests` must be a whole number of at least 1"),
        ({"scale_up_seconds": -1.0}, "`scale_up_seconds` must be 0 or more"),
        ({"scale_down_seconds": float("nan")}, "`scale_down_seconds` must be 0 or more"),
    ],
)
def test_invalid_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        ClusterOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match="`replicas` must be a whole number between 1 and 1024"):
        ReplicaOptions(replicas=0)
