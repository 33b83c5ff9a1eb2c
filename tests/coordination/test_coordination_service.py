"""The service around the ledgers restores its saved state, or refuses a damaged one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sparring.pipeline.coordination.coordinator import SAVED, STATE_FILE, Coordinator
from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.state import BehaviorSpecs, SimulatorSteps, SteppingState
from sparring.services.stages.coordination import Coordination
from tests.coordination.ledger_parts import produced
from tests.coordination.self_play_world import RecordingTopic, make


def coordination_in(folder: Path) -> Coordination:
    """Returns a service without behaviors, which needs only its folder."""
    context: Any = SimpleNamespace(run=SimpleNamespace(directory=folder), log=structlog.get_logger())
    return Coordination(context, SimpleNamespace(), Coordinator("coordination.1"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"", b"\0\0\0\0", b'{"Ball": {"led', b"\xff", b"{}", b'{"behaviors": []}', b"3"),
        *(b"[1]", b'{"self_play": 1, "lessons": [2]}'),
    ],
)
def test_a_damaged_state_file_is_refused_with_its_remedy(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / STATE_FILE).write_bytes(damaged)
    with pytest.raises(ServiceError, match=r"got .*coordination\.json.*expected the step counts.*remove the file"):
        coordination_in(tmp_path).restore()


def test_a_folder_in_place_of_the_state_file_is_refused_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).mkdir()
    with pytest.raises(ServiceError, match=r"got .*coordination\.json.*Is a directory.*remove what is in its place"):
        coordination_in(tmp_path).restore()


@pytest.mark.parametrize(("missing", "known"), [("the file", False), ("its last counts", False), ("nothing", True)])
def test_a_resumed_run_compares_with_simulators_only_what_it_knows_of_them(missing: str, known: bool) -> None:
    former = Coordinator("coordination.1")
    former.on_stepping_state(BehaviorSpecs(behaviors={}), stepping_state("stepping-0.a-1"))
    if missing == "nothing":
        former.close([None])
    resumed = Coordinator("coordination.2")
    resumed.ledgers["B"] = StepLedger(least_update_steps=64, overlap=1)
    saved = None if missing == "the file" else SAVED.validate_json(former.saved())
    if saved is not None:
        resumed.restore(saved)
    resumed.begin_session(saved)
    assert resumed.state().unaccounted == ({"B": 0} if known else {})
    if missing == "its last counts":
        resumed.on_stepping_state(BehaviorSpecs(behaviors={}), stepping_state("stepping-0.b-1"))
        assert resumed.state().unaccounted == {"B": 0}


@pytest.mark.parametrize("named", ["at the start", "later"])
def test_a_session_without_a_behavior_keeps_what_was_counted_of_it(named: str) -> None:
    """Its configuration may lack it by mistake, and the next session has it again, or simulators name it."""
    session = Coordinator("coordination.1")
    session.add("B", StepLedger(least_update_steps=64, overlap=1))
    session.ledgers["B"].recover(40)
    assert session.state().step_counts["B"].produced == 40
    session.close([None])
    for number in (2, 3):
        saved = SAVED.validate_json(session.saved())
        session = Coordinator(f"coordination.{number}")
        if number == 3 and named == "at the start":
            session.add("B", StepLedger(least_update_steps=64, overlap=1))
        session.restore(saved)
        session.begin_session(saved)
        if number == 2:
            assert not session.state().step_counts
            session.close([None])
    if named == "later":
        session.add("B", StepLedger(least_update_steps=64, overlap=1))
    counts = session.state().step_counts["B"]
    assert (counts.produced, counts.lost) == (40, 40)


@pytest.mark.parametrize("connected", [False, True])
def test_a_process_that_was_connected_to_a_dead_stepping_is_compared_once_it_is_back(connected: bool) -> None:
    """It may have died, too, with steps that the learner has received and that nobody can count any more."""
    coordinator = Coordinator("coordination.1")
    coordinator.ledgers["B"] = StepLedger(least_update_steps=64, overlap=1)
    coordinator.on_stepping_state(BehaviorSpecs(behaviors={}), stepping_state("stepping-0.a-1", connected=connected))
    assert coordinator.state().unaccounted == {"B": 0}
    back = stepping_state("stepping-0.a-2")
    coordinator.on_stepping_state(BehaviorSpecs(behaviors={}), replace(back, processes={}))
    assert coordinator.state().unaccounted == ({} if connected else {"B": 0})
    coordinator.on_stepping_state(BehaviorSpecs(behaviors={}), back)
    assert coordinator.state().unaccounted == {"B": 0}


@pytest.mark.parametrize("died", [False, True])
def test_what_a_simulator_without_a_name_reported_to_a_dead_stepping_is_never_known(died: bool) -> None:
    """A later session knows what stepping has published in order."""
    coordinator = Coordinator("coordination.1")
    coordinator.ledgers["B"] = StepLedger(least_update_steps=64, overlap=1)
    state = replace(stepping_state("stepping-0.a-1"), processes={"": SimulatorSteps(connected=True)})
    coordinator.on_stepping_state(BehaviorSpecs(behaviors={}), state)
    assert coordinator.state().unaccounted == {"B": 0}
    for present in ("stepping-0.a-2" if died else "stepping-0.b-1", "stepping-0.b-2"):
        state = replace(stepping_state(present), processes={})
        coordinator.on_stepping_state(BehaviorSpecs(behaviors={}), state)
        assert coordinator.state().unaccounted == ({} if died else {"B": 0})


@pytest.mark.parametrize(("connected", "unfinished"), [(False, True), (True, False), (True, True)])
def test_nothing_is_compared_where_stepping_died_at_the_end_with_simulators(connected: bool, unfinished: bool) -> None:
    """What they reported to it last is unknown; a stepping process that ended in order has published all."""
    coordinator = Coordinator("coordination.1")
    coordinator.ledgers["B"] = StepLedger(least_update_steps=64, overlap=1)
    coordinator.on_stepping_state(BehaviorSpecs(behaviors={}), stepping_state("stepping-0.a-1", connected=connected))
    coordinator.close([None], ["stepping-0"] if unfinished else [])
    assert coordinator.state().unaccounted == ({} if connected and unfinished else {"B": 0})


def stepping_state(source: str, *, connected: bool = False) -> SteppingState:
    """Returns a state with one process that has reported nothing yet."""
    return SteppingState(
        source=source, behaviors={}, simulators=1, processes={"p": SimulatorSteps(connected=connected)}
    )


def test_a_run_without_a_state_file_begins_with_empty_counts(tmp_path: Path) -> None:
    coordination = coordination_in(tmp_path)
    coordination.restore()
    coordination.save()
    coordination.restore()
    assert json.loads((tmp_path / STATE_FILE).read_text()) == {
        "behaviors": {},
        "self_play": None,
        "lessons": {
            "curricula": {},
            "serial": 0,
            "resets": 0,
            "progress": {},
            "asked": {},
        },
        "matches": {},
        "simulators": {"known": {}, "first": {}, "unnamed": {}, "unheard": []},
        "final": False,
    }


@pytest.mark.parametrize(("agents", "warned"), [(16, False), (17, True)])
def test_agents_that_share_too_small_a_buffer_are_reported_once(tmp_path: Path, agents: int, warned: bool) -> None:
    """64 steps are four of each of 16 agents, and fewer of each of 17."""
    coordination = coordination_in(tmp_path)
    written: list[dict[str, Any]] = []
    coordination._context.log = SimpleNamespace(
        warning=lambda event, **facts: written.append({"event": event, **facts})
    )
    coordination._context.run = SimpleNamespace(behavior=lambda _: SimpleNamespace(time_horizon=8))
    ledger = StepLedger(least_update_steps=64, overlap=1)
    ledger.on_produced("stepping-0.a-1", produced(0, agents=agents))
    for _ in range(2):
        coordination._warn_of_short_segments("B", ledger)
    assert [one["event"] for one in written] == ["short_segments"] * warned
    assert not warned or "raise buffer_size (to 136 for whole segments)" in written[0]["remedy"]


@pytest.mark.parametrize(
    ("steps", "episodes", "played", "warned"),
    [(180, 0, False, True), (179, 0, False, False), (180, 1, False, False), (180, 0, True, False)],
)
def test_matches_that_do_not_end_are_reported_once(
    tmp_path: Path, steps: int, episodes: int, played: bool, warned: bool
) -> None:
    """A turn is 60 steps, and no other team learns before a match has ended."""
    rules = make({"A": (0, 1)}, team_change=60)
    rules.played |= {0, 1} if played else set()
    coordination = coordination_in(tmp_path)
    coordination.coordinator.ghosts = Ghosts(rules, tmp_path, RecordingTopic())
    written: list[dict[str, Any]] = []
    coordination._context.log = SimpleNamespace(
        warning=lambda event, **facts: written.append({"event": event, **facts})
    )
    ledger = StepLedger(least_update_steps=64, overlap=1)
    ledger.on_produced("stepping-0.a-1", produced(steps))
    ledger.episodes.episodes = episodes
    for _ in range(2):
        coordination._warn_of_endless_matches("A", ledger)
        coordination._warn_of_endless_matches("without self-play", ledger)
    found = [(one["event"], one["behavior"], one["notice"]) for one in written]
    assert found == [("no_match_ends", "A", True)] * warned
