"""`sparring record`: real simulator processes, and the files that come of them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sparring.pipeline.demonstrations.episodes import Recording, read
from sparring.pipeline.demonstrations.library import load
from sparring.pipeline.games.goal import Goal
from sparring.pipeline.games.tag import Tag
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.simulation.client import run as play
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.policies import Policies
from sparring.services.commands import record as record_service
from sparring.services.commands.players import actor_of, load_player
from sparring.services.commands.record_actors import _Network
from sparring.services.main import COMMANDS, main
from tests.services.record_game import LAST, SPEC, Played

GAME = Path(__file__).parent / "record_game.py"
SMALL: dict[str, Any] = {"hidden_units": 16, "num_layers": 1}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "record", "record episodes of a simulator as demonstrations")


def configuration(folder: Path, behavior: str, simulators: list[dict[str, Any]], **pipeline: Any) -> str:
    plain = {"behaviors": {behavior: {"network_settings": SMALL}}, "simulators": simulators, "pipeline": pipeline}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(plain))
    return str(file)


def goal(folder: Path, areas: int = 3, **options: Any) -> str:
    return configuration(folder, "Goal", [{"name": "goal", "areas": areas, "options": options, "count": 2}])


def played(folder: Path, mode: str) -> str:
    return configuration(folder, "Hand", [{"command": [sys.executable, str(GAME), mode]}])


def checkpoint(folder: Path, game: Any, network: dict[str, Any], index: int = 0) -> Path:
    """A checkpoint, untrained, for a behavior of a game."""
    text, spec = list(game.behaviors().items())[index]
    name = BehaviorId.parse(text).name
    settings = TrainerSettings(network_settings=NetworkSettings.model_validate(network))
    state = Learner(name, spec, settings, seed=3).checkpoint()
    if "actor.body.head.bias" in state.weights:  # a memory: it walks to one side, so that its episodes end
        state.weights["actor.body.head.bias"] += 1
        state.weights["actor.body.head.weight"] *= 20
    return CheckpointFolder(folder, name).save(state, keep=1)


def record(folder: Path, *arguments: str, status: int = 0) -> Recording | None:
    """Runs the command; the one file that it has written."""
    assert main(["record", *arguments, "--out", str(folder / "demos"), "--seed", "7"]) == status
    files = sorted((folder / "demos").glob("*"))
    assert len(files) < 2
    return read(files[0]) if files else None


# ---------------------------------------------------------------- with a checkpoint


def test_a_checkpoint_is_recorded_and_can_be_learned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each reward is that of the action beside it, which replaying the rules of the game proves."""
    path = checkpoint(tmp_path / "run", Goal(), SMALL)
    found = record(tmp_path, goal(tmp_path), "--policy", str(path), "--episodes", "6")
    assert found is not None
    assert found.columns["agents"].tolist() == [1, 2, 3, 4, 5, 6]
    assert found.columns["terminated"].all()
    ends = np.cumsum(found.columns["lengths"])
    for first, after in zip(ends - found.columns["lengths"], ends, strict=True):
        rows = slice(first, after)
        seen = found.columns["observation.0"][rows, 0]
        assert len(set(seen.tolist())) == 1
        place = 0.0
        for action, reward in zip(found.columns["continuous"][rows, 0], found.columns["rewards"][rows], strict=True):
            place = min(max(place + float(np.clip(action, -0.2, 0.2)), -1.0), 1.0)
            assert reward == pytest.approx(1.06 * place * seen[0] if abs(place) > 0.99999 else -0.01)
    said = capsys.readouterr().out
    mean = found.columns["rewards"].sum() / 6
    assert f"Goal: 6 episodes, {ends[-1]} steps; mean return {mean:.4g}, deviation" in said
    assert load(tmp_path / "demos", "Goal", found.spec).episodes == 6


def test_the_same_seed_records_the_same(tmp_path: Path) -> None:
    """Simulator and sampling draw from the seed; a run folder stands for its newest checkpoint."""
    checkpoint(tmp_path / "run", Goal(), SMALL)
    arguments = (goal(tmp_path), "--policy", str(tmp_path / "run"), "--episodes", "2")
    one, two = record(tmp_path, *arguments), record(tmp_path, *arguments, "--force")
    assert one is not None
    assert two is not None
    for name, column in one.columns.items():
        np.testing.assert_array_equal(column, two.columns[name], name)


def test_files_are_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files that are there are named, and stay as they are."""
    path = checkpoint(tmp_path / "run", Goal(), SMALL)
    arguments = (goal(tmp_path), "--policy", str(path), "--episodes", "1")
    record(tmp_path, *arguments)
    (file,) = (tmp_path / "demos").iterdir()
    before = file.read_bytes()
    record(tmp_path, *arguments, status=2)
    assert file.name in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_policy_that_remembers_remembers_each_agent_for_its_episode(tmp_path: Path) -> None:
    """The recorded actions are those of a policy that is led through each episode by itself, from zeros."""
    network = SMALL | {"memory": {"memory_size": 8, "sequence_length": 4}}
    path = checkpoint(tmp_path / "run", Goal(memory=True), network)
    arguments = ("--policy", str(path), "--episodes", "8", "--deterministic")
    found = record(tmp_path, goal(tmp_path, memory=True), *arguments)
    assert found is not None
    settings = NetworkSettings.model_validate(network | {"deterministic": True})
    policies = Policies({"Goal": _Network(settings)}, 0)
    policies.learn(actor_of(load_player(path)))
    policies.build("Goal", found.spec)
    policy = policies.current["Goal"]
    assert policy.carried == 8
    row = 0
    for length in found.columns["lengths"].tolist():
        carried = np.zeros((1, policy.carried), np.float32)
        for at in range(row, row + length):
            chosen = policy.act((found.columns["observation.0"][at : at + 1],), None, carried)
            np.testing.assert_allclose(found.columns["continuous"][at], chosen.executed[0], atol=1e-5)
        row += length
    assert len(set(found.columns["continuous"][:4, 0].tolist())) == 4  # memory shows


def test_a_checkpoint_of_another_spec_or_behavior_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing acts with weights that were trained for something else."""
    path = checkpoint(tmp_path / "run", Goal(actions=2), SMALL)
    record(tmp_path, goal(tmp_path), "--policy", str(path), status=2)
    assert "record with the simulator that it was trained in" in capsys.readouterr().err
    path = checkpoint(tmp_path / "run", Goal(behavior="Other"), SMALL)
    record(tmp_path, goal(tmp_path), "--policy", str(path), status=2)
    assert "a checkpoint of Other" in capsys.readouterr().err
    record(tmp_path, goal(tmp_path), "--policy", str(tmp_path / "none"), status=2)
    assert "not there" in capsys.readouterr().err


def test_all_behaviors_act_and_those_asked_for_are_recorded(tmp_path: Path) -> None:
    """A run folder has a checkpoint of each behavior; only the named ones get a file."""
    tag = Tag()
    names = [checkpoint(tmp_path / "run", tag, SMALL, index).parent.name for index in range(2)]
    config = configuration(tmp_path, names[0], [{"name": "tag"}])
    found = record(
        tmp_path, config, "--policy", str(tmp_path / "run"), "--behavior", names[1], "--episodes", "2", "--force"
    )
    assert found is not None
    assert found.behavior == names[1]
    assert found.spec == list(tag.behaviors().values())[1]
    assert len(found.columns["lengths"]) == 2


# ---------------------------------------------------------------- the simulator plays


@pytest.mark.parametrize("how", [("--manual",), ("--script", "clever")])
def test_what_a_person_or_a_script_did_is_recorded(tmp_path: Path, how: tuple[str, ...]) -> None:
    """The action of a step is what the simulator says of it, not what it was told."""
    found = record(tmp_path, played(tmp_path, "tells"), *how, "--episodes", "4")
    assert found is not None
    assert found.spec == SPEC
    assert found.columns["lengths"].tolist() == [3, 4, 3, 4]
    assert found.columns["terminated"].tolist() == [True, False, True, False]
    times = np.array([1, 2, 3, 1, 2, 3, 4, 4, 5, 6, 5, 6, 7, 8])
    np.testing.assert_array_equal(found.columns["rewards"], times)
    np.testing.assert_allclose(found.columns["continuous"][:, 0], times / 100, rtol=1e-6)
    np.testing.assert_array_equal(found.columns["discrete"][:, 0], times % 2)
    np.testing.assert_array_equal(found.columns["final_observation.0"][:, 0], [3, 4, 3, 4])


@pytest.mark.parametrize("how", [("--manual",), ("--script", "clever")])
def test_a_simulator_that_does_not_say_what_was_done_is_refused(
    tmp_path: Path, how: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Zeros that nobody chose are no demonstration."""
    assert record(tmp_path, played(tmp_path, "silent"), *how, status=2) is None
    assert "did_continuous" in capsys.readouterr().err


def test_a_script_of_a_built_in_game_that_does_not_say_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Soccer plays by a script when asked, and does not tell of it."""
    soccer = configuration(tmp_path, "Soccer", [{"name": "soccer"}])
    assert record(tmp_path, soccer, "--script", "scripted", status=2) is None
    assert "do not say what was done" in capsys.readouterr().err
    assert record(tmp_path, soccer, "--script", "brilliant", status=2) is None
    assert "['scripted', 'still']" in capsys.readouterr().err


def test_a_simulator_that_dials_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without simulators in the configuration the command says where it waits."""
    address = f"unix://{tmp_path}/socket"
    config = configuration(tmp_path, "Hand", [], address=address)
    simulator = threading.Thread(target=play, args=(Played("tells"), address))
    simulator.start()
    found = record(tmp_path, config, "--manual", "--episodes", "1")
    simulator.join(20)
    assert not simulator.is_alive()
    assert found is not None
    assert found.columns["lengths"].tolist() == [3]
    assert f"waiting for a simulator at {address}" in capsys.readouterr().out


# ---------------------------------------------------------------- early ends


def test_a_person_may_end_the_play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has ended by then is kept, and what is left out is counted; after a Bye that is no failure."""
    found = record(tmp_path, played(tmp_path, "quits"), "--manual", "--episodes", "40")
    assert found is not None
    assert found.columns["lengths"].tolist().count(3) == 6
    said = capsys.readouterr().out
    assert "Hand: 2 episodes had not ended and are left out" in said
    assert "said Bye" in said
    assert record(tmp_path, played(tmp_path, "quits"), "--script", "clever", "--force", status=1) is not None


def test_ctrl_c_keeps_what_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulator hears a Bye, and the files are written."""
    answer, told = record_service._Session.answer, []

    def interrupted(session: Any, step: Any) -> Any:
        if step.sequence == LAST:
            told.append(step)
            raise KeyboardInterrupt
        return answer(session, step)

    monkeypatch.setattr(record_service._Session, "answer", interrupted)
    found = record(tmp_path, played(tmp_path, "tells"), "--manual", "--episodes", "40")
    assert found is not None
    assert found.columns["lengths"].tolist().count(3) == 6
    assert len(told) == 1
    assert "stopped by the user" in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "says"), [("dies", "exit status 9"), ("wrong", "agent 77")])
def test_a_simulator_that_fails_costs_no_episode_that_has_ended(
    tmp_path: Path, mode: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 1 and says why; the episodes of before are written."""
    found = record(tmp_path, played(tmp_path, mode), "--manual", "--episodes", "40", status=1)
    assert found is not None
    assert found.columns["lengths"].tolist().count(3) == 6
    assert says in capsys.readouterr().err


def test_a_simulator_that_does_not_start_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last words are in the message; nobody waits for a timeout."""
    assert record(tmp_path, played(tmp_path, "absent"), "--manual", status=1) is None
    assert "exit status 1: no display" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--episodes", "0"), "--episodes 0"),
        (("--timeout", "-1"), "--timeout -1"),
        (("--deterministic",), "--deterministic without --policy"),
        (("--behavior", "Foot", "Hand"), "['Foot']"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 2, and what was got."""
    assert record(tmp_path, played(tmp_path, "tells"), "--manual", *arguments, status=2) is None
    assert says in capsys.readouterr().err
