"""`sparring record` with real simulator processes, and the files that it writes."""

from __future__ import annotations

import signal
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
from sparring.services.commands.players import actor_of
from sparring.services.main import COMMANDS, main
from sparring.services.supervision.launch import load_player
from tests.services.record_game import LAST, SPEC, ReportingGame

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
    """Saves an untrained checkpoint for a behavior of a game; returns its folder."""
    text, spec = list(game.behaviors().items())[index]
    name = BehaviorId.parse(text).name
    settings = TrainerSettings(network_settings=NetworkSettings.model_validate(network))
    state = Learner(name, spec, settings, seed=3).checkpoint()
    if "actor.body.head.bias" in state.weights:  # a policy with memory moves to one side, so that its episodes end
        state.weights["actor.body.head.bias"] += 1
        state.weights["actor.body.head.weight"] *= 20
    return CheckpointFolder(folder, name).save(state, keep=1)


def record(folder: Path, *arguments: str, status: int = 0) -> Recording | None:
    """Runs the command; returns the recording of its only file."""
    assert main(["record", *arguments, "--out", str(folder / "demos"), "--seed", "7"]) == status
    files = sorted((folder / "demos").glob("*"))
    assert len(files) < 2
    return read(files[0]) if files else None


# ---------------------------------------------------------------- with a checkpoint


def test_recorded_checkpoint_can_be_learned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each recorded reward belongs to its action, as the rules of the game prove."""
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
    output = capsys.readouterr().out
    mean = found.columns["rewards"].sum() / 6
    assert f"Goal: 6 episodes, {ends[-1]} steps; mean return {mean:.4g}, deviation" in output
    assert load(tmp_path / "demos", "Goal", found.spec).episodes == 6


def test_same_seed_records_the_same_episodes(tmp_path: Path) -> None:
    """The seed decides simulator and sampling; the folder of a run means its newest checkpoint."""
    checkpoint(tmp_path / "run", Goal(), SMALL)
    arguments = (goal(tmp_path), "--policy", str(tmp_path / "run"), "--episodes", "2")
    one, two = record(tmp_path, *arguments), record(tmp_path, *arguments, "--force")
    assert one is not None
    assert two is not None
    for name, column in one.columns.items():
        np.testing.assert_array_equal(column, two.columns[name], name)


def test_files_are_not_replaced_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command names existing files and does not change them."""
    path = checkpoint(tmp_path / "run", Goal(), SMALL)
    arguments = (goal(tmp_path), "--policy", str(path), "--episodes", "1")
    record(tmp_path, *arguments)
    (file,) = (tmp_path / "demos").iterdir()
    before = file.read_bytes()
    record(tmp_path, *arguments, status=2)
    assert file.name in capsys.readouterr().err
    assert file.read_bytes() == before


def test_policy_with_memory_keeps_the_state_of_each_agent_for_its_episode(tmp_path: Path) -> None:
    """The recorded actions are those of a policy that acts through each episode alone, from a state of zeros."""
    network = SMALL | {"memory": {"memory_size": 8, "sequence_length": 4}}
    path = checkpoint(tmp_path / "run", Goal(memory=True), network)
    arguments = ("--policy", str(path), "--episodes", "8", "--deterministic")
    found = record(tmp_path, goal(tmp_path, memory=True), *arguments)
    assert found is not None
    settings = NetworkSettings.model_validate(network | {"deterministic": True})
    policies = Policies({"Goal": TrainerSettings(network_settings=settings)}, 0)
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
    assert len(set(found.columns["continuous"][:4, 0].tolist())) == 4  # the actions depend on memory


def test_checkpoint_of_another_spec_or_behavior_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights act only in the behavior and spec that they were trained for."""
    path = checkpoint(tmp_path / "run", Goal(actions=2), SMALL)
    record(tmp_path, goal(tmp_path), "--policy", str(path), status=2)
    assert "record with the simulator that it was trained in" in capsys.readouterr().err
    path = checkpoint(tmp_path / "run", Goal(behavior="Other"), SMALL)
    record(tmp_path, goal(tmp_path), "--policy", str(path), status=2)
    assert "a checkpoint of Other" in capsys.readouterr().err
    record(tmp_path, goal(tmp_path), "--policy", str(tmp_path / "none"), status=2)
    assert "expected a folder, or one of the runs in results" in capsys.readouterr().err


def test_all_behaviors_act_and_the_named_ones_are_recorded(tmp_path: Path) -> None:
    """A run folder has a checkpoint of each behavior; only named behaviors are written."""
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
def test_actions_of_a_person_or_script_are_recorded(tmp_path: Path, how: tuple[str, ...]) -> None:
    """The recorded action of a step is the one that the simulator reports, not the one sent to it."""
    found = record(tmp_path, played(tmp_path, "reports"), *how, "--episodes", "4")
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
def test_simulator_that_reports_no_actions_is_refused(
    tmp_path: Path, how: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without reported actions there is no demonstration."""
    assert record(tmp_path, played(tmp_path, "silent"), *how, status=2) is None
    assert "did_continuous" in capsys.readouterr().err


def test_script_that_reports_no_actions_or_is_unknown_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Soccer plays scripts but does not report their actions."""
    soccer = configuration(tmp_path, "Soccer", [{"name": "soccer"}])
    assert record(tmp_path, soccer, "--script", "scripted", status=2) is None
    assert "do not report what was done" in capsys.readouterr().err
    assert record(tmp_path, soccer, "--script", "brilliant", status=2) is None
    assert "['scripted', 'still']" in capsys.readouterr().err


def test_simulator_started_by_hand_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without simulators in the configuration the command prints the address at which it waits."""
    address = f"unix://{tmp_path}/socket"
    config = configuration(tmp_path, "Hand", [], address=address)
    simulator = threading.Thread(target=play, args=(ReportingGame("reports"), address))
    simulator.start()
    found = record(tmp_path, config, "--manual", "--episodes", "1")
    simulator.join(20)
    assert not simulator.is_alive()
    assert found is not None
    assert found.columns["lengths"].tolist() == [3]
    assert f"waiting for a simulator at {address}" in capsys.readouterr().out


# ---------------------------------------------------------------- early ends


def test_person_can_end_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Complete episodes are written, and open ones are counted; after a Bye that is no failure."""
    found = record(tmp_path, played(tmp_path, "quits"), "--manual", "--episodes", "40")
    assert found is not None
    assert found.columns["lengths"].tolist().count(3) == 6
    output = capsys.readouterr().out
    assert "Hand: 2 episodes had not ended and are left out" in output
    assert "sent Bye" in output
    assert record(tmp_path, played(tmp_path, "quits"), "--script", "clever", "--force", status=1) is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_that_ends_the_command_keeps_complete_episodes(
    tmp_path: Path,
    number: signal.Signals,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The simulator receives a Bye, and the files are written, also where a second signal follows at once."""
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, before))  # `nohup` has the tests ignore a hangup
    answer, interrupted_steps = record_service._Session.answer, []

    def interrupted(session: Any, step: Any) -> Any:
        if step.sequence == LAST:
            interrupted_steps.append(step)
            signal.raise_signal(number)
        return answer(session, step)

    def again(session: Any) -> Any:
        signal.raise_signal(number)
        return write(session)

    write = record_service._Session.write
    monkeypatch.setattr(record_service._Session, "answer", interrupted)
    monkeypatch.setattr(record_service._Session, "write", again)
    found = record(tmp_path, played(tmp_path, "reports"), "--manual", "--episodes", "40")
    assert found is not None
    assert found.columns["lengths"].tolist().count(3) == 6
    assert len(interrupted_steps) == 1
    assert "stopped by the user" in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "message"), [("dies", "exit status 9"), ("wrong", "agent 77")])
def test_failed_simulator_loses_no_complete_episode(
    tmp_path: Path, mode: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 1, the message has the cause, and complete episodes are written."""
    found = record(tmp_path, played(tmp_path, mode), "--manual", "--episodes", "40", status=1)
    assert found is not None
    assert found.columns["lengths"].tolist().count(3) == 6
    assert message in capsys.readouterr().err


def test_simulator_that_does_not_start_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its final report is in the message, and no timeout passes."""
    assert record(tmp_path, played(tmp_path, "absent"), "--manual", status=1) is None
    assert "exit status 1: no display" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--episodes", "0"), "--episodes 0"),
        (("--timeout", "-1"), "--timeout -1"),
        (("--deterministic",), "--deterministic without --policy"),
        (("--behavior", "Foot", "Hand"), "['Foot']"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 2, and the message repeats the argument."""
    assert record(tmp_path, played(tmp_path, "reports"), "--manual", *arguments, status=2) is None
    assert message in capsys.readouterr().err
