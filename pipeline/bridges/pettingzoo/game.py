"""Holds the episodes of several environments, and makes the columns of a frame from what their agents see.

Each area is one environment. An agent id is `area x number of possible agents + index`. With more than one behavior id,
the episode of an area is one match.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.actions import note_unread_masks
from sparring.pipeline.bridges.explain import attribute, naming_code, shown
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.bridges.pettingzoo.agents import names_of, spaces_of
from sparring.pipeline.bridges.pettingzoo.teams import Teams
from sparring.pipeline.bridges.spaces import MASK, Value, kept
from sparring.pipeline.errors import NOTICE
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import Array, BehaviorSpec, SpecError

if TYPE_CHECKING:
    from gymnasium import Space
    from pettingzoo import AECEnv, ParallelEnv

_MANY = 20
"""Agents that have won, from which on some must have lost."""


class Row(NamedTuple):
    """Holds one agent in one frame.

    Attributes:
        agent: its id.
        match: number of its match.
        seen: its observation.
        reward: its own reward.
        shared: reward of its group.
        mask: its legal actions; None if all are.
        interrupted: a limit has ended its episode.
    """

    agent: int
    match: int
    seen: Value
    reward: float
    shared: float
    mask: Value = None
    interrupted: bool = False


@dataclass(slots=True)
class Area:
    """Holds one environment.

    Attributes:
        number: counted from 0.
        match: number of the current episode.
        playing: agents that have decided and not ended in this episode.
        ended: agents that have ended in this episode.
    """

    number: int
    env: AECEnv | ParallelEnv
    match: int = 0
    playing: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)


class PettingZooGame:
    """Holds what both forms share: behaviors, ids, and the columns of a frame.

    Args:
        name: name of the game.
        envs: one environment for each area, all the same.
        roles: behaviors, teams and groups.
        observe: reads an observation space.
    """

    def __init__(
        self,
        name: str,
        envs: Sequence[AECEnv | ParallelEnv],
        roles: Teams,
        observe: Callable[[Space[Value]], Observations],
    ) -> None:
        self.name, self.env = name, envs[0]
        self._areas = [Area(number, env) for number, env in enumerate(envs)]
        self._names: list[str] = list(attribute(envs[0], "possible_agents"))
        self._index = {agent: index for index, agent in enumerate(self._names)}
        if len(self._index) < len(self._names):
            got, expected = f"the agents {self._names} in possible_agents", "a name of its own for each"
            raise SpecError(got=got, expected=expected, remedy="rename those that are there twice")
        self._roles = roles
        ids = roles.ids(self._names)
        self._readers, self._writers, self._masked = spaces_of(envs[0], self._names, ids, observe)
        self._is_new, self._is_late_noted = True, False
        self._begun: set[int] = set()  # areas whose episode has begun in this frame
        self._won, self._lost, self._do_agree = 0, False, True
        self._teams = np.array([identity.team for identity in ids], np.int64)
        self._ids = dict(zip(self._names, map(str, ids), strict=True))
        self._name_of = {str(identity): identity.name for identity in ids}
        roles.check(self._names, ids)
        self._parameters: Mapping[str, float] = {}
        self._deciding: defaultdict[str, list[Row]] = defaultdict(list)
        self._ended: defaultdict[str, list[Row]] = defaultdict(list)

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the spec of every behavior id."""
        return {
            identity: BehaviorSpec(observations=self._readers[name].specs, actions=self._writers[name].spec)
            for identity, name in self._name_of.items()
        }

    @naming_code
    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """Begins all episodes. Parameters go to the environments as reset options; area i gets seed + i."""
        self._parameters = parameters
        for area in self._areas:
            self._begin(area, None if seed is None else seed + area.number)
        return self._reports()

    @naming_code
    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Steps every area that got an action."""
        chosen: defaultdict[int, dict[str, Value]] = defaultdict(dict)
        for identity, act in actions.items():
            values = self._writers[self._name_of[identity]].rows(act.continuous, act.discrete)
            for agent, value in zip(act.agents.tolist(), values, strict=True):
                number, index = divmod(agent, len(self._names))
                chosen[number][self._names[index]] = value
        for number, mine in chosen.items():
            self._play(self._areas[number], mine)
        return self._reports()

    def close(self) -> None:
        """Closes the environments."""
        for area in self._areas:
            getattr(area.env, "close", lambda: None)()

    def _begin(self, area: Area, seed: int | None) -> None:
        """Begins an episode and adds its first decisions."""
        area.match += 1
        area.playing.clear()
        area.ended.clear()
        self._begun.add(area.number)
        if gone := [one for one in self._names if one not in area.env.possible_agents]:
            raise SpecError(
                got=f"possible_agents without {names_of(gone)} after an episode",
                expected=f"those at its beginning, {self._names}",
                remedy="let self.agents be another list, as in self.agents = self.possible_agents[:]",
            )
        self._open(area, area.env.reset(seed=seed, options=dict(self._parameters) or None))
        if not area.playing:
            raise SpecError(got="no agents after reset()", expected="some", remedy="set self.agents in reset()")

    def _open(self, area: Area, begun: Value) -> None:
        """Adds the first decisions of an episode, for which `reset` has returned `begun`; none without agents."""
        raise NotImplementedError

    def _play(self, area: Area, values: Mapping[str, Value]) -> None:
        """Steps one area with the actions of its agents and adds the rows that follow."""
        raise NotImplementedError

    def _begin_next(self, area: Area) -> None:
        """Begins the next episode.

        Raises:
            SpecError: an agent of the last one has not ended.
        """
        if area.playing:
            which = names_of(area.playing)
            raise SpecError(
                got=f"an episode that is over, because self.agents is empty, without an end of {which}",
                expected="an end of each agent first",
                remedy="set its termination or truncation, and let it leave self.agents only then",
            )
        self._begin(area, None)

    # ------------------------------------------------------------ one frame

    def _decide(self, area: Area, agent: str, seen: Value, info: Value, reward: float = 0, shared: float = 0) -> None:
        """Adds an agent that wants an action."""
        info = {} if info is None else info
        if not isinstance(info, Mapping):
            got, remedy = f"{shown(info)} as info of agent {agent!r}", "give it {} where it holds nothing"
            raise SpecError(got=got, expected="a dict", remedy=remedy)
        area.playing.add(agent)
        if agent in area.ended and not self._is_late_noted:
            self._is_late_noted = True
            sys.stderr.write(
                f"{NOTICE}{agent!r} has ended and acts again in the same episode, as a new agent; step() takes agents "
                "that have ended out of self.agents\n"
            )
        if self._is_new:  # the first row tells what is meant as a mask
            self._is_new, name = False, self._name_of[self._ids[agent]]
            note_unread_masks(self._writers[name].spec, self._readers[name].specs, info, "beside 'observation'")
        if isinstance(seen, Mapping) and MASK in seen:
            mask = seen[MASK]
        elif agent not in self._masked:
            mask = info.get(MASK)
        else:
            raise SpecError(
                got=f"{shown(seen)} as what {agent!r} observes",
                expected=f"a dict with the key {MASK!r}, as its observation_space says",
                remedy="add the mask, or take it out of the space",
            )
        self._deciding[self._ids[agent]].append(Row(*self._numbers(area, agent), seen, reward, shared, mask=mask))

    def _end(self, area: Area, agent: str, seen: Value, interrupted: bool, reward: float, shared: float = 0) -> None:
        """Adds an agent that ended, unless it never decided: the trainer does not know it then."""
        if agent not in area.playing:
            self._note_late(agent, reward + shared)
        else:
            area.playing.discard(agent)
            area.ended.add(agent)
            row = Row(*self._numbers(area, agent), kept(seen), reward, shared, interrupted=interrupted)
            self._ended[self._ids[agent]].append(row)

    def _note_late(self, agent: str, reward: Value) -> None:
        """Notes once where an agent that does not play gets a reward."""
        if self._is_late_noted or not isinstance(reward, int | float | np.number) or not reward:
            return
        self._is_late_noted = True
        sys.stderr.write(
            f"{NOTICE}the reward {reward:g} of {agent!r} is not learned from, because {agent!r} has ended, or was "
            "never observed; give an agent its last reward with its termination or truncation, and take it out of "
            "self.agents with that\n"
        )

    def _numbers(self, area: Area, agent: str) -> tuple[int, int]:
        """Returns an agent's id and the number of its match."""
        number = area.number * len(self._names) + self._index[agent]
        return number, area.match * len(self._areas) + area.number

    def _rows(
        self, name: str, agents: Sequence[int], seen: Sequence[Value], begun: Collection[int] = ()
    ) -> tuple[Array, ...]:
        """Returns the columns of what agents observe; in the areas of `begun` that is from `reset`."""
        return self._readers[name].rows(seen, self._whose(agents, begun))

    def _whose(self, agents: Sequence[int], begun: Collection[int] = ()) -> Callable[[int], str]:
        """Returns what names the agent of a row in messages, and `reset` in the areas of `begun`."""

        def whose(row: int) -> str:
            area, index = divmod(agents[row], len(self._names))
            return f" of agent {self._names[index]!r} in area {area}" + " from reset()" * (area in begun)

        return whose

    def _reports(self) -> Sequence[BehaviorReport]:
        """Returns the rows of the frame as reports."""
        reports = []
        for identity, name in self._name_of.items():
            rows, over = self._deciding[identity], self._ended[identity]
            if rows or over:
                following = self._decisions(name, rows) if rows else None
                last = self._ends(name, over) if over else None
                reports.append(BehaviorReport(behavior=identity, decisions=following, ends=last))
        self._deciding.clear()
        self._ended.clear()
        self._begun.clear()
        return reports

    def _decisions(self, name: str, rows: Sequence[Row]) -> Decisions:
        agents, matches, seen, rewards, shared, masks, _ = zip(*rows, strict=True)
        return decisions(
            agents,
            self._rows(name, agents, seen, self._begun),
            rewards=rewards,
            groups=self._group_ids(np.array(agents)) if self._roles.groups else None,
            group_rewards=shared if self._roles.shared_reward else None,
            masks=self._writers[name].forbidden(masks, self._whose(agents, self._begun)),
            matches=matches if len(self._name_of) > 1 else None,
        )

    def _ends(self, name: str, rows: Sequence[Row]) -> Ends:
        agents, matches, seen, rewards, shared, _, interrupted = zip(*rows, strict=True)
        outcomes = 0.5 + 0.5 * np.sign(np.add(rewards, shared)) if self._roles.outcomes else None
        if outcomes is not None:
            self._note_outcomes(outcomes)
            self._note_disagreement(agents, matches, outcomes)
        return ends(
            agents,
            self._rows(name, agents, seen),
            rewards=rewards,
            interrupted=interrupted,
            group_rewards=shared if self._roles.shared_reward else None,
            outcomes=outcomes,
            matches=matches if len(self._name_of) > 1 else None,
        )

    def _note_outcomes(self, outcomes: Array) -> None:
        """Notes once where many agents have won and none has lost."""
        self._lost = self._lost or bool((outcomes == 0).any())
        before, self._won = self._won, self._won + int(np.count_nonzero(outcomes == 1))
        if before < _MANY <= self._won and not self._lost:
            sys.stderr.write(
                f"{NOTICE}{self._won} agents have won, and none has lost: the sign of an agent's last reward is its "
                "outcome (option outcomes); give those who lose a negative one\n"
            )

    def _note_disagreement(self, agents: Sequence[int], matches: Sequence[int], outcomes: Array) -> None:
        """Notes once where agents of one team that end a match together have several outcomes."""
        first: dict[int, float] = {}
        for row, (match, outcome) in enumerate(zip(matches, outcomes, strict=True)):
            if self._do_agree and first.setdefault(match, outcome) != outcome:
                self._do_agree = False
                whose = self._whose(agents)(row)
                sys.stderr.write(
                    f"{NOTICE}the outcome{whose} is {outcome:g}, and {first[match]:g} of a teammate: the sign of "
                    "an agent's last reward is its outcome (option outcomes); give all of a team one sign\n"
                )

    def _group_ids(self, agents: NDArray[np.int64]) -> NDArray[np.int64]:
        area, index = np.divmod(agents, len(self._names))
        ids: NDArray[np.int64] = 1 + area * (self._teams.max() + 1) + self._teams[index]
        return ids
