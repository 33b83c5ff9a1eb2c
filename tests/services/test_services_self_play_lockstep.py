"""Self-play in lockstep: a seed repeats weights bit for bit, opponents and matches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.games.duel import simulator
from tests.services.self_play_checks import check_all
from tests.services.self_play_runs import (
    KINDS,
    SELF_PLAY,
    Play,
    fix_task_order,
    match_table,
    plain_settings,
    run_to_end,
    saved_rules,
)
from tests.services.services_helpers import Training, balanced

pytestmark = pytest.mark.usefixtures("one_thread")


def assigned(play: Play) -> list[tuple[int, int, int, dict[str, int]]]:
    """Returns serial, number, team and ghosts of every matchup, in the order of publication."""
    return [
        (assignment.serial, matchup.number, matchup.team, matchup.ghosts)
        for assignment in play.recorder.assignments
        for matchup in assignment.matchups
    ]


def weights(play: Play) -> list[str]:
    """Returns the hashes of the final weights."""
    return [play.graph.latest(f"learning-{name}", "state").weights_sha256 for name in play.graph.names]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "simulators", "sampling"),
    [
        ("symmetric", 2, "uniform"),
        ("asymmetric", 2, "prioritized"),
        pytest.param("symmetric", 1, "prioritized", marks=pytest.mark.slow),
        pytest.param("asymmetric", 1, "uniform", marks=pytest.mark.slow),
        pytest.param("poca", 2, "uniform", marks=pytest.mark.slow),
    ],
)
async def test_same_seed_gives_the_same_weights_opponents_and_matches(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    simulators: int,
    sampling: str,
) -> None:
    """Neither the pace of simulators nor the order of tasks that are ready together changes them."""
    one, found = KINDS[kind], []
    rules = SELF_PLAY | {"opponent_sampling": sampling}
    for order, frame_s in enumerate((0.001, 0.03)):
        fix_task_order(monkeypatch, order)
        games = [one.game() for _ in range(simulators)]
        plain = plain_settings(one, mode="lockstep", max_steps=320, self_play=rules)
        play = await run_to_end(tmp_path_factory.mktemp("run"), games, plain, frame_s=frame_s)
        check_all(play)
        found.append((weights(play), assigned(play), play.table))
    (first, matchups, table), (second, same_matchups, same_table) = found
    assert all(first)
    assert first == second
    assert matchups == same_matchups
    assert len({serial for serial, *_ in matchups}) >= 3
    for name in one.names:
        check_same_matches(table, same_table, name)


@pytest.mark.anyio
@pytest.mark.slow
async def test_another_seed_gives_other_weights_and_opponents(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = []
    for seed in (1, 2):
        plain = plain_settings(KINDS["symmetric"], mode="lockstep")
        play = await run_to_end(tmp_path_factory.mktemp("run"), [KINDS["symmetric"].game()], plain, seed=seed)
        found.append((weights(play), assigned(play)))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def check_same_matches(table: list[dict[str, Any]], other: list[dict[str, Any]], name: str) -> None:
    """Checks that the matches of a learner agree as far as both tables go; the last ones may be unfinished in one."""
    own, same = ([_without_source(line) for line in one if name in line["players"].values()] for one in (table, other))
    common = min(len(own), len(same))
    assert own[:common] == same[:common]
    assert common > 2


def _without_source(line: dict[str, Any]) -> dict[str, Any]:
    """Returns a match without the incarnation that reported it."""
    return {key: value for key, value in line.items() if key != "source"}


# ---------------------------------------------------------------- real processes


def process_settings() -> dict[str, Any]:
    plain: dict[str, Any] = plain_settings(KINDS["asymmetric"], mode="lockstep")
    plain["pipeline"] = {"mode": "lockstep"}
    plain["simulators"] = [simulator(areas=2, asymmetric=True) | {"count": 2}]
    return plain


def outcome(folder: Path, file: Path, run_id: str, *arguments: str) -> tuple[list[str], list[Any], list[Any]]:
    """Runs the command; returns the hashes of weights, the matchups and the match table."""
    training = Training(folder, str(file), "--seed", "5", *arguments, run_id=run_id)
    assert training.end() == 0, "\n".join(training.lines)
    behaviors = training.summary["behaviors"]
    for result in behaviors.values():
        assert balanced(result["step_counts"])
        assert result["step_counts"]["ghost"] > 0
    matchups = saved_rules(training.directory)["matchups"]
    return [result["weights_sha256"] for result in behaviors.values()], matchups, match_table(training.directory)


@pytest.mark.slow
def test_run_repeats_as_several_processes_and_as_one(tmp_path: Path) -> None:
    file = tmp_path / "duel.yaml"
    file.write_text(yaml.safe_dump(process_settings()))
    first, matchups, table = outcome(tmp_path, file, "first")
    second, matchups_again, table_again = outcome(tmp_path, file, "second", "--in-process")
    assert first == second
    assert matchups == matchups_again
    assert len(matchups) >= 9  # an assignment has four matchups
    for name in ("Goal", "GoalRival"):
        check_same_matches(table, table_again, name)
