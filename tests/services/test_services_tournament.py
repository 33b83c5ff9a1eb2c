"""`sparring tournament`: trained policies play each other without learning."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.specs import BehaviorId
from sparring.services.main import main
from sparring.services.supervision.topology import build
from tests.games.duel import Duel, simulator
from tests.services.self_play_runs import KINDS, plain_settings
from tests.services.services_helpers import HANG_S
from tests.services.started import start

PNG = b"\x89PNG\r\n\x1a\n"
MATCHES = 6
Refusal = Callable[..., str]


def finished_run(folder: Path, kind: str = "symmetric", behavior: str = "Goal", checkpoints: int = 2) -> Path:
    """Writes the folder of a run with so many checkpoints of each behavior, as training leaves it."""
    plain: dict[str, Any] = plain_settings(KINDS[kind])
    one = plain["behaviors"]["Goal"]
    asymmetric = kind == "asymmetric"
    plain["behaviors"] = dict.fromkeys([behavior, f"{behavior}Rival"][: 1 + asymmetric], one)
    options = {"asymmetric": asymmetric, "behavior": behavior}
    plain["simulators"] = [simulator(areas=8, **options) | {"count": 2}]
    plain["pipeline"] = {"mode": "overlap"}
    settings = parse_settings(yaml.safe_dump(plain), "test").settings
    folder.mkdir(parents=True)
    build(settings, run_id=folder.name, directory=folder, seed=3).save()
    specs = {BehaviorId.parse(behavior_id).name: spec for behavior_id, spec in Duel(**options).behaviors().items()}  # type: ignore[arg-type]
    for name, spec in specs.items():
        for number in range(checkpoints):
            learner = Learner(name, spec, settings.behaviors[name], seed=3 + number)
            learner.trained, learner.version = 100 * (number + 1), number + 1
            CheckpointFolder(folder, name).save(learner.checkpoint(), keep=9)
    return folder


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a tournament that is refused, and returns its error message."""

    def run(*arguments: object) -> str:
        assert main(["tournament", *map(str, arguments)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        for word in ("got", "expected"):
            assert word in output.err
        return output.err

    return run


def test_single_player_is_refused_with_a_remedy(tmp_path: Path, error_of: Refusal) -> None:
    output = error_of(finished_run(tmp_path / "lonely", checkpoints=1))
    assert "single player" in output
    for remedy in ("another run", "--untrained", "--checkpoints"):
        assert remedy in output


def test_tournament_needs_a_checkpoint(tmp_path: Path, error_of: Refusal) -> None:
    folder = finished_run(tmp_path / "fresh", checkpoints=0)
    output = error_of(folder)
    assert "no checkpoint of Goal" in output
    assert str(folder) in output


def test_run_with_other_behaviors_is_refused_by_name(tmp_path: Path, error_of: Refusal) -> None:
    """Its policies have other observations and actions, or none for a side."""
    duel, race = finished_run(tmp_path / "duel"), finished_run(tmp_path / "race", behavior="Race")
    output = error_of(duel, race)
    assert "Goal" in output
    assert str(race) in output


def test_folder_without_a_run_is_refused(tmp_path: Path, error_of: Refusal) -> None:
    assert str(tmp_path / "nothing") in error_of(tmp_path / "nothing", "--untrained")


@pytest.mark.parametrize(
    "arguments", [("--matches", 0), ("--checkpoints", 0), ("--timeout", 0), ("--timeout", "nan"), ("--timeout", "inf")]
)
def test_impossible_numbers_are_refused(tmp_path: Path, error_of: Refusal, arguments: tuple[str, int]) -> None:
    assert str(arguments[1]) in error_of(finished_run(tmp_path / "run"), *arguments)


def test_refused_tournament_leaves_no_folder(tmp_path: Path, error_of: Refusal) -> None:
    folder = finished_run(tmp_path / "lonely", checkpoints=1)
    error_of(folder)
    assert not list(folder.glob("tournament-*"))


# ---------------------------------------------------------------- whole tournaments


def played(folder: Path, *arguments: str) -> tuple[str, Path, dict[str, Any]]:
    """Runs a tournament; returns its output, its folder and `tournament.json`."""
    command = start(["tournament", *arguments, "--seed", "1", "--matches", str(MATCHES)])
    with command.stdout as stream:
        output = stream.read()
    assert command.wait(HANG_S) == 0, output
    (own,) = folder.glob("tournament-*")
    return output, own, json.loads((own / "tournament.json").read_text())


def check_standings(content: dict[str, Any], players: set[str]) -> None:
    """Checks that every pair has played enough matches, results agree, and intervals contain their values."""
    standings = {one["player"]: one for one in content["players"]}
    assert standings.keys() == players
    ratings = [one["rating"] for one in content["players"]]
    assert ratings == sorted(ratings, reverse=True)
    assert sum(ratings) == pytest.approx(0, abs=1e-6)
    for name, one in standings.items():
        low, high = one["interval"]
        assert low < one["rating"] < high
        assert one["against"].keys() == players - {name}
        for other, against in one["against"].items():
            back = standings[other]["against"][name]
            assert against["matches"] == back["matches"] >= MATCHES
            assert against["share"] + back["share"] == pytest.approx(1)
            assert against["interval"][0] <= against["share"] <= against["interval"][1]


@pytest.mark.slow
def test_tournament_between_checkpoints_prints_and_saves_its_result(tmp_path: Path) -> None:
    """It prints a table, writes `tournament.json` and a heat map, and does not change the run."""
    folder = finished_run(tmp_path / "duel")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    players = {"untrained", "duel@100", "duel@200"}
    output, own, content = played(folder, str(folder), "--checkpoints", "2", "--untrained")
    assert content["status"] == "completed"
    assert content["complete"]
    check_standings(content, players)
    for word in ("player", "rating", *players, str(own / "tournament.json")):
        assert word in output
    assert (own / "tournament.png").read_bytes().startswith(PNG)
    assert all(path.read_bytes() == content for path, content in before.items())
    table = [json.loads(line) for line in (own / "matches.jsonl").read_text().splitlines()]
    assert {player for line in table for player in line["players"].values()} == players
    assert len({line["match"] for line in table}) == len(table) >= 3 * MATCHES


@pytest.mark.slow
def test_killed_coordination_ends_a_tournament_whose_results_it_held(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "duel")
    command = start(["tournament", str(folder), "--untrained", "--matches", "100000"])
    with command.stdout as stream:
        while not [path for path in folder.glob("tournament-*/matches.jsonl") if path.stat().st_size]:
            assert command.poll() is None
            time.sleep(0.1)
        (log,) = folder.glob("tournament-*/logs/supervisor.jsonl")
        started = [json.loads(line) for line in log.read_text().splitlines()]
        os.kill(next(one["pid"] for one in started if one.get("part") == "coordination"), signal.SIGKILL)
        output = stream.read()
    assert command.wait(HANG_S) == 1, output
    assert "got coordination, which was restarted during a tournament" in output


@pytest.mark.slow
def test_tournament_that_runs_out_of_time_is_not_complete(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "duel")
    command = start(["tournament", str(folder), "--untrained", "--matches", "100000", "--timeout", "2", "--in-process"])
    with command.stdout as stream:
        output = stream.read()
    assert command.wait(HANG_S) == 1, output
    (file,) = folder.glob("tournament-*/tournament.json")
    content = json.loads(file.read_text())
    assert not content["complete"]
    assert f"{content['matches']} of 100000 matches of each pair" in output


@pytest.mark.slow
def test_players_of_two_asymmetric_runs_play_both_sides_in_one_process(tmp_path: Path) -> None:
    """Each player has a policy for each behavior, and plays both sides against every other."""
    first = finished_run(tmp_path / "first", "asymmetric", checkpoints=1)
    second = finished_run(tmp_path / "second", "asymmetric", checkpoints=1)
    players = {"first@100", "second@100"}
    _, own, content = played(first, str(first), str(second), "--in-process")
    check_standings(content, players)
    assert not list(second.glob("tournament-*"))
    table = [json.loads(line) for line in (own / "matches.jsonl").read_text().splitlines()]
    assert {tuple(sorted(line["players"].items())) for line in table} == {
        (("Goal?team=0", one), ("GoalRival?team=1", other)) for one in players for other in players if one != other
    }
