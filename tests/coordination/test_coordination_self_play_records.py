"""The match table, ratings, and external opponents of a run folder."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from sparring.pipeline.coordination import ghosts as ghosts_module
from sparring.pipeline.coordination.ghosts import MATCHES_FILE, Ghosts, Snapshots
from sparring.pipeline.coordination.opponents import ExternalOpponent, Tournament
from sparring.pipeline.errors import ServiceError
from tests.coordination.ledger_parts import through_json
from tests.coordination.self_play_run import Run, matches_of
from tests.coordination.self_play_world import (
    FAR,
    RecordingTopic,
    behavior_id,
    make,
    matchups,
    results,
    started_rules,
    weights,
)


def table(folder: Path) -> list[int]:
    """Returns the numbers of matches in the table, rotated files included."""
    paths = sorted(folder.glob("matches*.jsonl"), key=lambda path: path.name == MATCHES_FILE)
    return [json.loads(line)["match"] for path in paths for line in path.read_text().splitlines()]


def test_resent_results_are_in_the_table_once(tmp_path: Path) -> None:
    """The file is truncated to the matches of the saved state, whose ratings are restored."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results(matches_of(run, range(1, 4)))
    run.keep()
    saved = dict(run.rules.ratings.elo)
    run.ghosts.results(matches_of(run, range(4, 8)))
    run.ghosts.keep()  # the matching state is not saved any more
    assert table(tmp_path) == list(range(1, 8))
    restarted = run.restart()
    assert restarted.rules.ratings.elo == saved
    assert table(tmp_path) == [1, 2, 3]
    restarted.ghosts.results(matches_of(restarted, range(4, 9)))
    restarted.keep()
    assert table(tmp_path) == list(range(1, 9))
    assert restarted.rules.ratings.matches == 8


def test_resent_results_before_the_first_save_are_in_the_table_once(tmp_path: Path) -> None:
    """A state without matches truncates the table to nothing."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results(matches_of(run, range(1, 4)))
    run.ghosts.keep()
    restarted = run.restart()
    assert table(tmp_path) == []
    restarted.ghosts.results(matches_of(restarted, range(1, 4)))
    restarted.keep()
    assert table(tmp_path) == [1, 2, 3]


def test_a_table_rotated_before_a_crash_neither_doubles_nor_loses_a_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash comes after the rotation, and before the state that records it is saved."""
    monkeypatch.setattr(ghosts_module, "_LONGEST", 100)
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results(matches_of(run, range(1, 4)))
    run.keep()
    run.ghosts.results(matches_of(run, range(4, 6)))
    run.ghosts.keep()  # rotates the table, then crashes
    restarted = run.restart()
    restarted.ghosts.results(matches_of(restarted, range(4, 8)))
    restarted.keep()
    assert table(tmp_path) == list(range(1, 8))


def test_results_that_are_reported_again_are_rated_once(tmp_path: Path) -> None:
    """Of a message that is partly known only the new matches count; each source is counted alone."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    assert len(run.ghosts.results(matches_of(run, range(1, 4)))) == 3
    assert len(run.ghosts.results(matches_of(run, range(2, 7)))) == 3
    assert run.ghosts.results(matches_of(run, range(1, 7))) == []
    assert len(run.ghosts.results(matches_of(run, range(1, 3), "stepping-1.5f3a-1"))) == 2
    run.keep()
    assert table(tmp_path) == [1, 2, 3, 4, 5, 6, 1, 2]
    assert run.rules.ratings.matches == 8
    assert [run.ghosts.received(f"stepping-{at}.5f3a-1") for at in range(3)] == [6, 2, 0]


def test_a_match_without_its_opponent_is_no_win(tmp_path: Path) -> None:
    """Simulators have named the other team, whose agents do not act; the table has the match nevertheless."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    number = matchups(run.rules)[0].number
    ours, theirs = behavior_id("A", 0), behavior_id("A", 1)
    assert run.ghosts.results(results([(number, {ours: 1.0})])) == []
    assert run.ghosts.results(results([(number, {ours: 1.0, theirs: 0.0})], numbers=[2], before=1)) == [("A", 1.0)]
    run.keep()
    assert table(tmp_path) == [1, 2]


def test_lines_of_the_table_name_their_source(tmp_path: Path) -> None:
    """Match numbers are unique within a source only."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    learners = run.ghosts.results(matches_of(run, range(1, 2), "stepping-1.5f3a-2"))
    run.keep()
    (line,) = map(json.loads, (tmp_path / MATCHES_FILE).read_text().splitlines())
    assert (line["source"], line["match"]) == ("stepping-1.5f3a-2", 1)
    assert learners == [("A", 1.0)]


def test_a_snapshot_that_the_user_keeps_beside_those_of_the_run_stays(tmp_path: Path) -> None:
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    own = Snapshots(tmp_path).path("A", 1).with_name("best.safetensors")
    own.touch()
    Snapshots(tmp_path).keep("A", ())
    assert [path.name for path in own.parent.iterdir()] == ["best.safetensors"]


def test_table_of_a_tournament_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its standings are computed from all matches."""
    monkeypatch.setattr(ghosts_module, "_LONGEST", 1)
    ghosts = Ghosts(Tournament(["A"], ["a", "b"], 4), tmp_path, RecordingTopic())
    for number in range(1, 4):
        ghosts._lines.append(json.dumps({"match": number}))
        ghosts.keep()
    assert [path.name for path in tmp_path.glob("matches*")] == [MATCHES_FILE]
    assert table(tmp_path) == [1, 2, 3]


def test_a_restart_without_a_needed_snapshot_names_its_path(tmp_path: Path) -> None:
    """The error names the path of the removed file and the remedy."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    Snapshots(tmp_path).path("A", 1).unlink()
    restarted = Run(tmp_path, {"A": (0, 1)})
    restarted.ghosts.restore(run.saved)
    with pytest.raises(ServiceError, match=r"000000001\.safetensors.*expected.*; "):
        restarted.ghosts.publish()


# ---------------------------------------------------------------- external opponents, and ratings


def test_external_weights_are_published_under_their_number(tmp_path: Path) -> None:
    """Their number is negative, and they are not saved as a snapshot."""
    Snapshots(tmp_path / ghosts_module.PLAYERS_FOLDER).save(weights("A", 1))
    old = ExternalOpponent("old", 1e12)
    rules = make({"A": (0, 1)}, external={"A": [old]})
    topic = RecordingTopic()
    ghosts = Ghosts(rules, tmp_path, topic)
    ghosts.load_external("A", [old])
    ghosts.stepped({"A": (0, 1)}, {})
    ghosts.weights(weights("A", 2))
    ghosts.keep()
    ghosts.publish()
    assert [one.version for one in topic.latest.values()] == [-1]
    assert not Snapshots(tmp_path).path("A", 1).exists()
    assert Snapshots(tmp_path).path("A", 2).exists()
    assert ghosts.described()["opponents"] == ["old"]


def test_external_players_are_loaded_under_negative_numbers(tmp_path: Path) -> None:
    """The first is -1, the second -2, and a missing one is refused."""
    folder = Snapshots(tmp_path / ghosts_module.PLAYERS_FOLDER)
    for version in (1, 2):
        folder.save(weights("A", version, trained=version))
    players = [
        ExternalOpponent("one", 1.0),
        ExternalOpponent("two", 1.0),
        ExternalOpponent("simulator/keeper", 1.0, "keeper"),
    ]
    topic = RecordingTopic()
    rules = make({"A": (0, 1)}, places=32, external={"A": players}, play_against_latest_model_ratio=1.0)
    ghosts = Ghosts(rules, tmp_path, topic)
    ghosts.load_external("A", players)
    ghosts.stepped({"A": (0, 1)}, {})
    ghosts.weights(weights("A", 9))
    ghosts.publish()
    assert sorted((one.version, one.trained, one.script) for one in topic.latest.values() if one.version < 0) == [
        (-3, 0, "keeper"),
        (-2, 2, ""),
        (-1, 1, ""),
    ]
    with pytest.raises(ServiceError, match="expected"):
        ghosts.load_external("A", [*players, ExternalOpponent("four", 1.0)])


def test_mean_and_spread_of_the_opponents_ratings_are_those_of_the_window(tmp_path: Path) -> None:
    """The example has three snapshots with 1000, 1200 and 1400."""
    run = Run(tmp_path, {"A": (0, 1)}, save_steps=10, team_change=FAR)
    run.begin()
    for version in (2, 3):
        run.weights("A", version, 10 * (version - 1))
        run.keep()
    assert not dict(run.ghosts.gauges()), "no match is rated yet"
    run.ghosts.results(matches_of(run, range(1, 2)))
    run.rules.ratings.elo.update({"A": 1250.0, "A@1": 1000.0, "A@2": 1200.0, "A@3": 1400.0})
    found = dict(run.ghosts.gauges())
    assert (found["elo/A"], found["opponents.elo/A"]) == (1250, 1200)
    assert found["opponents.elo_deviation/A"] == pytest.approx((80_000 / 3) ** 0.5)


def test_ratings_hold_win_rate_and_matches_of_each_opponent(tmp_path: Path) -> None:
    """They also hold the team, and whether it learns."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results(matches_of(run, range(1, 4)))
    found = run.ghosts.ratings()["A"]
    assert (found.team, found.learning) == (0, True)
    assert found.elo > 1200 > found.opponents["A@1"].elo
    assert (found.opponents["A@1"].matches, found.opponents["A@1"].win_rate) == (3, 1.0)


def test_weights_that_a_full_disk_refused_are_saved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the window are saved under their own version, although newer ones arrive before there is space."""
    run = Run(tmp_path, {"A": (0, 1)}, save_steps=1, swap_steps=1, team_change=FAR, window=4)
    run.begin()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("sparring.pipeline.coordination.ghosts.write_atomically", refuse)
        for version in (2, 3):
            with pytest.raises(OSError, match="no space"):
                run.ghosts.weights(weights("A", version, 10 * version))
    run.keep()
    assert {2, 3} <= set(run.rules.sides["A"].window)
    for version in (2, 3):
        found = Snapshots(tmp_path).load("A", version)
        assert np.array_equal(found.arrays["actor.weight"], weights("A", version).arrays["actor.weight"])


def test_a_name_added_after_the_save_begins_with_the_initial_rating() -> None:
    rules = started_rules({"A": (0, 1)})
    more = make({"A": (0, 1), "B": (0, 1)}, initial_elo=1100.0)
    more = more.continue_from(through_json(rules))
    assert (more.ratings.elo["A"], more.ratings.elo["B"]) == (1200.0, 1100.0)
