"""What simulators' processes count themselves, compared with what stepping reports of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.totals import SimulatorTotals
from sparring.pipeline.messages.incarnations import service_of
from sparring.pipeline.messages.state import SimulatorSteps, SteppingState
from tests.coordination.ledger_parts import FIRST, OTHER, SECOND, THIRD, through_json


def report(source: str, **processes: tuple[int, int] | tuple[int, int, int]) -> SteppingState:
    """Returns a state with the steps of processes: before, completed, and at the end the total; _ has no name."""
    steps = {
        "" if process == "_" else process: SimulatorSteps(
            before={"B": counts[0]} if process != "_" else {},
            completed={"B": counts[1]},
            total={"B": counts[2]} if len(counts) > 2 else {},
        )
        for process, counts in processes.items()
    }
    return SteppingState(source=source, behaviors={}, simulators=len(steps), processes=steps)


def test_a_process_that_never_reconnects_recovers_nothing() -> None:
    """Its total at its end shows what its connection took with it; it is not recovered, and not accounted for."""
    totals = SimulatorTotals()
    assert not totals.on_stepping_state(report(FIRST, p=(0, 10)))["B"]
    assert not totals.on_stepping_state(report(FIRST, p=(0, 25)))["B"]
    assert totals.total("B") == 25
    assert not totals.on_stepping_state(report(FIRST, p=(0, 25, 28)))["B"]
    assert totals.total("B") == 28


def test_a_reconnect_within_one_incarnation_recovers_what_its_connection_lost() -> None:
    """Stepping counts what it read; `before` rises by the steps that broke with the connection, and counts once."""
    totals = SimulatorTotals()
    totals.on_stepping_state(report(FIRST, p=(0, 10)))
    assert totals.on_stepping_state(report(FIRST, p=(3, 10)))["B"] == 3
    assert totals.on_stepping_state(report(FIRST, p=(3, 14)))["B"] == 0
    assert totals.on_stepping_state(report(FIRST, p=(5, 14)))["B"] == 2
    assert totals.total("B") == 19


def test_a_reconnect_to_a_new_incarnation_recovers_what_the_dead_one_had_not_published() -> None:
    """The process says 17 where 10 were reported; once more after another incarnation."""
    totals = SimulatorTotals()
    totals.on_stepping_state(report(FIRST, p=(0, 10)))
    assert totals.on_stepping_state(report(SECOND, p=(17, 0)))["B"] == 7
    assert totals.on_stepping_state(report(SECOND, p=(17, 4)))["B"] == 0
    assert totals.on_stepping_state(report(THIRD, p=(21, 1)))["B"] == 0
    assert totals.total("B") == 22


def test_a_process_may_connect_to_another_service() -> None:
    """What is known of it follows its name, not the service."""
    totals = SimulatorTotals()
    totals.on_stepping_state(report(FIRST, p=(0, 10)))
    assert totals.on_stepping_state(report(OTHER, p=(12, 5)))["B"] == 2
    assert totals.total("B") == 17


def test_a_file_older_than_the_last_reports_recovers_as_much_more() -> None:
    """Coordination restarts with 10 of 30 published steps, and reads the next incarnation's report only."""
    totals = SimulatorTotals()
    totals.on_stepping_state(report(FIRST, p=(0, 10)))
    older = through_json(totals)
    totals.on_stepping_state(report(FIRST, p=(0, 30)))
    assert totals.on_stepping_state(report(SECOND, p=(33, 1)))["B"] == 3
    assert older.on_stepping_state(report(SECOND, p=(33, 1)))["B"] == 23
    assert older.total("B") == totals.total("B") == 34


def test_missing_last_counts_are_known_once_every_process_has_connected_again() -> None:
    """A session ended without its last counts; one process had said goodbye, two had not."""
    totals = SimulatorTotals()
    totals.on_stepping_state(report(FIRST, p=(0, 10), q=(0, 5), left=(0, 7, 7)))
    totals.miss_last_counts()
    assert totals.unheard == {"p", "q"}
    totals.on_stepping_state(report(SECOND, p=(17, 0)))
    assert through_json(totals).unheard == {"q"}
    totals.on_stepping_state(report(SECOND, q=(5, 1)))
    assert not totals.unheard


def test_a_process_that_said_goodbye_is_not_missed_with_its_stepping_process() -> None:
    """One was connected when its stepping process ended, the other had reported its total."""
    totals = SimulatorTotals()
    connected = report(FIRST, p=(0, 10), left=(0, 7, 7))
    for steps in connected.processes.values():
        object.__setattr__(steps, "connected", True)
    totals.on_stepping_state(connected)
    totals.retire(service_of(SECOND), SECOND)
    assert totals.unheard == {"p"}


def test_processes_without_a_name_leave_missing_last_counts_unknown() -> None:
    totals = SimulatorTotals()
    totals.on_stepping_state(report(FIRST, _=(0, 10)))
    totals.miss_last_counts()
    totals.on_stepping_state(report(SECOND, _=(0, 3)))
    assert totals.unheard == {""}


def test_a_process_that_served_an_earlier_run_begins_with_what_it_had_reported() -> None:
    """Its steps of another run are neither recovered nor in the total, whatever it loses later."""
    totals = SimulatorTotals()
    assert not totals.on_stepping_state(report(FIRST, p=(1000, 0)))["B"]
    assert totals.total("B") == 0
    totals.on_stepping_state(report(FIRST, p=(1000, 6)))
    assert totals.on_stepping_state(report(SECOND, p=(1008, 0)))["B"] == 2
    totals = through_json(totals)
    assert totals.on_stepping_state(report(SECOND, p=(1008, 1, 1012)))["B"] == 0
    assert totals.total("B") == 12


def test_a_process_that_is_new_to_a_restarted_service_had_reported_to_the_one_that_died() -> None:
    """Coordination has not heard of it: it was being restarted itself, or stepping died at once."""
    totals = SimulatorTotals()
    assert totals.on_stepping_state(report(SECOND, p=(17, 0), late=(0, 0)))["B"] == 17
    assert totals.on_stepping_state(report(SECOND, p=(17, 4), late=(0, 2)))["B"] == 0
    assert totals.total("B") == 23


def test_processes_without_a_name_count_as_stepping_does() -> None:
    """Nothing can be recovered of them, and each incarnation's count stays in the total."""
    totals = SimulatorTotals()
    assert not totals.on_stepping_state(report(FIRST, _=(0, 10)))
    assert not totals.on_stepping_state(report(SECOND, _=(0, 4), p=(0, 3)))["B"]
    assert not through_json(totals).on_stepping_state(report(SECOND, _=(0, 6), p=(0, 3)))["B"]
    assert totals.total("B") == 17


@settings(max_examples=75)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["step", "break", "publish", "kill", "save", "restart"]), st.integers(0, 20)),
        max_size=40,
    ),
    earlier=st.integers(0, 50),
)
def test_recovered_and_reported_steps_are_all_that_a_process_counts(moves: list[tuple[str, int]], earlier: int) -> None:
    """Reported steps of all incarnations, as they were last read, plus the recovered ones are the process's total."""
    totals, recovered, incarnation = SimulatorTotals(), 0, 1
    counted, before, completed = earlier, earlier, 0
    read: dict[int, int] = {}

    def publish() -> int:
        read[incarnation] = completed
        return totals.on_stepping_state(report(f"stepping-0.5f3a-{incarnation}", p=(before, completed)))["B"]

    recovered += publish()
    file = through_json(totals), recovered, dict(read)
    for move, steps in moves:
        if move == "step":
            counted, completed = counted + steps, completed + steps
        elif move == "break":  # steps that no stepping has read
            counted, before = counted + steps, before + steps
        elif move == "publish":
            recovered += publish()
        elif move == "kill":
            incarnation, before, completed = incarnation + 1, counted, 0
        elif move == "save":
            file = through_json(totals), recovered, dict(read)
        else:
            totals, recovered, read = through_json(file[0]), file[1], dict(file[2])
    recovered += publish()
    assert sum(read.values()) + recovered == totals.total("B") == counted - earlier
