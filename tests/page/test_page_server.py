"""The page answers whom it should, only reads, and shows whatever a folder holds as text or as an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import httpx
import numpy as np
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.security import client_tls, making, server_tls
from sparring.services.commands import page as command
from sparring.services.page.runs import Runs
from sparring.services.page.server import Connection, Page, page_token, server_of
from tests.page.page_runs import interval, write_run

HOSTILE = '<img src=x onerror="alert(1)">'


class Client:
    """A browser that keeps cookies."""

    def __init__(self, results: Path, token: str = "", host: str = "localhost") -> None:
        self._results = results
        self._token = token
        self._base = f"https://{host}:6100"
        self._cookies = httpx.Cookies()

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            app = Page(Runs(self._results)).app(["localhost"], self._token)

            async def arrived(scope: Any, receive: Any, send: Any) -> None:
                await app({**scope, "server": ("127.0.0.1", 6100)}, receive, send)

            transport = httpx.ASGITransport(arrived)
            async with httpx.AsyncClient(transport=transport, base_url=self._base, cookies=self._cookies) as session:
                answer = await session.request(method, path, **arguments)
                self._cookies = session.cookies
                return answer

        return anyio.run(ask)

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.request("GET", path, **arguments)


def decoded(content: bytes) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Reads what `encoded` writes: the head, axes [2, rows], values [names, 3, rows]."""
    (length,) = struct.unpack_from("<I", content)
    head = json.loads(content[4 : 4 + length])
    rows, names, begin = head["rows"], len(head["names"]), 4 + length
    assert begin % 8 == 0
    assert len(content) == begin + rows * (16 + 12 * names)
    axes = np.frombuffer(content, "<f8", 2 * rows, begin).reshape(2, rows)
    return head, axes, np.frombuffer(content, "<f4", -1, begin + 16 * rows).reshape(names, 3, rows)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write_run(tmp_path / "results" / "run", [interval(step) for step in range(100, 1000, 100)])
    return tmp_path / "results"


def test_series_are_those_of_the_file(results: Path) -> None:
    asked = {"run": "run", "behavior": "Walk", "name": ["reward", "Policy/Entropy", "unknown"]}
    head, axes, values = decoded(Client(results).get("/api/series", params=asked).content)
    assert head["names"] == ["reward", "Policy/Entropy"]
    assert axes[0].tolist() == list(range(100, 1000, 100))
    assert values[0, 0].tolist() == [step % 700 for step in range(100, 1000, 100)]
    assert set(values[1].ravel()) == {1.5}
    zoomed = asked | {"axis": "time", "begin": 1e9 + 3, "end": 1e9 + 5, "points": 2}
    assert decoded(Client(results).get("/api/series", params=zoomed).content)[1][0].tolist() == [400, 600]


def test_another_host_gets_421_and_a_stranger_401(results: Path) -> None:
    assert Client(results, host="evil.example").get("/").status_code == 421
    assert Client(results, host="127.0.0.1.evil.example").get("/api/run?run=run").status_code == 421
    guarded = Client(results, token="secret")
    assert Client(results, host="127.0.0.1").get("/").status_code == 200
    for path in ("/", "/?token=wrong", "/api/run?run=run", "/api/events", "/assets/page.js"):
        assert guarded.get(path, follow_redirects=False).status_code == 401, path
    assert guarded.get("/api/run?run=run", headers={"Authorization": "Bearer secret"}).status_code == 200
    entered = guarded.get("/?token=secret", follow_redirects=False)
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert {"HttpOnly", "Secure", "SameSite=strict"} <= set(entered.headers["set-cookie"].split("; "))
    assert guarded.get("/api/run?run=run").status_code == 200


def test_every_answer_forbids_foreign_content_and_no_route_writes(results: Path) -> None:
    page = Client(results)
    for path in ("/", "/assets/page.js", "/api/run?run=run", "/api/csv?run=run&behavior=Walk", "/none"):
        policy = page.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';"), path
        assert "unsafe" not in policy
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert page.request(method, path).status_code in (404, 405), (method, path)


@pytest.mark.parametrize("run", ["..", "../results/run", "/etc", "no", "", "run/../run", "%2e%2e"])
def test_only_listed_runs_are_read(results: Path, run: str) -> None:
    (results.parent / "status.json").write_text("{}")
    for path in ("/api/run", "/api/series", "/api/csv"):
        assert Client(results).get(path, params={"run": run, "behavior": "Walk"}).status_code == 404
    assert Client(results).get("/assets/../server.py").status_code == 404
    assert Client(results).get("/assets/%2e%2e/server.py").status_code == 404


def test_hostile_names_stay_texts(tmp_path: Path) -> None:
    write_run(tmp_path / HOSTILE.replace("/", ""), [interval(100, HOSTILE, simulators={HOSTILE: 1.0})])
    found = json.loads(Runs(tmp_path).overview()[HOSTILE])
    assert found["behaviors"][0]["name"] == HOSTILE
    described = Client(tmp_path).get("/api/run", params={"run": HOSTILE})
    assert described.headers["content-type"] == "application/json"
    assert f"simulators/{HOSTILE}" in described.json()["columns"][HOSTILE]


def test_runs_within_runs_are_listed_and_one_run_alone_is_shown(results: Path) -> None:
    write_run(results / "run" / "evaluation-1", [interval(5)])
    assert set(Runs(results).overview()) == {"run", "run/evaluation-1"}
    assert set(Runs(results / "run").overview()) == {"."}
    assert Client(results / "run").get("/api/run?run=.").json()["columns"].keys() == {"Walk"}


def test_state_of_a_run_follows_its_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [interval(100)])
    clock = [json.loads((folder / "status.json").read_text())["time_s"]]
    runs = Runs(tmp_path, lambda: clock[0])

    def state() -> str:
        return str(json.loads(runs.overview()["run"])["state"])

    assert state() == "running"
    clock[0] += 60
    assert state() == "silent"
    write_run(tmp_path / "ended", [interval(100)], is_running=False)
    assert json.loads(runs.overview()["ended"])["state"] == "ending"
    (tmp_path / "ended" / "summary.json").write_text('{"status": "completed", "behaviors": {}}')
    assert json.loads(runs.overview()["ended"])["state"] == "completed"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
FILES = (
    "status.json",
    "summary.json",
    "monitor.json",
    "coordination.json",
    "metrics.jsonl",
    "matches.jsonl",
    "logs/supervisor.jsonl",
)


def damaged(draw: st.DrawFn, content: Any) -> Any:
    """Replaces parts of a content by anything."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    if isinstance(content, dict):
        return {name: damaged(draw, value) for name, value in content.items()}
    return content


@st.composite
def folders(draw: st.DrawFn) -> dict[str, bytes]:
    """The content of each file of a run, some of it damaged."""
    histogram = {"bounds": [1.0], "counts": [3, 4], "total": 5.0}
    parts = {"past": {"histograms": {"lag/Walk": histogram}}, "latest": {"histograms": {"lag/Walk": histogram}}}
    plain = {
        "status.json": {
            "time_s": 1.0,
            "ended": False,
            "behaviors": {"Walk": {"step": 1}},
            "services": {"a": {"queues": {}}},
        },
        "summary.json": {"status": "completed", "behaviors": {"Walk": {"steps": 4}}, "error": None},
        "monitor.json": {"services": {"learning-Walk": parts}},
        "coordination.json": {"self_play": {"rules": {"sides": {"Walk": {"settings": {"elo_k": 16}}}}}},
        "metrics.jsonl": interval(100),
        "logs/supervisor.jsonl": {
            "event": "started",
            "start": 2,
            "part": "a",
            "timestamp": "2026-01-01T00:00:00+00:00",
        },
        "matches.jsonl": {"players": {"Walk?team=0": "Walk"}, "scores": {"Walk?team=0": 1.0}, "team": 0},
    }
    written = {}
    for name, content in plain.items():
        lines = [damaged(draw, content) for _ in range(3 if name.endswith("l") else 1)]
        data = b"\n".join(json.dumps(line).encode() for line in lines) + b"\n"
        if draw(st.integers(0, 5)) == 0:
            data = draw(st.binary(max_size=40)) + data[: draw(st.integers(0, 200))]
        written[name] = data
    return written


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=folders())
def test_damaged_folders_never_break_the_page(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, bytes]
) -> None:
    results = tmp_path_factory.mktemp("results")
    write_run(results / "sound", [interval(100)])
    folder = results / "damaged"
    (folder / "logs").mkdir(parents=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    listed = Runs(results).overview()
    assert json.loads(listed["sound"])["state"] == "running"
    assert isinstance(json.loads(listed["damaged"])["state"], str)
    page = Client(results)
    assert page.get("/api/league?run=damaged").status_code in (200, 422)
    described = page.get("/api/run?run=damaged")
    assert described.status_code in (200, 422)
    for behavior in described.json()["columns"] if described.status_code == 200 else ():
        for path in ("/api/series", "/api/csv"):
            assert page.get(path, params={"run": "damaged", "behavior": behavior}).status_code in (200, 422)


def test_folders_sockets_and_pipes_in_place_of_files_are_left_out(results: Path) -> None:
    folder = results / "odd"
    (folder / "logs").mkdir(parents=True)
    (folder / "status.json").write_text("{}")
    for name in ("metrics.jsonl", "logs/supervisor.jsonl", "summary.json", "monitor.json"):
        os.mkfifo(folder / name)
    assert Client(results).get("/api/run?run=odd").json()["columns"] == {}
    assert json.loads(Runs(results).overview()["odd"])["state"] == "starting"


class Loop:
    """An event loop whose time does not pass by itself."""

    def __init__(self) -> None:
        self.due: list[Any] = []

    def call_later(self, delay_s: float, call: Any, *arguments: Any) -> Mock:
        self.due.append(partial(call, *arguments))
        return Mock()

    def create_task(self, coroutine: Coroutine[Any, Any, None], **_: Any) -> Mock:
        coroutine.close()
        return Mock()


@pytest.mark.parametrize("asks", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_connection_without_a_request_ends(asks: bytes) -> None:
    loop, transport = Loop(), Mock()
    connection = Connection(uvicorn.Config(Mock(), loop="none"), ServerState(), {}, loop)  # type: ignore[arg-type]
    connection.connection_made(transport)
    if asks:
        connection.data_received(asks)
    loop.due.pop(0)()
    assert transport.abort.called != asks.endswith(b"\r\n\r\n")
    transport.is_closing.return_value = False
    connection.on_response_complete()
    loop.due.pop()()
    assert transport.abort.called


@pytest.mark.parametrize("secured", [False, True])
def test_connections_that_ask_nothing_make_room_for_those_that_do(
    results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secured: bool
) -> None:
    """There are never more than there may be, and a handshake of TLS that is not finished is one of them."""
    monkeypatch.setattr("sparring.services.page.server._MOST_CONNECTIONS", 2)
    monkeypatch.setattr("sparring.services.page.server._SILENT_S", 0.2)
    making.make(tmp_path / "keys", [], ["localhost"])
    tls = server_tls(tmp_path / "keys") if secured else None
    listener = socket.create_server(("127.0.0.1", 0))
    port, server = listener.getsockname()[1], server_of(Page(Runs(results)), ["localhost"], "", tls)
    opened = []
    connect = asyncio.BaseEventLoop.connect_accepted_socket

    async def noting(loop: Any, make: Any, accepted: socket.socket, **options: Any) -> Any:
        opened[:] = [one for one in opened if one.fileno() >= 0] + [accepted]
        assert len(opened) <= 2
        return await connect(loop, make, accepted, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "connect_accepted_socket", noting)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        with contextlib.ExitStack() as idle:
            for _ in range(7):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            verify = client_tls(tmp_path / "keys") if secured else False
            answer = httpx.get(f"http{'s' * secured}://localhost:{port}/", verify=verify, timeout=60)
        assert answer.status_code == 200
    finally:
        server.should_exit = True
        thread.join(60)


def test_list_that_takes_long_is_made_less_often(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[float]()
    runs, page = Runs(results), Page(Runs(results))
    monkeypatch.setattr("sparring.services.page.server.anyio.current_time", lambda: now[0])

    def overview() -> dict[str, bytes]:
        looks.append(now[0])
        now[0] += 0.5
        return runs.overview()

    monkeypatch.setattr(page._runs, "overview", overview)

    async def ask() -> None:
        while now[0] < 60:
            assert await page._list()
            now[0] += 1

    anyio.run(ask)
    assert looks == [0.0, 25.5, 51.0]


def test_other_addresses_than_loopback_need_keys() -> None:
    with pytest.raises(SettingsError, match=r"got address 0\.0\.0\.0.*without keys; expected keys.*sparring keys"):
        command._protection("0.0.0.0", None)
    assert command._protection("127.0.0.1", None) == ("", None)
    assert command._address("[::1]:8000") == ("::1", 8000)
    assert command._address("") == ("127.0.0.1", None)
    for text in ("localhost:x", "a@b", "host/path", "host:70000", "xn--é..:5", "a..b"):
        with pytest.raises(SettingsError, match="expected HOST:PORT"):
            command._address(text)


@pytest.mark.parametrize("address", ["foo", "127.0.0.1:99999", ":::", "0.0.0.0:1"])
def test_wrong_address_of_a_page_beside_a_run_is_refused_before_the_run(address: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="of the page"), command.page_beside(address, tmp_path, None):
        raise AssertionError("it has started")


def test_token_of_the_page_does_not_reveal_that_of_simulators() -> None:
    assert page_token("x" * 32) != page_token("y" * 32)
    assert "x" * 8 not in page_token("x" * 32)
