"""Invariants of self-play, checked on what a run has published and saved."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict

from sparring.pipeline.messages.matches import MatchupAssignment
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.specs import BehaviorId
from tests.services.self_play_runs import Play
from tests.services.services_helpers import balanced


def check_step_counts(play: Play) -> dict[str, dict[str, int]]:
    """The step counts of every behavior balance; returns them by behavior."""
    found = {}
    for name in play.graph.names:
        step_counts = found[name] = play.graph.step_counts(name)
        assert balanced(step_counts), step_counts
        assert min(step_counts.values()) >= 0, (name, step_counts)
    return found


def check_ghosts_are_not_learned_from(play: Play) -> None:
    """A learner receives steps of the learning team only, of matchups that were published before."""
    matchups, names = play.recorder.matchups, play.graph.names
    for name in names:
        received = play.recorder.received[f"segments:{name}"]
        assert any(len(record.lengths) for record in received)
        for record in received:
            if not len(record.lengths):
                continue
            assert record.matchups is not None
            teams = [matchups[number].team for number in record.matchups.tolist()]
            assert record.teams.tolist() == teams
            for number, team in zip(record.matchups.tolist(), teams, strict=True):
                assert str(BehaviorId(name=name, team=team)) not in matchups[number].ghosts


def check_numbers_only_rise(play: Play) -> None:
    """Versions and assignments only rise, and teams take turns of `team_change` steps."""
    for name in play.graph.names:
        versions = [weights.version for weights in play.recorder.records(f"policy-{name}", "weights")]
        assert all(a < b for a, b in itertools.pairwise(versions)), versions
    serials: dict[int, MatchupAssignment] = {}
    latest = 0
    for assignment in play.recorder.assignments:
        assert assignment.serial >= latest
        latest = assignment.serial
        assert asdict(serials.setdefault(latest, assignment)) == asdict(assignment)
    numbers = [max(matchup.number for matchup in one.matchups) for one in serials.values()]
    assert numbers == sorted(numbers)
    _check_turns(play)


def _check_turns(play: Play) -> None:
    """Between two changes of team a learner of the team trains on `team_change` steps, or finishes."""
    behaviors = play.settings["behaviors"]
    trained, since_change = Counter[str](), Counter[str]()
    team: int | None = None
    for topic, _, record in play.recorder.published:
        if isinstance(record, PolicyWeights) and topic.startswith("policy-"):
            name = record.behavior
            since_change[name] += max(0, record.trained - trained[name])
            trained[name] = record.trained
        if isinstance(record, MatchupAssignment):
            new = record.matchups[0].team
            if team is not None and new != team:
                assert any(
                    since_change[name] >= one["self_play"]["team_change"] or trained[name] >= one["max_steps"]
                    for name, one in behaviors.items()
                ), f"team {new} after {dict(since_change)} steps of team {team}"
                since_change.clear()
            team = new


def check_matches_are_rated_once(play: Play) -> None:
    """Each match has one line, names a published matchup, and counts once in the ratings."""
    table, matchups = play.table, play.recorder.matchups
    keys = [(line["source"], line["match"]) for line in table]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert not twice
    assert play.saved["ratings"]["matches"] == len(table) > 0
    assert play.saved["unknown"] == 0
    for line in table:
        matchup = matchups[line["matchup"]]
        assert line["team"] == matchup.team
        ghosts = {
            behavior_id: player
            for behavior_id, player in line["players"].items()
            if BehaviorId.parse(behavior_id).team != matchup.team
        }
        assert ghosts == {
            behavior_id: _player_name(play, behavior_id, matchup.ghosts[behavior_id]) for behavior_id in ghosts
        }


def _player_name(play: Play, behavior_id: str, number: int) -> str:
    """Returns the name of a ghost: a snapshot, or one of the scripted opponents in the settings."""
    name = BehaviorId.parse(behavior_id).name
    if number > 0:
        return f"{name}@{number}"
    return f"simulator/{play.settings['behaviors'][name]['self_play']['opponents'][-number - 1]['scripted']}"


def check_no_resets(play: Play) -> None:
    """A simulator is reset once per connection, unless the connection breaks before that."""
    for game in play.games:
        assert max(game.resets) == game.resets[-1] == 1, game.resets


def check_all(play: Play) -> dict[str, dict[str, int]]:
    """Checks all invariants; returns the step counts by behavior."""
    step_counts = check_step_counts(play)
    assert not play.graph.faults
    check_ghosts_are_not_learned_from(play)
    check_numbers_only_rise(play)
    check_matches_are_rated_once(play)
    check_no_resets(play)
    return step_counts
