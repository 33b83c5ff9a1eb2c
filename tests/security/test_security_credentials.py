"""Credentials reach our own simulators, and none of them is sent unencrypted beyond loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.security import token
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.simulation.encrypted import credential_of
from sparring.services.commands.record import lone_simulator
from sparring.services.endpoint.admission import credentials
from sparring.services.supervision.topology import credential_variables


def test_a_simulator_uses_the_credentials_of_its_environment_variables(keys: Path) -> None:
    secret, tcp = token(keys), "tcp://127.0.0.1:1"
    assert credential_of(tcp, None, "", "", {}) == (None, "")
    assert credential_of(tcp, None, "", "", {"SPARRING_CREDENTIAL": "x"}) == (None, "x")
    variables = {"SPARRING_KEYS": str(keys)}
    assert credential_of(tcp, None, "", "", variables)[1] == secret
    assert credential_of(tcp, None, "", "", {**variables, "SPARRING_NAME": "arcade"})[1] == ""
    assert credential_of(tcp, "", "", "", variables) == (None, "")
    assert credential_of("unix:///x", None, "", "", variables) == (None, "")
    with pytest.raises(SettingsError, match="without keys"):
        credential_of(tcp, None, "arcade", "", {})
    with pytest.raises(SettingsError, match="unlisted"):
        credential_of(tcp, keys, "unlisted", "", {})


@pytest.mark.parametrize(
    ("pipeline_section", "number", "wanted"),
    [
        ("keys: KEYS", 0, {"SPARRING_KEYS": "KEYS", "SPARRING_NAME": "simulator-0"}),
        ("keys: KEYS", 7, {"SPARRING_KEYS": "KEYS", "SPARRING_NAME": ""}),
        ("keys: KEYS, credentials: token", 0, {"SPARRING_KEYS": "KEYS", "SPARRING_NAME": ""}),
        (
            "keys: KEYS, encrypt: false",
            0,
            {"SPARRING_KEYS": "", "SPARRING_NAME": "", "SPARRING_CREDENTIAL": "TOKEN"},
        ),
        ("mode: overlap", 0, {}),
    ],
)
def test_the_supervisor_passes_credentials_to_its_simulators(
    keys: Path, monkeypatch: pytest.MonkeyPatch, pipeline_section: str, number: int, wanted: dict[str, str]
) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    text = f"behaviors: {{Goal: }}\npipeline: {{{pipeline_section.replace('KEYS', str(keys))}}}"
    found = credential_variables(parse_settings(text, "test").settings, "tcp://127.0.0.1:1", number)
    known = {"KEYS": str(keys), "TOKEN": token(keys)}
    assert found == {name: known.get(value, value) for name, value in wanted.items()}
    assert credential_variables(parse_settings(text, "test").settings, "unix:///x", number) == {}


@pytest.mark.parametrize(
    "section", ["encrypt: false, credentials: certificate", "encrypt: false, address: 'tcp://0.0.0.0:1'"]
)
def test_only_a_token_on_loopback_may_be_sent_unencrypted(section: str) -> None:
    with pytest.raises(SettingsError, match="encrypt: false"):
        parse_settings(f"behaviors: {{Goal: }}\npipeline: {{{section}}}", "test")


def test_a_run_on_several_machines_does_not_send_a_token_unencrypted(keys: Path) -> None:
    """The address of stepping is then that of its machine, whatever `pipeline.address` is."""
    with pytest.raises(SettingsError, match="encrypt: false"):
        credentials("tcp://10.0.0.2:5005", keys, "either", encrypt=False)
    assert not credentials("tcp://10.0.0.2:5005", None, "either", encrypt=False).required


def test_an_unencrypted_recording_is_made_on_this_machine_only() -> None:
    settings = parse_settings("behaviors: {Goal: }\npipeline: {address: 'tcp://0.0.0.0:0'}", "test").settings
    with pytest.raises(SettingsError, match="expected loopback"), lone_simulator(settings, seed=1):
        pass
