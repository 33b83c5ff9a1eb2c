"""Both generations of `.demo` files reach the learner, `sparring check` and `sparring demo info` alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tests.demonstrations.demo_writer as writer
from sparring.pipeline.demonstrations.episodes import ActionsOf, Pairing, RecordingError
from sparring.pipeline.demonstrations.library import load
from sparring.pipeline.demonstrations.unity import FORCED
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import BehavioralCloningSettings, GailSettings, RewardSignals, TrainerSettings
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.main import main

SPEC = BehaviorSpec(observations=(ObservationSpec(name="obs_0", shape=(2,)),), actions=ActionSpec(continuous=1))
VALUES = {"own": [0.25, 0.5, None], "previous": [0.0, 0.25, 0.5], "neither": [0.25, 0.5, 0.75]}
EVIDENCE = {"own": "its last pair has no action", "previous": "1 of 1 episodes begin with no action or zero"}


def write(folder: Path, kind: str) -> Path:
    """Writes an episode of two steps; unless the generation is ambiguous, their actions are 0.25 and 0.5."""
    pairs = [
        writer.pair([writer.vector([at, 1.0])], writer.action(() if value is None else [value]), done=at == 2)
        for at, value in enumerate(VALUES[kind])
    ]
    path = folder / f"{kind}.demo"
    path.write_bytes(writer.demo(writer.behavior(continuous=1), pairs))
    return path


def pairing(actions: ActionsOf) -> Pairing:
    return Pairing(actions=actions, evidence=EVIDENCE[actions])


def test_the_generation_of_each_file_in_a_folder_is_detected_separately(tmp_path: Path) -> None:
    write(tmp_path, "own")
    write(tmp_path, "previous")
    found = load(tmp_path, "B", SPEC)
    assert found.continuous.tolist() == [[0.25], [0.5]] * 2
    assert [file.pairing for file in found.files] == [pairing("own"), pairing("previous")]
    assert [(Path(file.path).name, file.episodes, file.steps) for file in found.files] == [
        ("own.demo", 1, 2),
        ("previous.demo", 1, 2),
    ]
    assert found.chosen([1]).files == found.files


def test_the_setting_makes_a_file_of_unknown_generation_readable(tmp_path: Path) -> None:
    path = write(tmp_path, "neither")
    with pytest.raises(RecordingError, match="set demo_actions beside demo_path"):
        load(path, "B", SPEC)
    assert load(path, "B", SPEC, "own").continuous.tolist() == [[0.25], [0.5]]
    assert load(path, "B", SPEC, "previous").continuous.tolist() == [[0.5], [0.75]]


def test_each_reward_signal_reads_demonstrations_with_its_own_setting(tmp_path: Path) -> None:
    """GAIL and cloning each have the key; a file that both read alike is reported once."""
    path = str(write(tmp_path, "neither"))
    small = NetworkSettings(hidden_units=4, num_layers=1)

    def files(gail: ActionsOf, cloning: ActionsOf) -> list[Pairing | None]:
        settings = TrainerSettings(
            network_settings=small,
            reward_signals=RewardSignals(
                gail=GailSettings(demo_path=path, demo_actions=gail, network_settings=small),
            ),
            behavioral_cloning=BehavioralCloningSettings(demo_path=path, demo_actions=cloning),
        )
        return [file.pairing for file in Learner("B", SPEC, settings, 1).demo_files]

    own, previous = Pairing(actions="own", evidence=FORCED), Pairing(actions="previous", evidence=FORCED)
    assert files("own", "previous") == [own, previous]
    assert files("own", "own") == [own]


@pytest.mark.parametrize("key", ["behavioral_cloning", "reward_signals.gail"])
def test_check_reads_demonstrations_as_training_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    demo, config = write(tmp_path, "neither"), tmp_path / "config.yaml"
    for forced, refused in ((", demo_actions: previous", 0), ("", 1)):
        section = f"{{demo_path: '{demo}'{forced}}}"
        text = (
            f"behavioral_cloning: {section}" if key == "behavioral_cloning" else f"reward_signals: {{gail: {section}}}"
        )
        config.write_text(f"behaviors: {{B: {{{text}}}}}\n")
        assert main(["check", str(config)]) == refused
        assert (
            capsys.readouterr().out.count(f"not found: behaviors.B.{key}.demo_path: got {demo}: an action") == refused
        )


@pytest.mark.parametrize("actions", ["own", "previous"])
def test_info_shows_the_generation_of_a_file_and_its_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], actions: ActionsOf
) -> None:
    path = str(write(tmp_path, actions))
    assert main(["demo", "info", "--json", path]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["demo_actions"] == {"actions": actions, "evidence": EVIDENCE[actions]}
    assert main(["demo", "info", path]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{actions}: the action beside an observation is" in shown


def test_info_on_a_file_of_unknown_generation_needs_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, "neither"))
    assert main(["demo", "info", path]) == 2
    assert "demo_actions" in capsys.readouterr().err
    assert main(["demo", "info", "--json", "--demo-actions", "own", path]) == 0
    assert json.loads(capsys.readouterr().out)[0]["demo_actions"] == {"actions": "own", "evidence": FORCED}
