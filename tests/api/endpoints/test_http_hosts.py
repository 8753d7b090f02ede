"""Hosts and origins: DNS rebinding, pages of other origins, and the names by which deployments reach a server."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from helpers.live_server import live_server
from helpers.raw_client import connect, until_closed
from helpers.served import Served
from helpers.toy_tokenizers import byte_level

from windlass.clients import Client
from windlass.engine.errors import LoadError
from windlass.server.app.middleware import binding_of, is_loopback_host
from windlass.server.cli import main as cli
from windlass.server.config.server_options import ServerOptions
from windlass.server.config.settings import ServerSettings

ROOT = Path(__file__).parents[3]
EVIL = "evil.example:8000"
BODY = {"prompt": "a", "max_tokens": 1}


def settings_of(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    """The settings of `windlass serve` that the checks use, in this environment and with these arguments."""
    found: list[ServerOptions] = []

    def serve(model: object, engine: object, server: ServerOptions, *others: object) -> int:
        found.append(server)
        return 0

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("windlass.server.startup.launch.serve", serve)
    assert cli.run(["serve", *arguments]) == 0
    settings = found[0].to_settings("toy")
    with closing(socket.socket()) as unused:  # bound, but not listening
        unused.bind((found[0].host, 0))
        binding = binding_of(unused)
    return {
        "binding": binding,
        **{name: getattr(settings, name) for name in ("allowed_hosts", "api_keys", "cors_origins")},
    }


def ask(url: str, host: str, origin: str | None = None, **headers: str) -> httpx.Response:
    """Send a completion as a program, or as a page of this origin."""
    if origin is not None:
        headers["origin"] = origin
    return httpx.post(f"{url}/v1/completions", json=BODY, headers={"host": host, **headers}, timeout=30)


def check_refused(response: httpx.Response, status: int, *fragments: str) -> None:
    """421 is for hosts (RFC 9110, 15.5.20), 403 for origins."""
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, {421: "host", 403: "origin"}[status])
    assert error["code"] == {421: "host_not_allowed", 403: "origin_not_allowed"}[status]
    assert response.headers["x-request-id"]
    assert all(fragment in error["message"] for fragment in fragments), error["message"]


# ---- a loopback address -----------------------------------------------------------------------------------------------
def test_a_server_without_keys_on_a_loopback_address_answers_to_loopback_names_only() -> None:
    with live_server(binding="loopback") as live:
        for host in ("localhost", "LocalHost:8000", "localhost.:8000", "my.localhost", "127.0.0.1:8000", "127.9.9.9"):
            assert ask(live.url, host).status_code == 200, host
        for host in ("[::1]:8000", "[0:0::1]", "[::ffff:127.0.0.1]:1", "localhost:"):
            assert ask(live.url, host).status_code == 200, host
        for host in (EVIL, "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"):
            check_refused(ask(live.url, host, origin=f"http://{host}"), 421, repr(host), "--allowed-hosts")
        for host in ("0.0.0.0:8000", "127.0.0.1@evil.example", "[::1", "x.localhost/", "[localhost]", "", "a b"):
            check_refused(ask(live.url, host), 421, "--allowed-hosts")
        assert len(live.engine.requests) == 10


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "path", ["/", "/health", "/metrics", "/v1/models", "/openapi.json", "/ui/main.js", "/docs", "/nope"]
)
def test_every_path_is_checked(path: str) -> None:
    with live_server(binding="loopback") as live:
        check_refused(httpx.get(live.url + path, headers={"host": EVIL}), 421, EVIL)
        assert httpx.get(live.url + path).status_code == (404 if path == "/nope" else 200)


def test_a_preflight_for_a_foreign_host_is_refused() -> None:
    with live_server(binding="loopback", cors_origins=("http://evil.example",)) as live:
        headers = {"host": EVIL, "origin": "http://evil.example", "access-control-request-method": "POST"}
        check_refused(httpx.options(f"{live.url}/v1/completions", headers=headers), 421, EVIL)


def test_the_host_of_another_header_is_ignored() -> None:
    """A rebound page may set these itself."""
    with live_server(binding="loopback") as live:
        for name in ("x-forwarded-host", "forwarded", "x-host", "x-original-host"):
            check_refused(ask(live.url, EVIL, **{name: "localhost"}), 421, EVIL)


def test_a_request_of_http_1_0_needs_no_host() -> None:
    with live_server(binding="loopback") as live, connect(live.url) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


def test_a_long_host_is_quoted_in_part() -> None:
    with live_server(binding="loopback") as live:
        message = ask(live.url, "x" * 5000).json()["error"]["message"]
        assert len(message) < 700


def test_errors_have_the_form_of_their_api() -> None:
    with live_server(binding="loopback") as live:
        answer = httpx.post(f"{live.url}/v1/messages", json={}, headers={"host": EVIL})
        assert answer.status_code == 421 and answer.json()["error"]["code"] == "host_not_allowed"
        responses = httpx.get(f"{live.url}/openapi.json").json()["paths"]["/v1/completions"]["post"]["responses"]
        assert "421" in responses and "403" not in responses


def test_a_key_permits_any_host() -> None:
    with live_server(binding="loopback", api_keys=("secret",)) as live:
        assert ask(live.url, EVIL, authorization="Bearer secret").status_code == 200
        assert ask(live.url, EVIL).status_code == 401


def test_allowed_hosts() -> None:
    hosts = ("windlass.example", "*.dev.example", "10.0.0.7")
    with live_server(binding="loopback", allowed_hosts=hosts) as live:
        for host in (
            "windlass.example",
            "WINDLASS.example:443",
            "a.dev.example",
            "a.b.dev.example",
            "10.0.0.7:80",
            "localhost",
        ):
            assert ask(live.url, host).status_code == 200, host
        for host in ("x.windlass.example", "dev.example", "xdev.example", "10.0.0.8", EVIL):
            check_refused(ask(live.url, host), 421, host)
    with live_server(binding="loopback", allowed_hosts=("*",)) as live:
        assert ask(live.url, EVIL).status_code == ask(live.url, "10.0.0.8").status_code == 200


def test_the_page_and_the_client_work_on_a_loopback_address() -> None:
    with live_server(binding="loopback") as live, Client(live.url, api_key="") as client:
        assert client.completions("a", max_tokens=1).choices
        page = httpx.get(f"{live.url}/", headers={"accept": "text/html"})
        for script in ["/ui/main.js", *re.findall(r'(?:src|href)="([^":]+)"', page.text)]:
            assert httpx.get(httpx.URL(live.url).join(script)).status_code == 200
        port = httpx.URL(live.url).port
        for host in ("127.0.0.1", "localhost"):
            assert ask(live.url, f"{host}:{port}", origin=f"http://{host}:{port}").status_code == 200


# ---- a network ----------------------------------------------------------------------------------------------------------
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("nas:8000", "http://nas:8000"),
        ("NAS:8000", "http://nas:8000"),
        ("windlass.example", "https://windlass.example"),
        ("windlass.example:443", "https://windlass.example"),
        ("[fd00::1]:8000", "http://[fd00::1]:8000"),
        ("192.168.1.20", "http://192.168.1.20"),
    ],
)
def test_a_page_of_the_server_itself_is_answered(host: str, origin: str) -> None:
    with live_server(binding="network") as live:
        assert ask(live.url, host, origin).status_code == 200
        assert ask(live.url, host).status_code == 200


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://nas",
        "http://nas:9000",
        "https://nas:80000",
        "null",
        "",
        "http://",
        "http://x.nas:8000",
    ],
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    with live_server(binding="network") as live:
        check_refused(
            ask(live.url, "nas:8000", origin), 403, repr(origin), "nas:8000", "--cors-origin", "--allowed-hosts"
        )
        get = httpx.get(f"{live.url}/v1/models", headers={"host": "nas:8000", "origin": origin})
        check_refused(get, 403)
        assert not live.engine.requests
        responses = httpx.get(f"{live.url}/openapi.json").json()["paths"]["/v1/completions"]["post"]["responses"]
        assert "403" in responses and "421" not in responses


def test_origins_that_cors_permits() -> None:
    for origins in (("http://page.example",), ("*",)):
        with live_server(binding="network", cors_origins=origins) as live:
            answer = ask(live.url, "nas:8000", "http://page.example")
            assert answer.status_code == 200 and "access-control-allow-origin" in answer.headers
            assert ask(live.url, "nas:8000", "http://other.example").status_code == (200 if "*" in origins else 403)


def test_a_proxy_that_changes_the_host() -> None:
    """The browser has compared page and server, or the operator names the server."""
    with live_server(binding="network") as live:
        assert ask(live.url, "upstream", "https://site.example", **{"sec-fetch-site": "same-origin"}).status_code == 200
        check_refused(ask(live.url, "upstream", "https://site.example", **{"sec-fetch-site": "same-site"}), 403)
    with live_server(binding="network", allowed_hosts=("site.example", "upstream")) as live:
        assert ask(live.url, "upstream", "https://site.example:8443").status_code == 200
        check_refused(ask(live.url, "upstream", "https://other.example"), 403, "other.example")


def test_allowed_hosts_on_a_network_permit_addresses() -> None:
    """A name can be rebound, an address cannot; the probes of Kubernetes use addresses."""
    for keys in ((), ("secret",)):
        with live_server(binding="network", allowed_hosts=("site.example",), api_keys=keys) as live:
            for host in ("site.example", "10.244.0.7:8000", "[fd00::1]:8000", "localhost:8000"):
                assert httpx.get(f"{live.url}/ready", headers={"host": host}).status_code == 200
            check_refused(httpx.get(f"{live.url}/ready", headers={"host": EVIL}), 421, EVIL)


def test_a_key_permits_any_origin() -> None:
    with live_server(binding="network", api_keys=("secret",)) as live:
        assert ask(live.url, EVIL, "http://page.example", authorization="Bearer secret").status_code == 200


# ---- deployments --------------------------------------------------------------------------------------------------------
IMAGE = dict(
    pair.split("=", 1)
    for pair in re.findall(r"\bWINDLASS_(?:HOST|PORT)=\S+", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
)
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


def check_reached(settings: dict[str, Any], *hosts: str, key: str | None = None) -> None:
    """Programs and the server's own page reach it by these hosts, and the health checks do."""
    keyed = {} if key is None else {"authorization": f"Bearer {key}"}
    with live_server(**settings) as live:
        for host in hosts:
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/"):
                assert httpx.get(live.url + path, headers={"host": host, **keyed}).status_code == 200, (host, path)
            assert ask(live.url, host, **keyed).status_code == 200, host
            assert ask(live.url, host, f"http://{host}", **keyed).status_code == 200, host
        if key is None:
            check_refused(ask(live.url, hosts[0], "http://evil.example"), 403, "evil.example")


def test_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert IMAGE == {"WINDLASS_HOST": "0.0.0.0", "WINDLASS_PORT": "8000"}
    ((published,),) = [COMPOSE["services"]["windlass"]["ports"]]
    address, port, _ = published.replace("${WINDLASS_PORT:-8000}", "8000").split(":")
    (load_test,) = [word for word in COMPOSE["services"]["loadtest"]["command"] if word.startswith("--url=")]
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    settings = settings_of(monkeypatch, IMAGE)
    assert settings["binding"] == "network"
    check_reached(settings, f"{address}:{port}", f"localhost:{port}", load_test.removeprefix("--url=http://"), target)


@pytest.mark.parametrize("keyed", [False, True])
def test_kubernetes(monkeypatch: pytest.MonkeyPatch, keyed: bool) -> None:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/server.yaml").read_text(encoding="utf-8"))
    found = {document["kind"]: document for document in documents}
    key = found["Secret"]["stringData"]["api-key"] if keyed else None
    environment = {**IMAGE, **found["ConfigMap"]["data"], **({"WINDLASS_API_KEY": key} if keyed else {})}
    name, port = found["Service"]["metadata"]["name"], found["Service"]["spec"]["ports"][0]["port"]
    services = [f"{name}:{port}", f"{name}.default:{port}", f"{name}.default.svc.cluster.local:{port}"]
    probes = [f"10.244.0.7:{port}", f"[fd00:10:244::7]:{port}"]
    settings = settings_of(monkeypatch, environment)
    check_reached(settings, *services, *probes, key=key)
    check_reached(
        {**settings, "allowed_hosts": (name, f"*.{name}.default.svc.cluster.local")}, services[0], *probes, key=key
    )


def test_names_of_a_local_network(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(monkeypatch, {}, "--host", "0.0.0.0")
    check_reached(
        settings, "workstation:8000", "workstation.local:8000", "192.168.1.20:8000", "workstation.fritz.box:8000"
    )


def test_a_reverse_proxy_on_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """deploy/nginx/windlass.conf sends the name of the site as the host, without its port."""
    config = (ROOT / "deploy/nginx/windlass.conf").read_text(encoding="utf-8")
    assert "proxy_set_header Host $host;" in config and "server 127.0.0.1:8000 " in config
    (site,) = re.findall(r"server_name (\S+);", config)
    with live_server(**settings_of(monkeypatch, {})) as live:
        check_refused(ask(live.url, site, f"https://{site}"), 421, f"--allowed-hosts {site}")
    with live_server(**settings_of(monkeypatch, {}, "--allowed-hosts", f"other.example,{site}")) as live:
        assert ask(live.url, site, f"https://{site}:8443").status_code == 200
        assert ask(live.url, "127.0.0.1:8000").status_code == 200
        check_refused(ask(live.url, EVIL), 421, EVIL)


def test_a_serve_configuration_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's proxies listen where the cluster is configured to; `windlass ray deploy` sets the address itself."""
    pytest.importorskip("ray", reason="Ray is an extra: pip install -e '.[ray]'")
    from windlass.server.startup.ray import application

    found: list[ServerOptions] = []
    monkeypatch.setattr(application, "application", lambda model, engine, server, *others: found.append(server))
    (document,) = yaml.safe_load_all((ROOT / "deploy/kubernetes/rayservice.yaml").read_text(encoding="utf-8"))
    (args,) = [each["args"] for each in yaml.safe_load(document["spec"]["serveConfigV2"])["applications"]]
    application.build(args)
    application.build({**args, "host": "127.0.0.1"})
    assert [is_loopback_host(server.host) for server in found] == [False, True]
    name = f"{document['metadata']['name']}-serve-svc"
    check_reached({"binding": "network"}, f"{name}:8000", f"{name}.default.svc.cluster.local:8000", "10.244.0.7:8000")


def test_a_server_process_knows_its_address(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with Served(tmp_path, "--host", "localhost", "--allowed-hosts", "site.example") as served:
        url = served.url
        served.wait_ready()
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        assert httpx.get(f"{url}/health", headers={"host": "site.example"}, timeout=30).status_code == 200
        check_refused(httpx.get(f"{url}/health", headers={"host": EVIL}, timeout=30), 421, EVIL)


# ---- the option -------------------------------------------------------------------------------------------------------
def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings_of(monkeypatch, {"WINDLASS_ALLOWED_HOSTS": "A.example, *.B.example,[::1],10.0.0.7,my_service,c."})
    assert given["allowed_hosts"] == ("a.example", "*.b.example", "::1", "10.0.0.7", "my_service", "c")
    assert ServerOptions(allowed_hosts=[""]).to_settings("toy").allowed_hosts == ()
    for wrong in ("http://a.example", "a.example:8000", "a.*.example", "a/b", ".a.example", "a b"):
        with pytest.raises(LoadError, match="`allowed_hosts` must be names") as error:
            ServerOptions(allowed_hosts=[wrong]).to_settings("toy")
        assert repr(wrong) in str(error.value)


def test_which_requests_are_checked() -> None:
    for binding, keys, hosts, checked in (
        ("loopback", (), (), (True, False)),
        ("loopback", ("k",), (), (False, False)),
        ("loopback", ("k",), ("a",), (True, False)),
        ("network", (), (), (False, True)),
        ("network", (), ("a",), (True, True)),
        ("network", ("k",), (), (False, False)),
        (None, (), (), (False, False)),  # in a process of its own program
    ):
        settings = ServerSettings(served_model_name="m", binding=binding, api_keys=keys, allowed_hosts=hosts)  # type: ignore[arg-type]
        assert (settings.checks_hosts, settings.checks_origins) == checked


def test_a_unix_socket_checks_origins(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert binding_of(listener) == "network"
