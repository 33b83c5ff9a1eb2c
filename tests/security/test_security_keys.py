"""Keys are a folder that only its owner can read, made once; each service opens only the files that it needs."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.security import KEY_FILE, allowed, client_tls, secret_key, server_tls, token
from sparring.pipeline.security.making import add, make, numbered
from sparring.services.commands import keys
from sparring.services.main import main


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- making


def test_only_the_owner_can_open_new_keys(made: Path) -> None:
    assert modes(made) == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (made, made / "tls")} == {0o700}
    assert [path.name for path in made.parent.iterdir()] == ["keys"]


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match="which holds files; expected a new folder: keys are never overwritten"):
        make(folder, [])
    with pytest.raises(SettingsError, match="got the simulator 'arcade', which has a certificate"):
        add(folder, ["new", "arcade"])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_of_keys_is_made_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparring.pipeline.security.making._write_list", full)
    with pytest.raises(SettingsError, match="cannot be made \\(No space left on device\\)"):
        make(tmp_path / "keys", [])
    assert list(tmp_path.iterdir()) == []


def test_simulators_are_added_all_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*folder.rglob("*")}
    with monkeypatch.context() as patched:
        patched.setattr("sparring.pipeline.security.making._write_list", interrupted)
        with pytest.raises(KeyboardInterrupt):
            add(folder, ["new"])
    assert {*folder.rglob("*")} == before
    add(folder, ["new"])


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_added_simulator_gets_a_certificate_and_an_entry_on_the_list(folder: Path) -> None:
    assert numbered(2, folder) == ["simulator-0", "simulator-1"]
    (folder / "tls").chmod(0o755)
    add(folder, ["simulator-0"])
    assert stat.S_IMODE((folder / "tls" / "simulator-0.key").stat().st_mode) == 0o600
    assert numbered(1, folder) == ["simulator-1"]
    assert allowed(folder) == {"arcade", "simulator-0"}
    assert modes(folder) == {0o600}
    shown, _ = handshake(client_tls(folder, "simulator-0"), server_tls(folder))
    assert shown == "simulator-0"


@pytest.mark.parametrize("name", ["server", "authority", "../up", "a b", "", "x" * 64])
def test_a_simulator_name_that_cannot_be_a_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="expected a name of letters"):
        make(tmp_path / "keys", [name])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "a/b", "tcp://h:1"])
def test_a_host_that_is_no_address_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(SettingsError, match=f"got the host '{host}'"):
        make(tmp_path / "keys", [], [host])


def test_the_keys_command_makes_and_adds_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "keys")
    assert main(["keys", folder, "--simulators", "1", "--hosts", "10.0.0.7,desk"]) == 0
    assert main(["keys", folder, "--add", "--simulators", "2"]) == 0
    assert main(["keys", folder]) == 2
    assert main(["keys", folder, "--add", "--simulators", "9" * 5000]) == 2
    output = capsys.readouterr()
    assert "simulator-1, simulator-2" in output.out
    assert "never overwritten" in output.err
    assert "expected at most 9999, each of which takes a certificate; make fewer" in output.err
    assert token(tmp_path / "keys") not in output.out + output.err
    assert keys.run.__doc__


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("file", "read"),
    [
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
        SettingsError, match=f"mode 640, which others can read; expected mode 600; run `chmod 600 .*{file}"
    ) as error:
        read(folder)
    assert not any(line in str(error.value) for line in secret.splitlines())


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("allowed.yaml", allowed),
        ("tls/authority.pem", lambda folder: client_tls(folder)),
        ("tls/server.pem", server_tls),
    ],
)
def test_a_file_that_others_can_change_is_refused_and_one_they_can_read_is_not(
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
        (KEY_FILE, b"short", secret_key),
        (KEY_FILE, b"\xff" * 40, secret_key),
        ("token", b"guess", token),
        ("allowed.yaml", b"simulators: arcade", allowed),
        ("allowed.yaml", b"{", allowed),
        ("allowed.yaml", b"[" * 5000 + b"]" * 5000, allowed),
        ("allowed.yaml", b"simulators: !!bool zz", allowed),
        ("allowed.yaml", b"steps: []", allowed),
        ("tls/server.key", b"nothing", server_tls),
        ("tls/authority.pem", b"nothing", client_tls),
        ("allowed.yaml", b"simulators: [2020-13-45]", allowed),
    ],
)
def test_a_malformed_key_file_is_refused_without_showing_its_content(
    folder: Path, file: str, content: bytes, read: Callable[[Path], object]
) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(SettingsError, match=r"expected .*; ") as error:
        read(folder)
    assert "guess" not in str(error.value)
    (folder / file).unlink()
    with pytest.raises(SettingsError, match=r"cannot be (read|used) \("):
        read(folder)


# ---------------------------------------------------------------- TLS


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str = "10.0.0.1") -> tuple[str, str]:
    """Returns the name on the client's certificate, "" for none, and the TLS version."""
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
def test_a_simulator_accepts_the_endpoint_under_each_of_its_names(made: Path, host: str) -> None:
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


def test_the_certificates_of_simulator_and_endpoint_are_not_interchangeable(made: Path) -> None:
    impostor = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    impostor.load_cert_chain(made / "tls/arcade.pem", made / "tls/arcade.key")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_tls(made), impostor, "arcade")
    client = client_tls(made)
    client.load_cert_chain(made / "tls/server.pem", made / "tls/server.key")
    with pytest.raises(ssl.SSLError):
        handshake(client, server_tls(made))
