"""Keys: a folder for its owner only, made once, of which every part opens what it is for and nothing else."""

from __future__ import annotations

import argparse
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.security import (
    CONNECTIONS,
    ROLES,
    SIMULATORS,
    allowed,
    client_tls,
    endpoint_role,
    owner,
    public_key,
    read_curve,
    server_tls,
    token,
)
from sparring.pipeline.security.making import add, make, numbered
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.load import parse_settings
from sparring.services.commands import check, keys
from sparring.services.commands.record_simulator import lone_simulator
from sparring.services.main import main
from sparring.services.process.encryption import exposed, keys_folder, keys_missing, keys_unusable, unprotected
from sparring.services.process.protection import curve
from sparring.services.process.runtime import Run
from sparring.services.supervision.topology import Topology

NAMES = [
    "steps",
    "segments:Ball",
    "updates:Ball",
    *(f"topic:{name}" for name in ("stepping-0", "assembly", "coordination", "learning-Ball", "policy-Ball", "ghosts")),
    *(f"topic:{name}" for name in ("monitor", "supervisor", "host-rack")),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security") / "keys"
    make(folder, ["arcade"], ["10.0.0.1", "trainer.local"])
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    copy = tmp_path / "keys"
    for path in sorted(made.rglob("*")):
        target = copy / path.relative_to(made)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.is_file():
            target.touch(mode=0o600)
            target.write_bytes(path.read_bytes())
    return copy


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- making


def test_only_the_owner_can_open_what_is_made(made: Path) -> None:
    assert modes(made) == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (made, made / "curve", made / "tls")} == {0o700}
    assert [path.name for path in made.parent.iterdir()] == ["keys"]


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match="which holds files; expected a new folder: keys are never overwritten"):
        make(folder, [])
    with pytest.raises(SettingsError, match="got the simulator 'arcade', which has a certificate"):
        add(folder, ["new", "arcade"])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_is_made_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparring.pipeline.security.making._write_lists", full)
    with pytest.raises(SettingsError, match="cannot be made \\(No space left on device\\)"):
        make(tmp_path / "keys", [])
    assert list(tmp_path.iterdir()) == []


def test_an_added_simulator_gets_a_certificate_and_a_place_on_the_list(folder: Path) -> None:
    assert numbered(2, folder) == ["simulator-0", "simulator-1"]
    add(folder, ["simulator-0"])
    assert numbered(1, folder) == ["simulator-1"]
    assert allowed(folder, SIMULATORS) == {"arcade", "simulator-0"}
    assert modes(folder) == {0o600}
    shown, _ = handshake(client_tls(folder, "simulator-0"), server_tls(folder))
    assert shown == "simulator-0"


@pytest.mark.parametrize("name", ["server", "authority", "../up", "a b", "", "x" * 64])
def test_a_name_that_could_not_be_a_file_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="expected a name of letters"):
        make(tmp_path / "keys", [name])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "a/b", "tcp://h:1"])
def test_a_host_that_nobody_calls_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(SettingsError, match=f"got the host '{host}'"):
        make(tmp_path / "keys", [], [host])


def test_the_command_makes_and_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "keys")
    assert main(["keys", folder, "--simulators", "1", "--hosts", "10.0.0.7,desk"]) == 0
    assert main(["keys", folder, "--add", "--simulators", "2"]) == 0
    assert main(["keys", folder]) == 2
    said = capsys.readouterr()
    assert "simulator-1, simulator-2" in said.out
    assert "never overwritten" in said.err
    assert read_curve(tmp_path / "keys", "stepping").secret not in said.out + said.err
    assert keys.run.__doc__


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("curve/learning.secret", lambda folder: read_curve(folder, "learning")),
        ("tls/server.key", server_tls),
        ("tls/arcade.key", lambda folder: client_tls(folder, "arcade")),
        ("tls/authority.key", lambda folder: add(folder, numbered(1, folder))),
        ("token", token),
    ],
)
def test_a_secret_that_others_can_read_is_refused_and_not_shown(
    folder: Path, file: str, read: Callable[[Path], object]
) -> None:
    read(folder)
    secret = (folder / file).read_text()
    (folder / file).chmod(0o640)
    with pytest.raises(
        SettingsError, match=f"mode 640, which others can read; expected mode 600; say `chmod 600 .*{file}"
    ) as error:
        read(folder)
    assert not any(line in str(error.value) for line in secret.splitlines())


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("allowed.yaml", lambda folder: allowed(folder, "steps")),
        ("curve/learning.public", lambda folder: public_key(folder, "learning")),
        ("tls/authority.pem", lambda folder: client_tls(folder)),
        ("tls/server.pem", server_tls),
    ],
)
def test_what_others_could_change_is_refused_and_what_they_can_read_is_not(
    folder: Path, file: str, read: Callable[[Path], object]
) -> None:
    (folder / file).chmod(0o644)
    read(folder)
    (folder / file).chmod(0o620)
    with pytest.raises(SettingsError, match="which others can change; expected mode 600"):
        read(folder)


@pytest.mark.parametrize(
    ("file", "content", "read"),
    [
        ("curve/learning.secret", b"short", lambda folder: read_curve(folder, "learning")),
        ("curve/learning.public", b"\xff" * 40, lambda folder: public_key(folder, "learning")),
        ("token", b"guess", token),
        ("allowed.yaml", b"steps: stepping", lambda folder: allowed(folder, "steps")),
        ("allowed.yaml", b"{", lambda folder: allowed(folder, "steps")),
        ("allowed.yaml", b"segments: []", lambda folder: allowed(folder, "steps")),
        ("tls/server.key", b"nothing", server_tls),
        ("tls/authority.pem", b"nothing", client_tls),
    ],
)
def test_a_file_that_holds_something_else_is_refused_without_its_content(
    folder: Path, file: str, content: bytes, read: Callable[[Path], object]
) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(SettingsError, match=r"expected .*; ") as error:
        read(folder)
    assert "guess" not in str(error.value)
    (folder / file).unlink()
    with pytest.raises(SettingsError, match=r"cannot be (read|used) \("):
        read(folder)


def test_a_secret_is_not_in_what_is_printed_of_it(made: Path) -> None:
    pair = read_curve(made, "stepping")
    assert pair.secret not in repr(pair) + repr(curve(made, "stepping", NAMES))


# ---------------------------------------------------------------- TLS


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str = "10.0.0.1") -> tuple[str, str]:
    """Name on the client's certificate, "" for none; and the version spoken."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(down, up, server_hostname=host)
    theirs = server.wrap_bio(up, down, server_side=True)
    for _ in range(3):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = theirs.getpeercert() or {}
    return "".join(value for ((_, value),) in shown.get("subject", ())), theirs.version() or ""


@pytest.mark.parametrize("host", ["10.0.0.1", "trainer.local", "127.0.0.1", "::1", "localhost"])
def test_a_simulator_knows_the_endpoint_by_each_of_its_names(made: Path, host: str) -> None:
    assert handshake(client_tls(made, "arcade"), server_tls(made), host) == ("arcade", "TLSv1.3")
    assert handshake(client_tls(made), server_tls(made), host) == ("", "TLSv1.3")


def test_a_certificate_of_another_authority_is_refused_on_both_sides(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", ["arcade"], ["10.0.0.1"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_tls(tmp_path / "other"), server_tls(made))
    mixed = client_tls(made)
    mixed.load_cert_chain(tmp_path / "other/tls/arcade.pem", tmp_path / "other/tls/arcade.key")
    with pytest.raises(ssl.SSLError):
        handshake(mixed, server_tls(made))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_tls(made), server_tls(made), "10.0.0.2")


def test_a_simulators_certificate_makes_no_endpoint_and_that_of_the_endpoint_no_simulator(made: Path) -> None:
    posing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    posing.load_cert_chain(made / "tls/arcade.pem", made / "tls/arcade.key")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_tls(made), posing, "arcade")
    client = client_tls(made)
    client.load_cert_chain(made / "tls/server.pem", made / "tls/server.key")
    with pytest.raises(ssl.SSLError):
        handshake(client, server_tls(made))


# ---------------------------------------------------------------- lists


def test_every_kind_of_queue_and_board_has_an_owner_and_a_list_of_roles(made: Path) -> None:
    assert {endpoint_role(name) for name in NAMES} == set(CONNECTIONS)
    for kind, roles in CONNECTIONS.items():
        assert owner(kind) in ROLES
        assert owner(kind) not in roles or kind in ("topic:supervisor", "topic:host")
        assert allowed(made, kind) == set(roles)


def test_a_service_knows_whom_to_let_in_where(made: Path) -> None:
    found = curve(made, "learning", NAMES)
    publics = {role: public_key(made, role) for role in ROLES}
    assert found.public == publics["learning"]
    assert found.servers["updates:Ball"] == found.servers["topic:policy-Ball"] == publics["learning"]
    assert found.servers["topic:ghosts"] == publics["coordination"]
    assert found.clients["updates:Ball"] == {publics["coordination"]}
    assert found.clients["topic:monitor"] == {publics["supervisor"]}


def test_a_role_that_is_taken_off_a_list_is_let_in_no_more(folder: Path) -> None:
    path = folder / "allowed.yaml"
    path.write_text(path.read_text().replace("steps: [stepping]", "steps: []"))
    assert curve(folder, "assembly", NAMES).clients["steps"] == set()


# ---------------------------------------------------------------- what may listen


def settings(address: str = "tcp://127.0.0.1:0", **pipeline: object) -> Settings:
    return Settings.model_validate({"behaviors": {"Ball": {}}, "pipeline": {"address": address, **pipeline}})


HOSTS = {"desk": {"address": "127.0.0.1"}, "rack": {"address": "10.0.0.2", "services": ("stepping",)}}


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:1", "tcp://localhost:0", "unix:///tmp/s"])
def test_on_this_machine_no_keys_are_needed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    assert exposed(settings(address), insecure=False) == []


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        (settings("tcp://0.0.0.0:5005"), "pipeline.address"),
        (settings("tcp://game.example.org:5005"), "pipeline.address"),
        (settings("tcp://[::]:5005"), "pipeline.address"),
        (settings(hosts=HOSTS), "pipeline.hosts.rack 10.0.0.2"),
    ],
)
def test_beyond_this_machine_it_takes_keys_or_a_word_in_full(
    asked: Settings, where: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    (line,) = exposed(asked, insecure=False)
    assert line.startswith(f"got {where}")
    assert "without keys; expected keys, or loopback" in line
    assert "make keys with `sparring keys DIR`" in line
    assert exposed(asked, insecure=True) == []
    (warning,) = unprotected(asked, insecure=True)
    assert "is open to everybody: whoever reaches it can" in warning
    monkeypatch.setenv("SPARRING_KEYS", str(made))
    assert exposed(asked, insecure=False) == []
    assert unprotected(asked, insecure=True) == []


def test_no_key_protects_where_unity_players_call(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond loopback it takes the word in full, with keys as without, where there are such players at all."""
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    plain = "behaviors: {Ball: }\npipeline: {player_host: 0.0.0.0}\n"
    asked = parse_settings(plain, "test").settings
    for keyed in (False, True):
        if keyed:
            monkeypatch.setenv("SPARRING_KEYS", str(made))
        (line,) = exposed(asked, insecure=False)
        assert line.startswith("got pipeline.player_host '0.0.0.0', which other machines can reach; expected loopback")
        assert exposed(asked, insecure=True) == []
        (warning,) = unprotected(asked, insecure=True)
        assert "pipeline.player_host '0.0.0.0' is open to everybody: whoever reaches it can" in warning
    assert exposed(parse_settings(plain + "simulators: [{name: goal}]", "test").settings, insecure=False) == []
    near = parse_settings(plain.replace("0.0.0.0", "'::1'"), "test").settings
    assert exposed(near, insecure=False) == []


def test_keys_that_can_not_be_used_are_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    (folder / "token").chmod(0o644)
    own = settings(keys=str(folder))
    (line,) = keys_unusable(own)
    assert "token with mode 644" in line
    assert exposed(own, insecure=False) == keys_missing(own) == []
    (line,) = keys_missing(settings(keys=str(folder / "no")))
    assert "which are not here; expected a folder; make it with `sparring keys`" in line
    assert keys_folder(settings(keys="a"), {"SPARRING_KEYS": "/b"}) == Path("/b")
    assert keys_folder(settings(), {}) is None


def test_a_machine_is_asked_for_the_keys_of_what_runs_there_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    own = settings(keys=str(folder), hosts=HOSTS)
    for path in ("token", "tls/server.key", "curve/stepping.secret", "tls/authority.key"):
        (folder / path).unlink()
    assert keys_unusable(own) == []
    (folder / "curve/learning.secret").unlink()
    (line,) = keys_unusable(own)
    assert "learning.secret, which cannot be read (No such file" in line


def test_check_and_train_refuse_and_take_only_the_whole_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    config = tmp_path / "open.yaml"
    config.write_text("behaviors: {Ball: }\npipeline: {address: 'tcp://0.0.0.0:5005'}\n")
    assert main(["check", str(config)]) == 1
    assert "which other machines can reach, without keys" in capsys.readouterr().err
    assert main(["train", str(config), "--results-dir", str(tmp_path / "runs")]) == 2
    assert "which other machines can reach, without keys" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(SystemExit):
        main(["check", str(config), "--insec"])
    assert main(["check", str(config), "--insecure"]) == 0
    assert "warning: --insecure: pipeline.address" in capsys.readouterr().out
    assert check.run(argparse.Namespace(config=str(config), insecure=True)) == 0


@pytest.mark.parametrize("command", ["evaluate", "tournament"])
@pytest.mark.parametrize(
    ("pipeline", "what"),
    [("address: 'tcp://0.0.0.0:5005'", "pipeline.address"), ("player_host: 0.0.0.0", "pipeline.player_host")],
)
def test_what_was_trained_in_the_open_is_not_played_there_unasked(
    command: str,
    pipeline: str,
    what: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The word is said for each command. With it, it goes on to what there is to play."""
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    asked = parse_settings(f"behaviors: {{Ball: }}\npipeline: {{{pipeline}}}\n", "test").settings
    run = Run(id="r", directory=tmp_path, settings=asked, seed=0, capacities={}, addresses={}, simulators={})
    Topology(run=run, endpoints={}, services=(), simulators=(), cores={}, host=None).save()
    assert main([command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"got {what}" in said
    assert "say --insecure" in said
    assert main([command, str(tmp_path), "--insecure"]) == 2
    said = capsys.readouterr().err
    assert "--insecure" not in said
    assert "checkpoint" in said


def test_nothing_is_recorded_from_players_that_strangers_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    asked = parse_settings("behaviors: {Ball: }\npipeline: {player_host: 0.0.0.0}\n", "test").settings
    with pytest.raises(SettingsError, match=r"got pipeline\.player_host"), lone_simulator(asked, 1):
        pass
