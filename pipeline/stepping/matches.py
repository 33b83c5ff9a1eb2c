"""Matches assign a matchup to each agent under self-play and collect the results.

A match begins under the current matchup and ends under the same one. Where a simulator reports match ids, these define
the matches; else each group is a match, whose later members join its matchup, and so is each agent without a group. A
match ends when none of its agents is left.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.matches import NO_TEAM, Matchup, MatchupAssignment, Results, ghosts_of
from sparring.pipeline.messages.simulator import Decisions, Ends
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.agents import Behavior, Ids, Slots, SlotTable
from sparring.pipeline.stepping.connections import Arrival, Kind, Match, MatchKey, Outcomes, SimulatorConnection

UNKNOWN: Final[Outcomes] = np.array([-1.0, 0.0, 0.0])
"""Outcome of the others where a simulator does not match them with each other."""


class Matches:
    """Matches track the matches of all simulators of a stepping process.

    Args:
        names: behavior names under self-play.

    Attributes:
        assignment: matchups of the matches that begin now; None before the first is known.
        ended: number of matches that ended.
        lost: number of matches whose simulator disconnected.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self.assignment: MatchupAssignment | None = None
        self.ended = 0
        self.lost = 0
        self._numbers = 0
        self._unreported = 0
        self._behavior_ids: dict[BehaviorId, int] = {}
        # By behavior name, until taken: [m, 4] number, matchup, simulator, rows; [r, 4] behavior id and its outcome.
        self._results: dict[str, list[tuple[Ids, Outcomes]]] = {}
        self._reported: Counter[str] = Counter()  # results so far, taken or not
        self._open: dict[int, Match] = {}

    @property
    def serial(self) -> int:
        """Returns the serial of the assignment; 0 before the first."""
        return 0 if self.assignment is None else self.assignment.serial

    @property
    def under_way(self) -> int:
        """Returns the number of open matches of several agents that will be reported."""
        return sum(number > 0 for number in self._open)

    @property
    def reported(self) -> int:
        """Returns how many results there were so far, taken or not."""
        return self._reported.total()

    def covers(self, connection: SimulatorConnection) -> bool:
        """Returns whether the assignment names a policy for each behavior id of a simulator."""
        behavior_ids, assignment = self._playing(connection), self.assignment
        if assignment is None:
            return not behavior_ids
        return all(assignment.matchups[0].covers(behavior_id) for behavior_id in behavior_ids)

    def in_use(self, behaviors: Mapping[str, Behavior]) -> set[tuple[str, int]]:
        """Returns the ghosts, by behavior name and number, that play now or may play next."""
        matchups = [match.matchup for match in self._open.values()]  # others may join a match under way
        if self.assignment is not None:
            matchups += self.assignment.matchups
        found = ghosts_of(matchups)
        for name in self.names & behaviors.keys():
            table = behaviors[name].table
            playing = np.unique(table.ghosts[table.live & ~table.learning])
            found.update((name, ghost) for ghost in playing.tolist())
        return found

    # ---------------------------------------------------------------- matches end and begin

    def check(self, connection: SimulatorConnection, arrivals: Iterable[Arrival]) -> None:
        """Rejects agents that change their match without an end, and behavior ids that join an open match.

        Raises:
            RemoteProtocolError: an agent or behavior id does so.
        """
        for arrival in arrivals:
            if arrival.decisions is None or arrival.name not in self.names:
                continue
            ids, kind = _match_ids(arrival.decisions)
            if kind is None:
                continue
            continues = (arrival.slots >= 0) & ~np.isin(arrival.slots, arrival.vacated)
            moved = np.flatnonzero(continues & (arrival.table.match_ids[arrival.slots] != ids))
            if moved.size:
                raise _match_error(arrival, arrival.decisions, moved[0], "an agent that was in another")
            begins = np.flatnonzero(~continues)
            for one, rows in _by_value(ids[begins]):
                match = connection.matches.get((kind, one))
                if match is not None and not match.matchup.covers(arrival.simulator_behavior.id):
                    what = "a behavior that was not in it at its start"
                    raise _match_error(arrival, arrival.decisions, begins[rows[0]], what)

    def end(self, connection: SimulatorConnection, arrivals: Iterable[Arrival]) -> None:
        """Ends the matches of agents whose episodes ended, before their slots are reused."""
        closing: list[Match] = []
        for arrival in arrivals:
            if arrival.ends is None or arrival.name not in self.names:
                continue
            behavior_id, table, slots = arrival.simulator_behavior.id, arrival.table, arrival.vacated
            numbers = table.matches[slots]
            alone = np.flatnonzero(table.alone[slots] & (numbers > 0))
            if alone.size:
                unknown = dict.fromkeys(self._others(connection, behavior_id.team), UNKNOWN)
                outcomes = {behavior_id: _outcomes_of(arrival.ends, alone), **unknown}
                self._add_results(connection, arrival.name, numbers[alone], table.matchups[slots[alone]], outcomes)
            closing += self._end_shared(behavior_id, arrival.ends, np.where(table.alone[slots], 0, numbers))
        for match in closing:
            self._close(connection, match)

    def begin(self, connection: SimulatorConnection, arrival: Arrival, rows: NDArray[np.intp]) -> None:
        """Assigns matchups to agents that begin an episode.

        Args:
            connection: their simulator.
            arrival: report with their decisions, which have slots by now.
            rows: [n] rows of the agents in the decisions.
        """
        if arrival.decisions is None or arrival.name not in self.names:
            return
        behavior_id, table, slots = arrival.simulator_behavior.id, arrival.table, arrival.slots[rows]
        ids, kind = _match_ids(arrival.decisions)
        ids = ids[rows]
        is_alone = (ids == 0) & (kind != "match")
        table.has_ghosts = True
        table.match_ids[slots] = ids
        table.matches[slots] = 0
        table.alone[slots] = is_alone
        if is_alone.any():
            self._begin_alone(connection, behavior_id, table, slots[is_alone])
        if kind is None:
            return
        together = np.flatnonzero(~is_alone)
        for one, those in _by_value(ids[together]):
            match = self._find(connection, behavior_id, (kind, one))
            match.live += len(those)
            table.matches[slots[together[those]]] = match.number
            _assign_matchup(table, slots[together[those]], behavior_id, match.matchup)

    def drop(self, connection: SimulatorConnection) -> None:
        """Drops the matches of a disconnected simulator, before its slots are reused."""
        open_matches, connection.matches = connection.matches.values(), {}
        connection.matches_begun = 0
        for match in open_matches:
            del self._open[match.number]
        dropped = [(match.number, match.matchup.number) for match in open_matches if match.number > 0]
        playing = [one for one in connection.behaviors.values() if one.id.name in self.names]
        for one in playing:
            table, slots = one.behavior.table, one.roster.slots
            alone = slots[table.alone[slots] & (table.matches[slots] > 0)]
            dropped += zip(table.matches[alone].tolist(), table.matchups[alone].tolist(), strict=True)
        self.lost += len(dropped)
        if dropped:
            numbers, matchups = np.array(dropped).T
            self._add_results(connection, playing[0].id.name, numbers, matchups, {})

    def take(self, source: str) -> list[Results]:
        """Returns the results since the last call, for each behavior name of learning agents.

        Args:
            source: incarnation of this stepping service.
        """
        taken = [self._join_results(source, name, ended) for name, ended in self._results.items() if ended]
        self._results = {name: [] for name in self._results}
        return taken

    # ---------------------------------------------------------------- inside

    def _next_matchup(self, simulator: int, begun: int = 0) -> Matchup:
        matchups = () if self.assignment is None else self.assignment.matchups
        return matchups[(simulator + begun) % len(matchups)]

    def _find(self, connection: SimulatorConnection, behavior_id: BehaviorId, key: MatchKey) -> Match:
        """Returns the match with this key, a new one where there is none."""
        if key in connection.matches:
            return connection.matches[key]
        matchup = self._next_matchup(connection.number, connection.matches_begun)
        connection.matches_begun += key[0] == "match"
        if key[0] == "match" or behavior_id.team == self._reporting(connection, matchup):
            self._numbers += 1
            number = self._numbers
        else:
            self._unreported -= 1
            number = self._unreported
        match = connection.matches[key] = self._open[number] = Match(number, key, matchup)
        return match

    def _begin_alone(
        self, connection: SimulatorConnection, behavior_id: BehaviorId, table: SlotTable, slots: Slots
    ) -> None:
        """Begins matches of single agents, which are reported for one team only."""
        matchup = self._next_matchup(connection.number)
        _assign_matchup(table, slots, behavior_id, matchup)
        if behavior_id.team == self._reporting(connection, matchup):
            table.matches[slots] = np.arange(self._numbers + 1, self._numbers + 1 + len(slots))
            self._numbers += len(slots)

    def _end_shared(self, behavior_id: BehaviorId, ends: Ends, numbers: Ids) -> list[Match]:
        """Ends agents that share matches; returns the matches in which no agent is left."""
        over = []
        shared = np.flatnonzero(numbers)
        for number, those in _by_value(numbers[shared]):
            match = self._open[number]
            match.live -= len(those)
            match.outcomes[behavior_id] = _joint_outcome(ends, shared[those])
            if not match.live:
                over.append(match)
        return over

    def _close(self, connection: SimulatorConnection, match: Match) -> None:
        """Closes a match in which no agent is left; it has no result where no agent of the learning team took part."""
        del self._open[match.number]
        del connection.matches[match.key]
        team, outcomes = self._reporting(connection, match.matchup), match.outcomes
        reporting = [behavior_id for behavior_id in outcomes if behavior_id.team == team]
        if not reporting:
            if match.number < 0:
                return
            outcomes = {}
        elif match.key[0] == "group":  # the other teams have groups of their own
            outcomes = outcomes | dict.fromkeys(self._others(connection, team), UNKNOWN)
        name = (reporting or self._playing(connection))[0].name
        self._add_results(connection, name, np.array([match.number]), np.array([match.matchup.number]), outcomes)

    def _add_results(
        self,
        connection: SimulatorConnection,
        name: str,
        numbers: Ids,
        matchups: Ids,
        outcomes: Mapping[BehaviorId, Outcomes],
    ) -> None:
        """Adds matches that ended, by number and matchup [n], with an outcome of each behavior id; {} for no result."""
        matches, rows = np.empty((len(numbers), 4), np.int64), np.empty((len(numbers), len(outcomes), 4))
        matches[:, 0], matches[:, 1], matches[:, 2], matches[:, 3] = numbers, matchups, connection.number, len(outcomes)
        for at, (behavior_id, outcome) in enumerate(outcomes.items()):
            rows[:, at, 0] = self._behavior_ids.setdefault(behavior_id, len(self._behavior_ids))
            rows[:, at, 1:] = outcome
        self._results.setdefault(name, []).append((matches, rows.reshape(-1, 4)))
        self._reported[name] += len(numbers)
        self.ended += len(numbers) if outcomes else 0

    def _join_results(self, source: str, name: str, ended: Sequence[tuple[Ids, Outcomes]]) -> Results:
        """Joins what `_add_results` has added for a behavior name."""
        numbers, matchups, simulators, counts = np.concatenate([matches for matches, _ in ended]).T.copy()
        who, scores, explicit, rewards = np.concatenate([rows for _, rows in ended]).T.copy()
        return Results(
            source=source,
            behavior=name,
            before=self._reported[name] - len(numbers),
            numbers=numbers,
            matchups=matchups,
            simulators=simulators.astype(np.int32),
            row_counts=counts.astype(np.int32),
            names=tuple(map(str, self._behavior_ids)),
            who=who.astype(np.int32),
            scores=scores.astype(np.float32),
            explicit=explicit.astype(np.int32),
            rewards=rewards.astype(np.float32),
        )

    def _reporting(self, connection: SimulatorConnection, matchup: Matchup) -> int:
        """Returns the team whose groups and single agents count as matches: the learning one, else the first."""
        if matchup.team != NO_TEAM:
            return matchup.team
        return min(behavior_id.team for behavior_id in self._playing(connection))

    def _playing(self, connection: SimulatorConnection) -> list[BehaviorId]:
        """Returns the behavior ids of a simulator under self-play."""
        return [one.id for one in connection.behaviors.values() if one.id.name in self.names]

    def _others(self, connection: SimulatorConnection, team: int) -> list[BehaviorId]:
        """Returns those of them that belong to other teams."""
        return [behavior_id for behavior_id in self._playing(connection) if behavior_id.team != team]


def _assign_matchup(table: SlotTable, slots: Slots, behavior_id: BehaviorId, matchup: Matchup) -> None:
    """Assigns a matchup to agents of a behavior id."""
    learning = behavior_id.team == matchup.team
    table.matchups[slots] = matchup.number
    table.learning[slots] = learning
    table.ghosts[slots] = 0 if learning else matchup.ghosts[str(behavior_id)]


def _match_ids(decisions: Decisions) -> tuple[Ids, Kind | None]:
    """Returns the id, [n], of each agent's match and the kind of these ids; zeros and None without any."""
    if decisions.matches is not None:
        return decisions.matches, "match"
    if decisions.groups is not None:
        return decisions.groups, "group"
    return np.zeros(len(decisions.agents), np.int64), None


def _match_error(arrival: Arrival, decisions: Decisions, row: int, who: str) -> RemoteProtocolError:
    ids, kind = _match_ids(decisions)
    return RemoteProtocolError(
        "match",
        got=f"agent {decisions.agents[row]} of {arrival.simulator_behavior.text} in {kind} {ids[row]}: {who}",
        expected="one match from an agent's first decision to its end, and no behavior that joins it later",
        remedy="report the agent's end, and its first decision in the next match; name all behaviors in Hello",
    )


def _by_value(ids: Ids) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yields each value with its positions."""
    order = np.argsort(ids, kind="stable")
    values, starts = np.unique(ids[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=len(values) > 0)


def _outcomes_of(ends: Ends, rows: NDArray[np.intp]) -> Outcomes:
    """Returns the outcomes [n, 3] of some agents."""
    rewards = ends.rewards[rows].astype(np.float64)
    if ends.group_rewards is not None:
        rewards += ends.group_rewards[rows]
    scores = 0.5 + 0.5 * np.sign(rewards) if ends.outcomes is None else ends.outcomes[rows]
    return np.stack([scores, np.full(len(rows), float(ends.outcomes is not None)), rewards], axis=1)


def _joint_outcome(ends: Ends, rows: NDArray[np.intp]) -> Outcomes:
    """Returns the mean reported outcome [3] of agents that ended together, else the sign of their mean reward."""
    outcomes = _outcomes_of(ends, rows)
    reward = outcomes[:, 2].mean()
    score = 0.5 + 0.5 * np.sign(reward) if ends.outcomes is None else ends.outcomes[rows].mean()
    return np.array([score, outcomes[0, 1], reward])
