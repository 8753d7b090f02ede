"""Manifests for Kubernetes and KubeRay: schemas, options, metrics and resources. No pod is started."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from windlass.engine.interface.outputs import EngineStats
from windlass.server.cli import main as cli
from windlass.server.observability.metrics import _GAUGES

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
VERSION = "1.31.0"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


PLAIN = [(file.name, one) for file in FILES for one in documents(file.name) if one["kind"] != "RayService"]
(RAY_SERVICE,) = documents("rayservice.yaml")
RAY_CLUSTER = RAY_SERVICE["spec"]["rayClusterConfig"]


def validate(document: dict[str, Any]) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="needs the extra e2e: pip install -e '.[e2e]'")
    checker.validate(document, VERSION, strict=True)


@pytest.mark.parametrize(("name", "document"), PLAIN, ids=[f"{name}-{one['kind']}" for name, one in PLAIN])
def test_manifest_fits_its_schema(name: str, document: dict[str, Any]) -> None:
    validate(document)


def test_wrong_manifest_does_not_fit() -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="needs the extra e2e: pip install -e '.[e2e]'")
    (scaler,) = documents("autoscaling.yaml")
    scaler["spec"]["maxReplica"] = 8
    with pytest.raises(checker.ValidationError):
        validate(scaler)


def pod_templates() -> list[dict[str, Any]]:
    groups = [RAY_CLUSTER["headGroupSpec"], *RAY_CLUSTER["workerGroupSpecs"]]
    return [group["template"] for group in groups]


@pytest.mark.parametrize("number", range(2))
def test_pods_of_a_ray_cluster_fit_their_schema(number: int) -> None:
    template = pod_templates()[number]
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], "name": "x"}}
    validate(pod)


def test_variables_are_options() -> None:
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    known = {parameter.envvar for parameter in command.params}
    server = {one["kind"]: one for one in documents("server.yaml")}
    (container,) = server["Deployment"]["spec"]["template"]["spec"]["containers"]
    named = {*server["ConfigMap"]["data"], *(variable["name"] for variable in container["env"])}
    assert named <= known
    grace = float(server["ConfigMap"]["data"]["WINDLASS_GRACE_PERIOD"])
    assert server["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= grace + 5
    labels = server["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert server["Service"]["spec"]["selector"].items() <= labels.items()


def test_pods_are_scaled_by_existing_metrics() -> None:
    (scaler,) = documents("autoscaling.yaml")
    (adapter,) = documents("prometheus-adapter.yaml")
    (rule,) = yaml.safe_load(adapter["data"]["config.yaml"])["rules"]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    used = set(re.findall(r"windlass_(\w+){", rule["metricsQuery"] + rule["seriesQuery"]))
    assert used == {"num_requests_running", "num_requests_waiting"} and used <= set(_GAUGES)
    assert all(hasattr(EngineStats(), _GAUGES[name][0]) for name in used)
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in {(one["kind"], one["metadata"]["name"]) for _, one in PLAIN}


def test_ray_service_has_resources_for_its_replicas() -> None:
    config = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    (workers,) = RAY_CLUSTER["workerGroupSpecs"]
    args = application["args"]
    assert args["replicas"] == f"{workers['minReplicas']}..{workers['maxReplicas']}"
    assert str(args["threads"]) == workers["rayStartParams"]["num-cpus"]
    images = {container["image"] for template in pod_templates() for container in template["spec"]["containers"]}
    assert len(images) == 1  # one version of Windlass


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install -e '.[ray]'")
def test_ray_accepts_the_configuration() -> None:
    code = (
        "import sys, yaml, importlib\n"
        "from ray.serve.schema import ServeDeploySchema\n"
        "config = yaml.safe_load(sys.stdin.read())\n"
        "(one,) = ServeDeploySchema.model_validate(config).applications\n"
        "module, name = one.import_path.split(':')\n"
        "build = getattr(importlib.import_module(module), name)\n"
        "objects = {'override_generation_config': {'top_k': 9}, 'rope_profile': {'long': {'rope_type': 'yarn', 'factor': 2}}}\n"
        "print(type(build(one.args | objects)).__name__)\n"
        "from windlass.engine.errors import LoadError\n"
        "for wrong in ({'replica': 2}, {'replicas': '8..2'}, {'uds': '/x'}, {'listener': 'ingress'}, {'dtype': 'float3'},\n"
        "              {'override_generation_config': {'top_p': 3}}):\n"
        "    try: build(wrong)\n"
        "    except LoadError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input=RAY_SERVICE["spec"]["serveConfigV2"], capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "Application", done.stderr
    assert "no option 'replica' (did you mean 'replicas'?)" in lines[1]
    names = [line.split()[0].rstrip(":") for line in lines[2:]]  # as the configuration spells them
    assert names == ["replicas", "uds", "listener", "dtype", "override_generation_config"]
