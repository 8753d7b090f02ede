"""docker-compose.yml beyond its schema. No container is started."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from e2e_helpers.prometheus import CONFIG, ROOT
from typer.main import get_command

from windlass.server.cli import main as cli

STACK = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
SERVERS = ("windlass", "windlass-cuda")


def test_plain_up_starts_the_cpu_server_alone():
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {"windlass"}
    assert {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service} == {
        "windlass-cuda": ["cuda"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
        "loadtest": ["loadtest"],
    }


def test_both_servers_differ_in_image_and_gpu_only():
    cpu, cuda = (dict(SERVICES[name]) for name in SERVERS)
    differing = {key for key in cpu | cuda if cpu.get(key) != cuda.get(key)}
    assert differing == {"profiles", "build", "image", "deploy", "networks"}
    assert cuda["build"]["args"] == {"DEVICE": "cuda"}
    (device,) = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    # Prometheus and the load test use this name.
    assert cuda["networks"]["default"]["aliases"] == ["windlass"]


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_bound_to_the_loopback_address(name):
    for port in SERVICES[name].get("ports", []):
        assert port.startswith("127.0.0.1:"), port


@pytest.mark.parametrize("name", SERVICES)
def test_external_images_have_a_full_version(name):
    service = SERVICES[name]
    if "build" in service:
        assert service["image"].split(":")[0] == "windlass"
    else:
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])


def test_base_image_names_python_and_debian():
    bases = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(bases) == {"python:3.11-slim-bookworm"}


@pytest.mark.parametrize("name", SERVICES)
def test_files_are_mounted_read_only_and_volumes_are_declared(name):
    for volume in SERVICES[name].get("volumes", []):
        source, _target, *mode = volume.split(":")
        if source.startswith("."):
            assert (ROOT / source).exists() and mode == ["ro"], volume
        else:
            assert source in STACK["volumes"] and not mode, volume


def test_services_wait_for_healthy_ones():
    waiting = {
        name: {other: how["condition"] for other, how in service["depends_on"].items()}
        for name, service in SERVICES.items()
        if "depends_on" in service
    }
    assert waiting == {
        "grafana": {"prometheus": "service_healthy"},
        "loadtest": {"windlass": "service_healthy"},
    }
    # The servers have that of their image, which is of no use for a load test.
    assert "\nHEALTHCHECK " in (ROOT / "Dockerfile").read_text()
    assert not any("healthcheck" in SERVICES[name] for name in SERVERS)
    assert SERVICES["loadtest"]["healthcheck"] == {"disable": True}
    assert all("test" in SERVICES[name]["healthcheck"] for name in ("prometheus", "grafana"))


@pytest.mark.parametrize("name", SERVERS)
def test_options_of_the_server_are_variables_of_the_env_file(name):
    """Other variables of that file do not change where the server listens, and it does not learn Grafana's password."""
    assert SERVICES[name]["env_file"] == [{"path": ".env", "required": False}]
    passed = SERVICES[name]["environment"]
    assert passed == [
        *("WINDLASS_MODEL", "WINDLASS_API_KEY", "HF_TOKEN"),
        *("WINDLASS_HOST=0.0.0.0", "WINDLASS_PORT=8000"),
        "GRAFANA_ADMIN_PASSWORD=",
    ]
    options = {parameter.envvar for parameter in get_command(cli.app).commands["serve"].params}  # type: ignore[attr-defined]
    assert {variable.split("=")[0] for variable in passed} - {"HF_TOKEN", "GRAFANA_ADMIN_PASSWORD"} < options
    assert SERVICES[name]["ports"] == ["127.0.0.1:${WINDLASS_PORT:-8000}:8000"]


def test_prometheus_reads_the_key_from_a_file_that_is_never_empty():
    """Compose writes no file for empty content, and Prometheus scrapes nothing without it."""
    config = yaml.safe_load(CONFIG.read_text())
    (job,) = config["scrape_configs"]
    assert SERVICES["prometheus"]["configs"] == ["server-key"]  # mounted as /server-key
    assert job["authorization"] == {"type": "Bearer", "credentials_file": "/server-key"}
    key = "${WINDLASS_CLIENT_KEY:-${WINDLASS_API_KEY:-}}"
    assert STACK["configs"]["server-key"] == {"content": f"{key}\n"}
    assert SERVICES["loadtest"]["environment"] == {"WINDLASS_API_KEY": key}


def test_prometheus_reads_its_configuration_from_its_mount():
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    assert "./deploy/prometheus:/etc/prometheus:ro" in SERVICES["prometheus"]["volumes"]
    (job,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["windlass:8000"]}]


def test_grafana_queries_prometheus_at_its_scrape_interval():
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == yaml.safe_load(CONFIG.read_text())["global"]["scrape_interval"]
    assert {volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"] if volume.startswith(".")} == {
        "/etc/grafana/grafana.ini",
        "/etc/grafana/provisioning",
        "/etc/grafana/dashboards",
    }


def test_load_test_writes_to_a_writable_folder():
    service = SERVICES["loadtest"]
    assert service["volumes"] == ["reports:/reports"]
    options = dict(word.split("=", 1) for word in service["command"][2:])
    assert options["--json"].startswith("/reports/") and options["--html"].startswith("/reports/")
    owned = re.search(
        r"install --directory --owner windlass --group windlass (.+)$", (ROOT / "Dockerfile").read_text(), re.M
    )
    assert "/reports" in owned[1].split()
    assert "restart" not in service


def test_load_test_is_a_command_of_the_image():
    bench = get_command(cli.app).commands["bench"]  # type: ignore[attr-defined]
    command = SERVICES["loadtest"]["command"]
    assert command[:2] == ["bench", "serve"]
    known = {name for parameter in bench.commands["serve"].params for name in parameter.opts}
    assert {word.split("=")[0] for word in command[2:]} <= known
