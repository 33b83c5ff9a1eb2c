"""Beyond loopback, a real page answers over TLS only, and only those who show its token and name its host."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import psutil
import pytest

from sparring.pipeline.security import client_tls, making, token
from sparring.services.process.hosting import SPARRING
from tests.page.page_runs import interval, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def own_address() -> str:
    """An address of this machine that others may reach; loopback where it has none."""
    found = [
        one.address for several in psutil.net_if_addrs().values() for one in several if one.family.name == "AF_INET"
    ]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """The address of a page that listens everywhere, its token, and its folder of keys."""
    write_run(tmp_path / "results" / "run", [interval(100)])
    keys = tmp_path / "keys"
    making.make(keys, ["simulator-0"], [own_address(), "trainer.test"])
    words = ["page", str(tmp_path / "results"), "--address", "0.0.0.0:0", "--keys", str(keys), "--host", "trainer.test"]
    with subprocess.Popen([*SPARRING, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = urlsplit(process.stdout.readline().split()[1])
            assert (printed.scheme, printed.hostname) == ("https", "trainer.test")
            yield f"https://{own_address()}:{printed.port}", parse_qs(printed.query)["token"][0], keys
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_page_beyond_loopback_answers_over_tls_those_who_know_its_token(page: tuple[str, str, Path]) -> None:
    address, secret, keys = page
    with httpx.Client(base_url=address, verify=client_tls(keys), timeout=30) as client:
        for path in ("/", "/api/run?run=run", "/api/events", "/assets/page.js", "/?token=wrong"):
            assert client.get(path).status_code == 401, path
        for wrong in ("x", token(keys)):
            assert client.get("/api/run?run=run", headers={"Authorization": f"Bearer {wrong}"}).status_code == 401
        for host in ("evil.example", "trainer.test.evil.example", ""):
            assert client.get(f"/?token={secret}", headers={"Host": host}).status_code == 421, host
        assert client.get(f"/?token={secret}").status_code == 303
        assert client.get("/api/run?run=run").json()["columns"].keys() == {"Walk"}
        assert client.get("/", headers={"Host": "trainer.test"}).status_code == 200
        with client.stream("GET", "/api/events?run=run") as answer:
            assert next(line for line in answer.iter_lines() if line) == "event: runs"
    with pytest.raises(httpx.HTTPError):
        httpx.get(address.replace("https", "http"), timeout=30)
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(address, timeout=30)
