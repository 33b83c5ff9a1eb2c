"""Self-play in lockstep: the same seed gives the same weights to the bit, the same opponents and the same matches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from trio.testing import MockClock

from tests.services.self_play_runs import (
    KINDS,
    SELF_PLAY,
    Play,
    check_all,
    match_table,
    plain_settings,
    same_order,
    saved_rules,
    whole,
)
from tests.services.services_helpers import Training, balanced


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assigned(play: Play) -> list[tuple[int, int, int, dict[str, int]]]:
    """Serial, number, team and ghosts of every draw, in the order in which they were told."""
    return [
        (assignment.serial, matchup.number, matchup.team, matchup.ghosts)
        for assignment in play.witness.assignments
        for matchup in assignment.matchups
    ]


def weights(play: Play) -> list[str]:
    """Hashes of the final weights."""
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
async def test_the_same_seed_gives_the_same_weights_opponents_and_matches(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    simulators: int,
    sampling: str,
) -> None:
    """Whatever the simulators' pace, and in whatever order tasks run that are ready together."""
    one, found = KINDS[kind], []
    rules = SELF_PLAY | {"opponent_sampling": sampling}
    for order, frame_s in enumerate((0.001, 0.03)):
        same_order(monkeypatch, order)
        games = [one.game() for _ in range(simulators)]
        plain = plain_settings(one, mode="lockstep", max_steps=320, self_play=rules)
        play = await whole(tmp_path_factory.mktemp("run"), games, plain, frame_s=frame_s)
        check_all(play)
        found.append((weights(play), assigned(play), play.table))
    (first, matchups, table), (second, same_draws, same_table) = found
    assert all(first)
    assert first == second
    assert matchups == same_draws
    assert len({serial for serial, *_ in matchups}) >= 3
    for name in one.names:
        compare(table, same_table, name)


@pytest.mark.anyio
@pytest.mark.slow
async def test_another_seed_gives_other_weights_and_opponents(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = []
    for seed in (1, 2):
        plain = plain_settings(KINDS["symmetric"], mode="lockstep")
        play = await whole(tmp_path_factory.mktemp("run"), [KINDS["symmetric"].game()], plain, seed=seed)
        found.append((weights(play), assigned(play)))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def compare(table: list[dict[str, Any]], other: list[dict[str, Any]], name: str) -> None:
    """The matches of a learner are the same, as far as both tables go: nobody promises when the last ones end."""
    own, same = ([_unreported(line) for line in one if name in line["players"].values()] for one in (table, other))
    common = min(len(own), len(same))
    assert own[:common] == same[:common]
    assert common > 2


def _unreported(line: dict[str, Any]) -> dict[str, Any]:
    """A match without the name of the start that told of it."""
    return {key: value for key, value in line.items() if key != "source"}


# ---------------------------------------------------------------- real processes


def process_settings(asymmetric: bool, simulators: int) -> dict[str, Any]:
    plain: dict[str, Any] = plain_settings(KINDS["asymmetric" if asymmetric else "symmetric"], mode="lockstep")
    plain["pipeline"] = {"mode": "lockstep"}
    options = {"asymmetric": asymmetric}
    plain["simulators"] = [{"name": "duel", "count": simulators, "areas": 2, "options": options}]
    return plain


def outcome(folder: Path, file: Path, run_id: str, *arguments: str) -> tuple[list[str], list[Any], list[Any]]:
    """Hashes of weights, draws and the match table of a run of the command."""
    training = Training(folder, str(file), "--seed", "5", *arguments, run_id=run_id)
    assert training.end() == 0, "\n".join(training.lines)
    behaviors = training.summary["behaviors"]
    for figures in behaviors.values():
        assert balanced(figures["step_counts"])
        assert figures["step_counts"]["ghost"] > 0
    matchups = saved_rules(training.directory)["matchups"]
    return [figures["weights_sha256"] for figures in behaviors.values()], matchups, match_table(training.directory)


@pytest.mark.slow
@pytest.mark.parametrize(("asymmetric", "simulators"), [(False, 2), (True, 1)], ids=["symmetric-2", "asymmetric-1"])
def test_a_run_repeats_itself_as_processes_and_in_one(tmp_path: Path, asymmetric: bool, simulators: int) -> None:
    file = tmp_path / "duel.yaml"
    file.write_text(yaml.safe_dump(process_settings(asymmetric, simulators)))
    first, told, table = outcome(tmp_path, file, "first")
    second, told_again, table_again = outcome(tmp_path, file, "second", "--in-process")
    assert first == second
    assert told == told_again
    assert len(told) >= 9  # an assignment has four draws
    for name in ("Goal", "GoalRival")[: 1 + asymmetric]:
        compare(table, table_again, name)
