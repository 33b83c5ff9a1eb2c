"""`sparring doctor`: its findings about a machine and a configuration."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.pipeline import security as keys
from sparring.pipeline.errors import SettingsError, install_command
from sparring.pipeline.security.making import make
from sparring.pipeline.settings import parse_settings
from sparring.services.commands import doctor
from sparring.services.commands.doctor import Row
from sparring.services.main import main

GIB = 2**30
DECLARED = [
    "msgpack>=1.0.5",
    'torch>=2.4; extra == "train"',
    'onnx>=1.16; extra == "onnx"',
    'ruff>=0.6; extra == "test"',
]


def states(rows: list[Row]) -> dict[str, str]:
    return {row.what: row.state for row in rows}


def test_needed_library_must_be_installed_and_new_enough_and_others_may_be_missing() -> None:
    there = {"msgpack": "1.2.4", "torch": "2.3.9+cu121"}
    rows = list(doctor.versions(DECLARED, frozenset({"train"}), there.get))
    assert states(rows) == {"msgpack": "ok", "torch (extra train)": "bad"}
    assert (rows[1].got, rows[1].expected) == ("2.3.9+cu121", ">=2.4")
    missing = list(doctor.versions(DECLARED, frozenset({"train", "onnx"}), {"msgpack": "1.0.5", "torch": "2.4"}.get))
    assert states(missing) == {"msgpack": "ok", "torch (extra train)": "ok", "onnx (extra onnx)": "bad"}
    assert missing[2].remedy == install_command("onnx")


@pytest.mark.parametrize(
    ("lower", "higher"), [("2.9", "2.10"), ("2.4", "2.4.1"), ("1.16", "2"), ("0.19.9", "0.20+cpu"), ("3.11", "3.11.7")]
)
def test_versions_are_compared_as_numbers(lower: str, higher: str) -> None:
    assert doctor.numbers(lower) < doctor.numbers(higher)
    assert doctor.numbers("2.4.0") == doctor.numbers("2.4")


def test_port_in_use_is_named_with_its_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        row = doctor.port("pipeline.address", "127.0.0.1", number)
        assert row.state == "bad"
        if Path("/proc/net/tcp").exists():
            assert f"(pid {os.getpid()}) listens there" in row.got
    assert doctor.port("pipeline.address", "127.0.0.1", number).state == "ok"


def test_socket_needs_a_short_path_in_a_folder_without_a_listener(tmp_path: Path) -> None:
    assert doctor.socket_path("a", Path("/tmp") / ("x" * 120)).state == "bad"
    assert doctor.socket_path("a", tmp_path / "none" / "s").state == "bad"
    with socket.socket(socket.AF_UNIX) as taken:
        path = Path(os.path.relpath(tmp_path)) / "s"
        taken.bind(os.fspath(path))
        taken.listen()
        assert doctor.socket_path("a", path).state == "bad"
    assert doctor.socket_path("a", path).state == "ok"  # a socket file that no process uses


def test_cores_memory_descriptors_and_disk_space_are_compared_with_the_needs_of_a_run() -> None:
    assert [doctor.cores(8, 4, quota).state for quota in (None, 4.0, 2.5)] == ["ok", "ok", "warn"]
    assert [doctor.memory(4 * GIB, limit, 2 * GIB).state for limit in (None, 3 * GIB, GIB)] == ["ok", "ok", "warn"]
    assert doctor.memory(None, None, GIB).state == "warn"
    assert [doctor.descriptors(limit, 300).state for limit in (300, 256)] == ["ok", "bad"]
    found = [doctor.free_space("r", free, writable=True, enough=2 * GIB, least=GIB).state for free in (2 * GIB, GIB, 0)]
    assert found == ["ok", "warn", "bad"]
    assert doctor.free_space("r", 9 * GIB, writable=False, enough=1, least=1).state == "bad"


def test_limits_of_a_control_group_are_read(tmp_path: Path) -> None:
    assert doctor.quota_of(tmp_path) == (None, None)
    for name, text in {"cpu.max": "150000 100000\n", "memory.max": "1000\n", "memory.current": "400\n"}.items():
        (tmp_path / name).write_text(text)
    assert doctor.quota_of(tmp_path) == (1.5, 600)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.quota_of(tmp_path) == (None, None)


def test_keys_that_others_can_read_are_bad_with_a_remedy_each(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert [row.state for row in doctor.private(folder)] == ["bad"]
    make(folder, [])
    assert [row.state for row in doctor.private(folder)] == ["ok"]
    (folder / "token").chmod(0o640)
    (row,) = doctor.private(folder)
    assert (row.state, row.remedy) == ("bad", f"chmod 600 {folder / 'token'}")
    (folder / "token").chmod(0o600)
    folder.chmod(0o770)
    assert [row.remedy for row in doctor.private(folder)] == [f"chmod 700 {folder}"]
    folder.chmod(0o700)
    (folder / "gone").symlink_to("nowhere")
    assert [row.state for row in doctor.private(folder)] == ["ok"]
    (folder / "token").unlink()
    (folder / "tls" / "server.pem").write_text("cut")
    assert [row.state for row in doctor.private(folder)] == ["bad", "bad"]


_TLS = ("tls/authority.pem", "tls/server.pem", "tls/server.key")
SOME = ("allowed.yaml", "token", *_TLS)


def rejected(folder: Path) -> bool:
    """Returns whether a run would reject the keys."""
    try:
        keys.allowed(folder)
        keys.token(folder)
        keys.server_tls(folder)
    except SettingsError:
        return True
    return False


def test_doctor_rejects_exactly_the_keys_that_a_run_rejects(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make(folder, [])
    verdicts = []
    for name in SOME:
        for mode in (0o600, 0o644, 0o664):
            (folder / name).chmod(mode)
            bad = doctor.worst(list(doctor.private(folder))) == "bad"
            assert bad == rejected(folder), f"{name} with mode {mode:o}"
            verdicts.append(bad)
        (folder / name).chmod(0o600)
    assert sum(verdicts) == 2 * 2 + 3 * 1, "secrets that others can read, and any file that others can write"


def test_worst_row_decides() -> None:
    rows = [Row(what=state, state=state, got="") for state in ("ok", "warn", "bad")]
    assert [doctor.worst(rows[:n]) for n in range(4)] == ["ok", "ok", "warn", "bad"]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield int(listening.getsockname()[1])


def endpoints(text: str) -> list[Row]:
    """Returns the findings about the ports of a configuration."""
    return list(doctor._endpoints(parse_settings("behaviors: {Goal: {}}\n" + text, "test").settings))


@pytest.mark.parametrize(
    ("simulators", "offset", "found"),
    [
        ("{name: godot, options: {port: PORT}}", 0, "port of a Godot game"),
        ("{name: godot, count: 2, options: {port: PORT, path: game}}", 1, "port of a Godot game"),
        ("{name: unity, options: {port: PORT}}", 0, "port of a Unity player"),
        ("{name: unity, count: 3, options: {port: PORT, path: game}}", 2, "port of a Unity player"),
        ("{name: goal, count: 2}, {name: unity, options: {port: PORT, path: game}}", 2, "port of a Unity player"),
        ("{name: unity, options: {port: 0, path: game}}", 0, None),
    ],
)
def test_ports_that_games_connect_to_are_checked(taken: int, simulators: str, offset: int, found: str | None) -> None:
    rows = endpoints(f"simulators: [{simulators.replace('PORT', str(taken - offset))}]\n")
    named = [row.what for row in rows if f"127.0.0.1:{taken} is not free" in row.got]
    assert named == ([] if found is None else [found])


def test_launched_godot_game_takes_another_port_if_the_usual_one_is_in_use() -> None:
    assert not [row for row in endpoints("simulators: [{name: godot, options: {path: game}}]\n") if "Godot" in row.what]
    (row,) = [row for row in endpoints("simulators: [{name: godot}]\n") if "Godot" in row.what]
    assert ":11008 is" in row.got


def configured(tmp_path: Path, port: int) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"behaviors: {{Goal: {{}}}}\nsimulators: [{{name: goal}}]\npipeline: {{address: 'tcp://127.0.0.1:{port}'}}\n"
        f"checkpoint_settings: {{results_dir: {tmp_path}}}\n"
    )
    return file


def test_command_exits_with_1_and_names_the_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = configured(tmp_path, taken.getsockname()[1])
        assert main(["doctor", str(file), "--json"]) == 1
        rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows if row["state"] == "bad"] == ["pipeline.address"]
    assert set(rows[0]) == {"what", "state", "got", "expected", "remedy"}
    assert main(["doctor", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("0 bad")


def test_invalid_configuration_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("behaviours: {}\n")
    assert main(["doctor", str(tmp_path / "c.yaml")]) == 2


def test_results_need_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, file = tmp_path / "run.yaml", tmp_path / "file"
    file.write_text("")
    config.write_text(f"behaviors: {{A: {{}}}}\ncheckpoint_settings: {{results_dir: {file}}}\n")
    assert main(["doctor", str(config)]) == 1
    assert f"{file}, which is no folder" in capsys.readouterr().out
