"""Self-play continues unchanged after a restart at any time, and saves what it publishes before publishing."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.ghosts import Snapshots
from sparring.pipeline.coordination.opponents import ExternalOpponent
from sparring.pipeline.coordination.self_play import SelfPlay
from tests.coordination.ledger_parts import through_json
from tests.coordination.self_play_run import SMALL, Run
from tests.coordination.self_play_world import (
    FAR,
    LAYOUTS,
    Event,
    EventSource,
    Layout,
    apply,
    behavior_id,
    histories,
    make,
    matchups,
    one_settings,
    plain_assignment,
    results,
    started_rules,
)

KINDS = ("weights", "weights", "ghosts", "ghosts", "back", "match", "match")


def play_match(rules: SelfPlay, event: Event) -> None:
    """Plays a match under one of the matchups, decided by the event."""
    matchup = matchups(rules)[event.steps % len(matchups(rules))]
    own = [behavior_id(name, matchup.team) for name in rules.learning]
    scores = dict.fromkeys(own, (event.steps % 3) / 2) | dict.fromkeys(matchup.ghosts, 1 - (event.steps % 3) / 2)
    list(rules.results(results([(matchup.number, scores)])))


def apply_event(rules: SelfPlay, source: EventSource, event: Event) -> None:
    if event.kind == "match":
        play_match(rules, event)
    else:
        apply(rules, source.message_of(event))


@settings(max_examples=75)
@given(
    layout=st.sampled_from(LAYOUTS),
    own=one_settings(),
    sampling=st.sampled_from(["uniform", "prioritized"]),
    opponents=st.integers(0, 2),
    lockstep=st.booleans(),
    history=histories(KINDS),
    stop=st.integers(0, 60),
)
def test_restored_rules_continue_as_uninterrupted_ones(
    layout: Layout,
    own: dict[str, Any],
    sampling: str,
    opponents: int,
    lockstep: bool,
    history: list[Event],
    stop: int,
) -> None:
    """Assignments, ratings, records and counters agree after every event; topics deliver the latest weights again."""
    external = {"A": [ExternalOpponent(f"old {at}", 0.5) for at in range(opponents)]}
    arguments = {"lockstep": lockstep, "external": external, "opponent_sampling": sampling, "max_steps": 300, **own}
    one = other = started_rules(layout, **arguments)
    sources = [EventSource(layout, dict.fromkeys(layout, 300)) for _ in range(2)]
    for at, event in enumerate(history):
        if at == stop % len(history):
            other = make(layout, **arguments).continue_from(through_json(one))
            assert plain_assignment(other) == plain_assignment(one)
            for name, position in sources[0].positions.items():
                other.weights(name, position.version, position.trained)
                other.set_teams(name, layout[name])
        apply_event(one, sources[0], event)
        if other is not one:
            apply_event(other, sources[1], event)
        elif event.kind != "match":
            sources[1].message_of(event)
        assert plain_assignment(other) == plain_assignment(one)
        assert asdict(replace(other, arrived=one.arrived)) == asdict(one)
        assert other.unknown == one.unknown == 0


def test_a_restored_run_keeps_the_numbers_of_external_opponents() -> None:
    """Their order in the settings may change, and a removed one is not sampled again."""
    arguments: dict[str, Any] = {"swap_steps": 1, "window": 1}
    one = started_rules(
        {"A": (0, 1)}, external={"A": [ExternalOpponent("x", 50.0), ExternalOpponent("y", 50.0)]}, **arguments
    )
    other = make({"A": (0, 1)}, external={"A": [ExternalOpponent("z", 50.0), ExternalOpponent("y", 50.0)]}, **arguments)
    other = other.continue_from(through_json(one))
    other.weights("A", 1, 0)
    seen = set()
    for at in range(1, 100):
        other.ghosts("A", at)
        seen |= {other.player(*key) for key in other.playing}
    assert seen >= {"y", "z"}
    assert "x" not in seen
    assert [one.label for one in other.sides["A"].external] == ["x", "y", "z"]


@settings(max_examples=30)
@given(
    layout=st.sampled_from(LAYOUTS),
    history=histories(("weights", "weights", "ghosts", "back", "restart")),
    all_of_them=st.booleans(),
)
def test_policies_are_saved_and_published_before_their_assignment(
    layout: Layout, history: list[Event], all_of_them: bool
) -> None:
    """This holds for any history with restarts; keys are reused, and files outside the window are removed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), layout, keep_all_snapshots=all_of_them, **SMALL)
        run.begin()
        source = EventSource(layout, dict.fromkeys(layout, FAR))
        wanted: set[tuple[str, int]] = set()
        for event in history:
            if event.kind == "restart":
                run.keep()
                run = run.restart()
                for name, position in source.positions.items():
                    run.weights(name, position.version, position.trained)
                continue
            run.receive(source.message_of(event))
            run.keep()
            run.ghosts.publish()
            wanted |= run.rules.wanted
            files = {
                (path.parent.parent.name, int(path.stem)) for path in Path(folder).glob("*/snapshots/*.safetensors")
            }
            assert files == (wanted if all_of_them else run.rules.wanted)


def test_every_snapshot_of_the_window_is_saved_although_weights_follow_at_once(tmp_path: Path) -> None:
    """Every sampled snapshot can be loaded after two updates between two saves."""
    run = Run(
        tmp_path, {"A": (0, 1)}, save_steps=10, swap_steps=10, team_change=FAR, play_against_latest_model_ratio=0.0
    )
    run.begin()
    run.weights("A", 2, 10)  # a snapshot, and no new assignment
    run.weights("A", 3, 15)
    run.keep()
    assert run.rules.sides["A"].window == [1, 2]
    assert Snapshots(tmp_path).path("A", 2).exists()
    for crossing in range(1, 20):
        run.receive(("ghosts", "A", 10 * crossing, 0))
    assert {one.version for _, one in run.topic.published} == {1, 2}


def test_keys_of_the_topic_are_reused(tmp_path: Path) -> None:
    """A hundred changes of opponents need no more keys than the policies of two assignments."""
    run = Run(tmp_path, {"A": (0, 1)}, save_steps=1, swap_steps=1, team_change=FAR, window=10)
    run.begin()
    for at in range(1, 100):
        run.weights("A", at + 1, at)
        run.keep()
        run.receive(("ghosts", "A", at, 0))
    assert run.published > 50
    assert len({key for key, _ in run.topic.published}) <= 8
    assert len({one.version for _, one in run.topic.published}) > 20


def test_weights_that_keep_playing_are_not_published_again(tmp_path: Path) -> None:
    """A reader keeps its weights, so that only new opponents cost a transfer."""
    run = Run(tmp_path, {"A": (0, 1)}, save_steps=1, swap_steps=1, team_change=FAR, window=2)
    run.begin()
    for at in range(1, 30):
        run.weights("A", at + 1, at)
        run.keep()
        before, shown = set(run.rules.playing), len(run.topic.published)
        run.receive(("ghosts", "A", at, 0))
        fresh = {(one.behavior, one.version) for _, one in run.topic.published[shown:]}
        assert not fresh & before


# ---------------------------------------------------------------- killed between two saves


@settings(max_examples=30)
@given(
    layout=st.sampled_from(LAYOUTS), history=histories(("weights", "ghosts", "ghosts", "back")), at=st.integers(0, 60)
)
def test_a_killed_run_continues_from_its_last_saved_state(layout: Layout, history: list[Event], at: int) -> None:
    """Pool, team, ratings and counters are the saved ones, and all wanted snapshots can be loaded."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), layout, **SMALL)
        run.begin()
        source = EventSource(layout, dict.fromkeys(layout, FAR))
        for number, event in enumerate(history):
            if event.kind != "ghosts":
                run.keep()
            if number == at % len(history):
                saved = run.saved.rules
                run = run.restart()
                assert asdict(run.rules) == asdict(replace(saved, arrived=set()))
                for name, version in run.rules.wanted:
                    assert Snapshots(Path(folder)).load(name, version).version == version
                for name, position in source.positions.items():
                    run.weights(name, position.version, position.trained)
            run.receive(source.message_of(event))
        assert run.rules.assignment is not None
