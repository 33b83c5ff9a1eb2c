"""A connection holds one simulator's agents and the frame that waits for an answer."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError, too_large
from sparring.pipeline.messages.matches import Matchup
from sparring.pipeline.messages.rows import pick
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.agents import Behavior, Roster, Slots, SlotTable
from sparring.pipeline.stepping.validation import check_report, check_unique

NO_SLOTS: Slots = np.empty(0, np.int32)

Outcomes = NDArray[np.float64]
"""[n, 3] or [3]: score (1 won, 0.5 drawn, 0 lost, -1 unknown), 1 where the simulator reported it, final reward."""

Kind = Literal["match", "group"]
MatchKey = tuple[Kind, int]
"""Kind and value of the id that the agents of a match share in their simulator."""


@dataclass(slots=True)
class SimulatorBehavior:
    """A SimulatorBehavior is one behavior id of one simulator.

    Attributes:
        text: the id, as the simulator writes it.
        behavior: shared by all simulators and teams.
        has_groups: an agent of this id has had a group.
    """

    text: str
    id: BehaviorId
    behavior: Behavior
    roster: Roster = field(default_factory=Roster)
    has_groups: bool = False


@dataclass(slots=True)
class Arrival:
    """An Arrival is one validated report of a Step, with the slots of its agents.

    Attributes:
        decisions: rows that need an action; None for no rows; in lockstep ordered by agent id.
        slots: [n] slot of each decision; -1 where the agent is new, until the report is applied.
        restore: [n] row in the simulator's own order; None where the order is the same.
        ends: rows whose episode ended; None for no rows.
        vacated: [m] slot of each end.
        unknown: number of new agents.
        learning: number of decisions of learning agents, once the report is applied.
    """

    simulator_behavior: SimulatorBehavior
    decisions: Decisions | None = None
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    restore: NDArray[np.intp] | None = None
    ends: Ends | None = None
    vacated: Slots = field(default_factory=lambda: NO_SLOTS)
    unknown: int = 0
    learning: int = 0

    @property
    def name(self) -> str:
        """Returns the name of its behavior."""
        return self.simulator_behavior.behavior.name

    @property
    def table(self) -> SlotTable:
        """Returns the slots of its behavior."""
        return self.simulator_behavior.behavior.table


@dataclass(slots=True)
class Frame:
    """A Frame is a Step that was received and not answered yet.

    Attributes:
        sequence: of the Step.
        received_at: time in seconds.
        arrivals: its reports.
        reported: its outcomes have been applied.
        backpressured_at: time since which it waits for a step allowance or weights; None before its outcomes apply.
    """

    sequence: int
    received_at: float
    arrivals: list[Arrival]
    reported: bool = False
    backpressured_at: float | None = None

    @property
    def waiting(self) -> list[Arrival]:
        """Returns the applied reports whose decisions wait for actions."""
        return [arrival for arrival in self.arrivals if arrival.decisions is not None] if self.reported else []


@dataclass(slots=True)
class Match:
    """A Match has begun and not ended yet.

    Attributes:
        number: unique within the source; below 0 where it is not reported: a group of ghosts.
        matchup: the matchup of its policies.
        live: number of its live agents.
        outcomes: by behavior id, outcome [3] of the agents that ended last.
    """

    number: int
    key: MatchKey
    matchup: Matchup
    live: int = 0
    outcomes: dict[BehaviorId, Outcomes] = field(default_factory=dict)


@dataclass(slots=True)
class SimulatorConnection:
    """A SimulatorConnection tracks one connected simulator.

    Attributes:
        number: orders the simulators; the supervisor's number where there is one.
        key: unique; a simulator that reconnects gets another.
        sorts: decisions are sorted by agent id (lockstep).
        behaviors: by behavior id text.
        scripts: by behavior name, scripts with which it can play agents itself.
        pending: by behavior name, actions of learning agents whose outcome has not arrived.
        completed: by behavior name, steps completed over this connection, those of ghosts included.
        matches: its open matches of several agents.
        matches_begun: number of matches with match ids that have begun.
        frame: the Step that waits for an answer, if any.
        sequence: of the next Step.
        is_closed: the link is closed.
        lessons: serial of the lessons that it has received.
        process: name of its process; "" where it has none.
    """

    number: int
    key: int = 0
    sorts: bool = False
    behaviors: dict[str, SimulatorBehavior] = field(default_factory=dict)
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)
    matches: dict[MatchKey, Match] = field(default_factory=dict)
    matches_begun: int = 0
    frame: Frame | None = None
    sequence: int = 0
    is_closed: bool = False
    lessons: int = 0
    process: str = ""

    def register(
        self,
        specs: Mapping[str, BehaviorSpec],
        behaviors: dict[str, Behavior],
        max_agents: int,
        of_run: Mapping[str, BehaviorSpec],
    ) -> None:
        """Registers the behaviors that the simulator names.

        Args:
            specs: by behavior id.
            behaviors: those known so far, by name; gets the new ones.
            max_agents: maximum number of agents of each.
            of_run: specs that the run has already, by name.

        Raises:
            RemoteProtocolError: a spec contradicts a known one; nothing was registered.
        """
        ids = {text: BehaviorId.parse(text) for text in specs}
        named = {**of_run, **{name: behavior.spec for name, behavior in behaviors.items()}}
        for text, spec in specs.items():
            if (known := named.setdefault(ids[text].name, spec)) != spec:
                raise contradiction(ids[text].name, spec, known)
        for text, behavior_id in ids.items():
            new = Behavior(behavior_id.name, specs[text], SlotTable(max_agents))
            behavior = behaviors.setdefault(behavior_id.name, new)
            self.behaviors.setdefault(text, SimulatorBehavior(text, behavior_id, behavior))
            self.pending.setdefault(behavior_id.name, 0)

    def arrive(self, step: Step) -> list[Arrival]:
        """Validates a Step and returns its reports.

        Raises:
            RemoteProtocolError: the Step contradicts the specs or the live agents.
        """
        check_step(step, self.sequence, self.behaviors)
        arrivals = []
        for report in step.reports:
            simulator_behavior = self.behaviors[report.behavior]
            check_report(report, simulator_behavior.behavior.spec)
            arrivals.append(self._arrival(report, simulator_behavior))
        self.sequence += 1
        return arrivals

    def _arrival(self, report: BehaviorReport, simulator_behavior: SimulatorBehavior) -> Arrival:
        arrival, roster = Arrival(simulator_behavior), simulator_behavior.roster
        decisions, ends = report.decisions, report.ends
        if decisions is not None and len(decisions.agents):
            if self.sorts:
                decisions, arrival.restore = sort_by_agent(decisions)
            arrival.decisions = decisions
            arrival.slots, arrival.unknown = _look_up(report.behavior, decisions, roster)
        if ends is not None and len(ends.agents):
            check_unique(report.behavior, "ends", ends.agents)
            arrival.ends, arrival.vacated = ends, roster.find(ends.agents)
            if np.count_nonzero(arrival.vacated < 0):
                raise RemoteProtocolError(
                    "unknown_agent",
                    got=f"the end of agent {ends.agents[arrival.vacated < 0][0]} of {report.behavior}",
                    expected="the end of an agent that has decided before",
                    remedy="report an agent's first decision before its end",
                )
        return arrival


def contradiction(name: str, spec: BehaviorSpec, known: BehaviorSpec) -> RemoteProtocolError:
    """Returns why a simulator is refused that declares another spec of a behavior than the run has."""
    return RemoteProtocolError(
        "specs",
        got=f"another spec for {name!r}: {spec}",
        expected=f"the same in all simulators and teams: {known}",
        remedy="run one build of the simulator, or give the other behavior another name",
    )


def check_step(step: Step, sequence: int, known: Collection[str]) -> None:
    """Checks the number of a Step, and that it reports known behavior ids, each at most once.

    Raises:
        RemoteProtocolError: the Step has another number, or a wrong behavior id.
    """
    if step.sequence != sequence:
        raise RemoteProtocolError(
            "sequence",
            got=f"Step {step.sequence}",
            expected=f"Step {sequence}",
            remedy="count the Steps of a connection from 0",
        )
    seen: set[str] = set()
    for report in step.reports:
        if report.behavior not in known or report.behavior in seen:
            raise RemoteProtocolError(
                "duplicate_behavior" if report.behavior in seen else "unknown_behavior",
                got=f"a report of {report.behavior!r}",
                expected=f"each of {sorted(known)} at most once",
                remedy="name every behavior in Hello or Behaviors first, and report it once in a Step",
            )
        seen.add(report.behavior)


def _look_up(behavior: str, decisions: Decisions, roster: Roster) -> tuple[Slots, int]:
    """Returns the slot of each decision, and the number of new agents."""
    known = roster.last(decisions.agents)
    if known is not None:
        return known, 0
    check_unique(behavior, "decisions", decisions.agents)
    slots = roster.find(decisions.agents)
    unknown = int(np.count_nonzero(slots < 0))
    if not unknown:
        roster.remember(decisions.agents, slots)
    return slots, unknown


def sort_by_agent(decisions: Decisions) -> tuple[Decisions, NDArray[np.intp] | None]:
    """Sorts decisions by agent id; returns each row's place in the simulator's own order, too.

    Lockstep needs it: the rounding of a matrix product depends on the position of a row.
    """
    if bool((decisions.agents[1:] > decisions.agents[:-1]).all()):
        return decisions, None
    order = np.argsort(decisions.agents, kind="stable")
    return pick(decisions, order), np.argsort(order)


def count_new_agents(arrivals: Iterable[Arrival]) -> Counter[str]:
    """Counts new agents by behavior name."""
    new: Counter[str] = Counter()
    for arrival in arrivals:
        new[arrival.name] += arrival.unknown
    return new


def check_capacity(
    connection: SimulatorConnection, arrivals: Sequence[Arrival], every: Iterable[SimulatorConnection], limit: int
) -> None:
    """Rejects new agents of a simulator that would exceed a limit, those of frames not applied yet included.

    Args:
        connection: the simulator.
        arrivals: its reports.
        every: all simulators.
        limit: maximum number of live agents of the simulator.

    Raises:
        RemoteProtocolError: the simulator or one of its behaviors would have too many.
    """
    more = sum([arrival.unknown for arrival in arrivals])
    if not more:
        return
    alive = sum(len(one.roster.slots) for one in connection.behaviors.values())
    if alive + more > limit:
        got = f"{more} more agents beside {alive} of one simulator"
        raise too_large(got, limit, "limits.agents", "run fewer areas")
    frames = [one.frame for one in every if one.frame is not None and not one.frame.reported]
    expected = count_new_agents(arrival for frame in frames for arrival in frame.arrivals)
    new, tables = count_new_agents(arrivals), {arrival.name: arrival.table for arrival in arrivals}
    for name, table in tables.items():
        if (others := table.taken + expected[name]) + new[name] > table.limit:
            got, most = f"{new[name]} more agents of {name} beside {others}", f"{table.limit} agents of one behavior"
            raise too_large(got, most, "max_agents", "run fewer areas")
