"""An address beyond loopback needs keys or `--insecure`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.load import parse_settings
from sparring.services.commands import check
from sparring.services.commands.record import lone_simulator
from sparring.services.main import main
from sparring.services.process.encryption import exposed, keys_folder, keys_missing, keys_unusable, unprotected
from sparring.services.process.runtime import Run
from sparring.services.supervision.ports import open_ports
from sparring.services.supervision.topology import Topology


def settings(address: str = "tcp://127.0.0.1:0", **pipeline: object) -> Settings:
    return Settings.model_validate({"behaviors": {"Ball": {}}, "pipeline": {"address": address, **pipeline}})


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:1", "tcp://localhost:0", "unix:///tmp/s"])
def test_listening_on_loopback_needs_no_keys(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    assert exposed(settings(address), insecure=False) == []


@pytest.mark.parametrize(
    ("configured", "where"),
    [
        (settings("tcp://0.0.0.0:5005"), "pipeline.address"),
        (settings("tcp://game.example.org:5005"), "pipeline.address"),
        (settings("tcp://[::]:5005"), "pipeline.address"),
        (settings(websocket_address="tcp://0.0.0.0:5010"), "pipeline.websocket_address"),
        (settings("unix:///tmp/s", websocket_address="tcp://[::]:5010"), "pipeline.websocket_address"),
    ],
)
def test_listening_beyond_loopback_needs_keys_or_insecure(
    configured: Settings, where: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    (line,) = exposed(configured, insecure=False)
    assert line.startswith(f"got {where}")
    assert "without keys; expected keys, or loopback" in line
    assert "make keys with `sparring keys DIR`" in line
    assert exposed(configured, insecure=True) == []
    (warning,) = unprotected(configured, insecure=True)
    assert "is open to any peer: any peer that reaches it can" in warning
    monkeypatch.setenv("SPARRING_KEYS", str(made))
    assert exposed(configured, insecure=False) == []
    assert unprotected(configured, insecure=True) == []


def test_numbers_beyond_loopback_need_insecure(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARRING_KEYS", str(made))  # which protect nothing there
    assert exposed(settings(metrics_address="tcp://127.0.0.1:9400"), insecure=False) == []
    configured = settings(metrics_address="tcp://0.0.0.0:9400")
    (line,) = exposed(configured, insecure=False)
    assert line.startswith("got pipeline.metrics_address 'tcp://0.0.0.0:9400', which other machines can reach")
    assert exposed(configured, insecure=True) == []
    (warning,) = unprotected(configured, insecure=True)
    assert warning.endswith("any peer that reaches it can read all numbers of the run")


def test_paths_that_are_too_long_for_sockets_are_refused_before_a_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, runs = tmp_path / "long.yaml", tmp_path / "runs"
    path = "/tmp/" + "x" * 101
    config.write_text(f"behaviors: {{Ball: }}\npipeline: {{address: 'unix://{path}', stepping_processes: 2}}\n")
    for command, status in (["check", str(config)], 1), (["train", str(config), "--results-dir", str(runs)], 2):
        assert main(command) == status
        error = capsys.readouterr().err
        assert f"got pipeline.address with a socket at {path}.1, 108 bytes; expected at most 107" in error
        assert f"{path}," not in error
    config.write_text("behaviors: {Ball: }\n")
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "y" * 90)
    assert main(["check", str(config)]) == 1
    assert "got TMPDIR with a socket at /tmp/yyy" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="got TMPDIR"):
        open_ports(settings(), in_process=False)
    with open_ports(settings(), in_process=True) as ports:
        assert ports.sockets is None
    assert not runs.exists()


def test_keys_do_not_protect_the_address_of_unity_players(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond loopback it needs `--insecure`, with or without keys, if the run has such players at all."""
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    plain = "behaviors: {Ball: }\npipeline: {player_host: 0.0.0.0}\n"
    configured = parse_settings(plain, "test").settings
    for keyed in (False, True):
        if keyed:
            monkeypatch.setenv("SPARRING_KEYS", str(made))
        (line,) = exposed(configured, insecure=False)
        assert line.startswith("got pipeline.player_host '0.0.0.0', which other machines can reach; expected loopback")
        assert exposed(configured, insecure=True) == []
        (warning,) = unprotected(configured, insecure=True)
        assert "pipeline.player_host '0.0.0.0' is open to any peer: any peer that reaches it can" in warning
    assert exposed(parse_settings(plain + "simulators: [{name: goal}]", "test").settings, insecure=False) == []
    near = parse_settings(plain.replace("0.0.0.0", "'::1'"), "test").settings
    assert exposed(near, insecure=False) == []


def test_unusable_keys_are_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    (folder / "token").chmod(0o644)
    own = settings(keys=str(folder))
    (line,) = keys_unusable(own)
    assert "token with mode 644" in line
    assert exposed(own, insecure=False) == keys_missing(own) == []
    (line,) = keys_missing(settings(keys=str(folder / "no")))
    assert "which are not here; expected a folder; make it with `sparring keys`" in line
    assert keys_folder(settings()) is None
    monkeypatch.setenv("SPARRING_KEYS", "/b")
    assert keys_folder(settings(keys="a")) == Path("/b")


def test_check_and_train_refuse_an_exposed_address_and_accept_only_the_full_option(
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
    assert check.run(argparse.Namespace(config=str(config), insecure=True, ray=None, assigned=[])) == 0


@pytest.mark.parametrize("command", ["evaluate", "tournament"])
@pytest.mark.parametrize(
    ("pipeline", "what"),
    [("address: 'tcp://0.0.0.0:5005'", "pipeline.address"), ("player_host: 0.0.0.0", "pipeline.player_host")],
)
def test_evaluating_an_insecure_run_needs_its_own_insecure_option(
    command: str,
    pipeline: str,
    what: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each command needs the option; with it, the command continues and looks for checkpoints."""
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    configured = parse_settings(f"behaviors: {{Ball: }}\npipeline: {{{pipeline}}}\n", "test").settings
    run = Run(id="r", directory=tmp_path, settings=configured, seed=0, addresses={}, simulators={})
    Topology(run=run, endpoints={}, services=(), simulators=()).save()
    assert main([command, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"got {what}" in error
    assert "pass --insecure" in error
    assert main([command, str(tmp_path), "--insecure"]) == 2
    error = capsys.readouterr().err
    assert "--insecure" not in error
    assert "checkpoint" in error


def test_recording_refuses_players_that_other_machines_could_impersonate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    configured = parse_settings("behaviors: {Ball: }\npipeline: {player_host: 0.0.0.0}\n", "test").settings
    with pytest.raises(SettingsError, match=r"got pipeline\.player_host"), lone_simulator(configured, 1):
        pass
