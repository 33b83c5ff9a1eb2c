"""Self-play that is stopped at any moment goes on as if it had not been, and what it publishes is on disk before."""

from __future__ import annotations

import errno
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination import ghosts as ghosts_module
from sparring.pipeline.coordination.ghosts import MATCHES_FILE, Ghosts
from sparring.pipeline.coordination.opponents import ExternalOpponent
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.snapshots import Snapshots
from sparring.pipeline.errors import ServiceError
from tests.coordination.self_play_world import (
    FAR,
    LAYOUTS,
    Event,
    Layout,
    NotingBoard,
    Source,
    begun,
    behavior_id,
    histories,
    make,
    matchups,
    one_settings,
    plain_assignment,
    results,
    tell,
    weights,
)

KINDS = ("weights", "weights", "ghosts", "ghosts", "back", "match", "match")


def play_match(rules: SelfPlay, event: Event) -> None:
    """A match under one of the draws, decided by the event."""
    matchup = matchups(rules)[event.steps % len(matchups(rules))]
    own = [behavior_id(name, matchup.team) for name in rules.learning]
    scores = dict.fromkeys(own, (event.steps % 3) / 2) | dict.fromkeys(matchup.ghosts, 1 - (event.steps % 3) / 2)
    list(rules.results(results([(matchup.number, scores)])))


def hear(rules: SelfPlay, source: Source, event: Event) -> None:
    if event.kind == "match":
        play_match(rules, event)
    else:
        tell(rules, source.say(event))


def through_json(plain: Any) -> Any:
    return json.loads(json.dumps(plain))


@settings(max_examples=150)
@given(
    layout=st.sampled_from(LAYOUTS),
    own=one_settings(),
    sampling=st.sampled_from(["uniform", "prioritized"]),
    strangers=st.integers(0, 2),
    lockstep=st.booleans(),
    history=histories(KINDS),
    stop=st.integers(0, 60),
)
def test_rules_that_were_stopped_go_on_as_those_that_were_not(
    layout: Layout,
    own: dict[str, Any],
    sampling: str,
    strangers: int,
    lockstep: bool,
    history: list[Event],
    stop: int,
) -> None:
    """Same assignments, ratings, records and counters after every event; boards tell the latest weights again."""
    elsewhere = {"A": [ExternalOpponent(f"old {at}", 0.5) for at in range(strangers)]}
    said = {"lockstep": lockstep, "elsewhere": elsewhere, "opponent_sampling": sampling, "max_steps": 300, **own}
    one = other = begun(layout, **said)
    sources = [Source(layout, dict.fromkeys(layout, 300)) for _ in range(2)]
    for at, event in enumerate(history):
        if at == stop % len(history):
            other = make(layout, **said)
            other.restore(through_json(one.to_plain()))
            assert plain_assignment(other) == plain_assignment(one)
            for name, stand in sources[0].stands.items():
                other.weights(name, stand.version, stand.trained)
                other.set_teams(name, layout[name])
        hear(one, sources[0], event)
        if other is not one:
            hear(other, sources[1], event)
        elif event.kind != "match":
            sources[1].say(event)
        assert plain_assignment(other) == plain_assignment(one)
        assert through_json(other.to_plain()) == through_json(one.to_plain())
        assert other.unknown == one.unknown == 0


def test_a_restored_run_finds_opponents_from_elsewhere_under_their_old_numbers() -> None:
    """Whatever order they are named in now; one that is not wanted any more is not drawn again."""
    said: dict[str, Any] = {"swap_steps": 1, "window": 1}
    one = begun({"A": (0, 1)}, elsewhere={"A": [ExternalOpponent("x", 50.0), ExternalOpponent("y", 50.0)]}, **said)
    other = make({"A": (0, 1)}, elsewhere={"A": [ExternalOpponent("z", 50.0), ExternalOpponent("y", 50.0)]}, **said)
    other.restore(through_json(one.to_plain()))
    other.weights("A", 1, 0)
    seen = set()
    for at in range(1, 100):
        other.ghosts("A", at)
        seen |= {other.player(*key) for key in other.playing}
    assert seen >= {"y", "z"}
    assert "x" not in seen
    assert [one.label for one in other.sides["A"].elsewhere] == ["x", "y", "z"]


# ---------------------------------------------------------------- files and board


class Run:
    """A run folder, and what coordination does with it: keep, then publish weights, then the assignment."""

    def __init__(self, root: Path, layout: Layout, **said: Any) -> None:
        self.root, self.layout, self.said = root, layout, said
        self.topic = NotingBoard()
        self.rules = make(layout, **said)
        self.ghosts = Ghosts(self.rules, root, {}, self.topic)
        self.published = 0
        self.state = ""
        self.former: set[tuple[str, int]] = set()
        self.most = 0

    def begin(self) -> None:
        for name in self.layout:
            self.ghosts.stepped({name: self.layout[name]}, {})
        for name in self.layout:
            self.weights(name, 1, 0)

    def weights(self, name: str, version: int, trained: int) -> None:
        self.ghosts.weights(weights(name, version, trained))
        self.follow()

    def hear(self, said: tuple[str, str, int, int]) -> None:
        kind, name, number, trained = said
        if kind == "weights":
            self.weights(name, number, trained)
        else:
            self.ghosts.stepped({}, {name: number})
            self.follow()

    def keep(self) -> None:
        self.state = json.dumps(self.ghosts.keep())

    def follow(self) -> None:
        """A new assignment is kept, and then published."""
        if self.ghosts.serial == self.published:
            return
        self.keep()
        playing = self.rules.playing
        for name, number in playing:
            found = Snapshots(self.root).load(name, number)
            assert np.array_equal(found.arrays["actor.weight"], weights(name, number).arrays["actor.weight"])
        self.ghosts.publish()
        shown = {(one.behavior, one.version) for one in self.topic.latest.values()}
        assert playing <= shown
        self.most = max(self.most, len(playing | self.former))
        assert len(self.topic.latest) <= self.most
        self.former, self.published = playing, self.ghosts.serial

    def restart(self) -> Run:
        """Dies, and starts again from what was kept last."""
        new = Run(self.root, self.layout, **self.said)
        new.ghosts.restore(json.loads(self.state))
        new.state = self.state
        new.follow()
        return new


SMALL = {"save_steps": 20, "swap_steps": 30, "team_change": 60, "window": 3}


@settings(max_examples=60)
@given(
    layout=st.sampled_from(LAYOUTS),
    history=histories(("weights", "weights", "ghosts", "back", "restart")),
    all_of_them=st.booleans(),
)
def test_what_an_assignment_names_is_on_disk_and_on_the_board_before_it(
    layout: Layout, history: list[Event], all_of_them: bool
) -> None:
    """At every assignment of any history with restarts; keys are used again; files outside the window go."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), layout, keep_all_snapshots=all_of_them, **SMALL)
        run.begin()
        source = Source(layout, dict.fromkeys(layout, FAR))
        kept: set[tuple[str, int]] = set()
        for event in history:
            if event.kind == "restart":
                run.keep()
                run = run.restart()
                for name, stand in source.stands.items():
                    run.weights(name, stand.version, stand.trained)
                continue
            run.hear(source.say(event))
            run.keep()
            run.ghosts.publish()
            kept |= run.rules.wanted
            files = {
                (path.parent.parent.name, int(path.stem)) for path in Path(folder).glob("*/snapshots/*.safetensors")
            }
            assert files == (kept if all_of_them else run.rules.wanted)


def test_every_snapshot_of_the_window_is_on_disk_though_the_next_weights_come_at_once(tmp_path: Path) -> None:
    """Two updates between two savings of the books: what the window names can be loaded, whoever is drawn."""
    run = Run(
        tmp_path, {"A": (0, 1)}, save_steps=10, swap_steps=10, team_change=FAR, play_against_latest_model_ratio=0.0
    )
    run.begin()
    run.weights("A", 2, 10)  # a snapshot, and no new assignment
    run.weights("A", 3, 15)
    run.keep()
    assert run.rules.sides["A"].window == [1, 2]
    assert Snapshots(tmp_path).has("A", 2)
    for crossing in range(1, 20):
        run.hear(("ghosts", "A", 10 * crossing, 0))
    assert {one.version for _, one in run.topic.published} == {1, 2}


def test_keys_are_used_again(tmp_path: Path) -> None:
    """A hundred changes of opponents, and never more keys than policies of an assignment and the one before."""
    run = Run(tmp_path, {"A": (0, 1)}, save_steps=1, swap_steps=1, team_change=FAR, window=10)
    run.begin()
    for at in range(1, 100):
        run.weights("A", at + 1, at)
        run.keep()
        run.hear(("ghosts", "A", at, 0))
    assert run.published > 50
    assert len({key for key, _ in run.topic.published}) <= 8
    assert len({one.version for _, one in run.topic.published}) > 20


def test_weights_that_go_on_playing_are_not_published_again(tmp_path: Path) -> None:
    """A reader keeps what it has: only new opponents cost a transfer."""
    run = Run(tmp_path, {"A": (0, 1)}, save_steps=1, swap_steps=1, team_change=FAR, window=2)
    run.begin()
    for at in range(1, 30):
        run.weights("A", at + 1, at)
        run.keep()
        before, shown = set(run.rules.playing), len(run.topic.published)
        run.hear(("ghosts", "A", at, 0))
        fresh = {(one.behavior, one.version) for _, one in run.topic.published[shown:]}
        assert not fresh & before


# ---------------------------------------------------------------- the match table

A0, A1 = behavior_id("A", 0), behavior_id("A", 1)


def matches_of(run: Run, numbers: range) -> Any:
    number = matchups(run.rules)[0].number
    found = results([(number, {A0: 1.0, A1: 0.0})] * len(numbers), numbers=list(numbers))
    return replace(found, before=numbers.start - 1)


def table(folder: Path) -> list[int]:
    """Numbers of the matches in the table, what was put aside included."""
    paths = sorted(folder.glob("matches*.jsonl"), key=lambda path: path.name == MATCHES_FILE)
    return [json.loads(line)["match"] for path in paths for line in path.read_text().splitlines()]


def test_results_that_come_again_stand_in_the_table_once(tmp_path: Path) -> None:
    """The file is cut back to what the saved state knows of; ratings go back with it."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(1, 4)))
    run.keep()
    saved = dict(run.rules.ratings.elo)
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(4, 8)))
    run.ghosts.keep()  # the state that goes with it is not written any more
    assert table(tmp_path) == list(range(1, 8))
    again = run.restart()
    assert again.rules.ratings.elo == saved
    assert table(tmp_path) == [1, 2, 3]
    again.ghosts.results("stepping-0.1", "A", matches_of(again, range(4, 9)))
    again.keep()
    assert table(tmp_path) == list(range(1, 9))
    assert again.rules.ratings.matches == 8


def test_results_before_the_first_saving_come_again_too(tmp_path: Path) -> None:
    """A state that knows of no match cuts the table to nothing."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(1, 4)))
    run.ghosts.keep()
    again = run.restart()
    assert table(tmp_path) == []
    again.ghosts.results("stepping-0.1", "A", matches_of(again, range(1, 4)))
    again.keep()
    assert table(tmp_path) == [1, 2, 3]


def test_a_table_that_was_put_aside_just_before_the_end_is_in_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long table is put aside; a kill before the state that says so is written neither doubles nor loses a match."""
    monkeypatch.setattr(ghosts_module, "_LONGEST", 100)
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(1, 4)))
    run.keep()
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(4, 6)))
    run.ghosts.keep()  # puts aside, and dies
    again = run.restart()
    again.ghosts.results("stepping-0.1", "A", matches_of(again, range(4, 8)))
    again.keep()
    assert table(tmp_path) == list(range(1, 8))


def test_matches_that_a_new_start_of_assembly_tells_of_again_are_rated_once(tmp_path: Path) -> None:
    """They overlap with what is known: the known ones are left out, and one that never came is counted."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(1, 4)))
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(2, 7)))
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(8, 9)))
    run.keep()
    assert table(tmp_path) == [1, 2, 3, 4, 5, 6, 8]
    assert (run.rules.ratings.matches, run.ghosts.missed) == (7, 1)


def test_lines_name_their_source(tmp_path: Path) -> None:
    """Numbers of matches are unique within a source only."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    learners = run.ghosts.results("stepping-1.2", "A", matches_of(run, range(1, 2)))
    run.keep()
    (line,) = map(json.loads, (tmp_path / MATCHES_FILE).read_text().splitlines())
    assert (line["source"], line["match"]) == ("stepping-1.2", 1)
    assert learners == [("A", 1.0)]


def test_a_run_that_misses_a_snapshot_says_which(tmp_path: Path) -> None:
    """A hand removed it: the restart is refused with the path and the way out."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    Snapshots(tmp_path).path("A", 1).unlink()
    again = Run(tmp_path, {"A": (0, 1)})
    again.ghosts.restore(json.loads(run.state))
    with pytest.raises(ServiceError, match=r"000000001\.safetensors.*expected.*; "):
        again.ghosts.publish()


# ---------------------------------------------------------------- killed between two savings


@settings(max_examples=60)
@given(
    layout=st.sampled_from(LAYOUTS), history=histories(("weights", "ghosts", "ghosts", "back")), at=st.integers(0, 60)
)
def test_a_killed_run_goes_on_from_its_last_saved_state(layout: Layout, history: list[Event], at: int) -> None:
    """Same pool, team, ratings and counters as were saved; all that they name can be loaded; and work goes on."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), layout, **SMALL)
        run.begin()
        source = Source(layout, dict.fromkeys(layout, FAR))
        for number, event in enumerate(history):
            if event.kind != "ghosts":
                run.keep()
            if number == at % len(history):
                saved = json.loads(run.state)["rules"]
                run = run.restart()
                assert through_json(run.rules.to_plain()) == saved
                for name, version in run.rules.wanted:
                    assert Snapshots(Path(folder)).load(name, version).version == version
                for name, stand in source.stands.items():
                    run.weights(name, stand.version, stand.trained)
            run.hear(source.say(event))
        assert run.rules.assignment is not None


# ---------------------------------------------------------------- opponents from elsewhere, and what is told


def test_weights_from_elsewhere_are_published_under_their_number(tmp_path: Path) -> None:
    """They are the run's own only by name: the number is negative, and no snapshot of them is made."""
    stranger = weights("A", -1)
    rules = make({"A": (0, 1)}, elsewhere={"A": [ExternalOpponent("old", 1e12)]})
    topic = NotingBoard()
    ghosts = Ghosts(rules, tmp_path, {("A", -1): stranger}, topic)
    ghosts.stepped({"A": (0, 1)}, {})
    ghosts.weights(weights("A", 1))
    ghosts.keep()
    ghosts.publish()
    assert list(topic.latest.values()) == [stranger]
    assert [path.stem for path in tmp_path.rglob("*.safetensors")] == ["000000001"]
    assert ghosts.described()["opponents"] == ["old"]


def test_players_of_a_folder_are_loaded_under_negative_numbers(tmp_path: Path) -> None:
    """The first is -1, the second -2; one that is missing is refused."""
    folder = Snapshots(tmp_path / ghosts_module.PLAYERS_FOLDER)
    for version in (1, 2):
        folder.save(weights("A", version, trained=version))
    players = [
        ExternalOpponent("one", 1.0),
        ExternalOpponent("two", 1.0),
        ExternalOpponent("simulator/keeper", 1.0, "keeper"),
    ]
    found = ghosts_module.elsewhere(tmp_path, {"A": players})
    assert {key: (one.version, one.trained, one.script) for key, one in found.items()} == {
        ("A", -1): (-1, 1, ""),
        ("A", -2): (-2, 2, ""),
        ("A", -3): (-3, 0, "keeper"),
    }
    with pytest.raises(ServiceError, match="expected"):
        ghosts_module.elsewhere(tmp_path, {"A": [*players, ExternalOpponent("four", 1.0)]})


def test_mean_and_spread_of_the_opponents_ratings_are_those_of_the_window(tmp_path: Path) -> None:
    """By hand: three snapshots with 1000, 1200 and 1400."""
    run = Run(tmp_path, {"A": (0, 1)}, save_steps=10, team_change=FAR)
    run.begin()
    for version in (2, 3):
        run.weights("A", version, 10 * (version - 1))
        run.keep()
    run.rules.ratings.elo.update({"A": 1250.0, "A@1": 1000.0, "A@2": 1200.0, "A@3": 1400.0})
    found = dict(run.ghosts.gauges())
    assert (found["elo/A"], found["opponents.elo/A"]) == (1250, 1200)
    assert found["opponents.elo_deviation/A"] == pytest.approx((80_000 / 3) ** 0.5)


def test_ratings_say_what_the_learner_made_of_each_opponent(tmp_path: Path) -> None:
    """Win rate, matches and ratings by player; whose turn it is."""
    run = Run(tmp_path, {"A": (0, 1)})
    run.begin()
    run.ghosts.results("stepping-0.1", "A", matches_of(run, range(1, 4)))
    found = run.ghosts.ratings()["A"]
    assert (found.team, found.learning) == (0, True)
    assert found.elo > 1200 > found.opponents["A@1"].elo
    assert (found.opponents["A@1"].matches, found.opponents["A@1"].win_rate) == (3, 1.0)


def test_weights_that_a_full_disk_refused_are_not_forgotten_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next ones come before there is room: a snapshot that the window names is not those."""
    run = Run(tmp_path, {"A": (0, 1)}, save_steps=1, swap_steps=1, team_change=FAR, window=4)
    run.begin()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr("sparring.pipeline.coordination.snapshots.write_atomically", full)
        for version in (2, 3):
            with pytest.raises(OSError, match="no room"):
                run.ghosts.weights(weights("A", version, 10 * version))
    run.keep()
    assert {2, 3} <= set(run.rules.sides["A"].window)
    for version in (2, 3):
        found = Snapshots(tmp_path).load("A", version)
        assert np.array_equal(found.arrays["actor.weight"], weights("A", version).arrays["actor.weight"])


def test_a_name_that_came_after_the_state_was_saved_begins_with_the_initial_rating() -> None:
    rules = begun({"A": (0, 1)})
    more = make({"A": (0, 1), "B": (0, 1)}, initial_elo=1100.0)
    more.restore(json.loads(json.dumps(rules.to_plain())))
    assert (more.ratings.elo["A"], more.ratings.elo["B"]) == (1200.0, 1100.0)
