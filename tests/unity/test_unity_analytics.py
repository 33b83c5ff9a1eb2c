"""The package's telemetry receives exactly these bytes about a run."""

from __future__ import annotations

import platform
from importlib.metadata import version

import pytest

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.bridges.unity.channels import ANALYTICS, parse_messages
from sparring.pipeline.errors import SettingsError, install_command
from sparring.pipeline.settings.load import parse_settings
from sparring.services.supervision import analytics

PLAIN = """
behaviors:
  Ball: {}
"""
RICH = """
behaviors:
  Ball:
    trainer_type: poca
    network_settings: {num_layers: 1, hidden_units: 32, vis_encode_type: nature_cnn, memory: {memory_size: 16}}
    reward_signals: {curiosity: {strength: 0.1}, rnd: {strength: 0.1}, gail: {strength: 0.1, demo_path: a.demo}}
    behavioral_cloning: {demo_path: a.demo}
    self_play: {window: 3}
  Other: {}
environment_parameters:
  size: 3.0
  wind:
    curriculum:
      - {name: calm, value: 0.0, completion_criteria: {measure: reward, behavior: Ball, threshold: 0.5}}
      - {name: storm, value: 1.0}
torch_settings: {device: cpu}
pipeline: {mode: lockstep}
"""


def sent(text: str, players: int) -> list[tuple[str, bytes]]:
    """Returns name and bytes of each message."""
    found = []
    for channel, payload in parse_messages(analytics.training(parse_settings(text, "test").settings, players)):
        assert channel == ANALYTICS
        name, content = payload[2 : 2 + payload[1]], payload[2 + payload[1] :]
        assert payload[:1] == b"\x0a"  # field 1, of a google.protobuf.Any
        size = len(content) - 2
        assert content[:2] == bytes((0x12, size)), "field 2"
        found.append((name.decode(), content[2:]))
    return found


def environment(players: int, parameters: int) -> tuple[str, bytes]:
    own = f"sparring {version('sparring')}"
    texts = (own, own, platform.python_version(), version("torch"), "cpu")
    content = b"".join(writer.text(number, text) for number, text in enumerate(texts, 1))
    content += writer.integer(6, players) + writer.integer(7, parameters)
    return "type.googleapis.com/communicator_objects.TrainingEnvironmentInitialized", content


def behavior(name: str, trainer: str, encoder: str, layers: int, units: int, *true: int) -> tuple[str, bytes]:
    """Returns the message of a behavior; `true` holds the numbers of its true fields."""
    fields = {1: writer.text(1, name), 2: writer.text(2, trainer), 9: writer.text(9, encoder)}
    fields |= {10: writer.integer(10, layers), 11: writer.integer(11, units)}
    fields |= {number: writer.integer(number, 1) for number in true}
    content = b"".join(fields[number] for number in sorted(fields))
    return "type.googleapis.com/communicator_objects.TrainingBehaviorInitialized", content


def test_a_run_with_defaults_is_described() -> None:
    assert sent(PLAIN, 2) == [environment(2, 0), behavior("Ball", "ppo", "simple", 2, 128, 3, 12)]


def test_a_run_with_every_described_setting_is_described() -> None:
    """Extrinsic reward is not among the signals of Ball, but lessons are measured by it."""
    assert sent(RICH, 1) == [
        environment(1, 2),
        behavior("Ball", "poca", "nature_cnn", 1, 32, 4, 5, 6, 7, 8, 13, 14),
        behavior("Other", "ppo", "simple", 2, 128, 3),
    ]


def test_a_missing_library_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise UnreadableData("no library protobuf to read it with", install_command("unity"))

    monkeypatch.setattr(analytics, "message_class", missing)
    with pytest.raises(SettingsError, match=r"got pipeline\.training_analytics without .*; pip install"):
        analytics.training(parse_settings(PLAIN, "test").settings, 1)
