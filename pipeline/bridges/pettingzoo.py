"""Plays PettingZoo environments as a game, parallel and turn-based, with action masks.

Each area is one environment. An agent id is `area x number of possible agents + index`. With more than one behavior id,
the episode of an area is one match.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.explain import (
    attribute,
    flag,
    hidden_by,
    meant,
    naming_code,
    not_imported,
    number,
    place_of,
    returned,
    shown,
)
from sparring.pipeline.bridges.spaces import (
    MASK,
    Actions,
    Observations,
    Option,
    Value,
    check_images,
    import_optional,
    kept,
    note_unread_masks,
    read_wrappers,
    registered_by,
)
from sparring.pipeline.bridges.video import make_areas
from sparring.pipeline.errors import NOTICE, SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import Array, BehaviorId, BehaviorSpec, SpecError

if TYPE_CHECKING:
    from gymnasium import Space
    from pettingzoo import AECEnv, ParallelEnv

_MANY = 20
"""Agents that have won, from which on some must have lost."""
_RESET = ("observations", "infos")
_STEP = ("observations", "rewards", "terminations", "truncations", "infos")
_LAST = ("observation", "reward", "terminated", "truncated", "info")


@dataclass(frozen=True, kw_only=True, slots=True)
class Teams:
    """Assigns the agents of an environment to behaviors, teams and groups.

    Attributes:
        behavior: name of the behavior if `behaviors` is `one`.
        behaviors: `one` name for all, or a name `per_type` (`adversary_0` -> `adversary`).
        teams: `shared` (all team 0), `each` (the i-th agent is team i) or `per_type` (the i-th type is team i).
        groups: agents of one team in one area are a group.
        shared_reward: each group gets the mean reward of its agents, and these get none of their own; parallel
            environments only.
        outcomes: the sign of an agent's last reward, or of its group's, is its outcome.
    """

    behavior: str
    behaviors: str = "one"
    teams: str = "shared"
    groups: bool = False
    shared_reward: bool = False
    outcomes: bool = False

    def __post_init__(self) -> None:
        if self.behaviors not in ("one", "per_type") or self.teams not in ("shared", "each", "per_type"):
            raise SettingsError(
                f"got behaviors={self.behaviors!r} and teams={self.teams!r}; expected behaviors one or per_type, "
                "teams shared, each or per_type; correct the simulator's options"
            )
        if self.shared_reward and not self.groups:
            raise SettingsError("got shared_reward without groups; expected groups that get it; set groups as well")
        if self.outcomes and self.teams == "shared":
            raise SettingsError("got outcomes with teams=shared; expected teams that can win; set teams as well")

    def check(self, agents: Sequence[str], ids: Sequence[BehaviorId]) -> None:
        """Notes on standard error where teams or groups are hardly those that are meant.

        Raises:
            SettingsError: there are outcomes of one team.
        """
        several = ", ".join(map(str, agents[:3])) + (", ..." if len(agents) > 3 else "")
        is_one, kinds = len({one.team for one in ids}) == 1, f"the agents {several}"
        if self.outcomes and is_one:
            got = f"outcomes with teams={self.teams}, which makes one team of {kinds}"
            raise SettingsError(
                f"got {got}; expected teams that can win; set teams: each, or name agents by their type"
            )
        if self.teams == "per_type" and is_one and len(agents) > 1:
            sys.stderr.write(f"{NOTICE}teams: per_type makes one team of {kinds}, whose names are of one type\n")
        are_single = len({one.team for one in ids}) == len(ids)
        if are_single and self.teams == "per_type" and len(agents) > 2:
            rule = "the type of an agent is its name without the number at its end, as red of red_0"
            sys.stderr.write(f"{NOTICE}teams: per_type makes a team of each of {kinds}: {rule}\n")
        elif are_single and self.groups:
            sys.stderr.write(f"{NOTICE}groups have one agent each, because no team has more (teams: {self.teams})\n")

    def ids(self, agents: Sequence[str]) -> list[BehaviorId]:
        """Returns the behavior id of each agent."""
        kinds = [re.sub(r"[_-]?\d+$", "", str(agent)) or str(agent) for agent in agents]
        order = list(dict.fromkeys(kinds))
        numbers = {"shared": [0] * len(kinds), "each": range(len(kinds)), "per_type": [order.index(k) for k in kinds]}
        names = kinds if self.behaviors == "per_type" else [self.behavior] * len(kinds)
        return [BehaviorId(name=name, team=team) for name, team in zip(names, numbers[self.teams], strict=True)]


def make_pettingzoo(
    env_id: str,
    areas: int = 1,
    *,
    behavior: str | None = None,
    behaviors: str = "one",
    teams: str = "shared",
    groups: bool = False,
    shared_reward: bool = False,
    outcomes: bool = False,
    wrappers: str = "",
    brightest: int = 255,
    images: str | None = None,
    video: str = "",
    **options: Option,
) -> ParallelGame | TurnGame:
    """Returns a PettingZoo environment as a game: in its parallel form if it has one, else turn by turn.

    Args:
        env_id: module of the environment, such as "mpe2.simple_spread_v3".
        areas: number of environments side by side, 1 or more.
        behavior: name of the behavior; None takes the module's name without version.
        behaviors: `one` name for all agents, or a name `per_type` (`adversary_0` -> `adversary`).
        teams: `shared` (all team 0), `each` (the i-th agent is team i) or `per_type` (the i-th type is team i).
        groups: agents of one team in one area are a group.
        shared_reward: each group gets the mean reward of its agents, and these get none of their own; parallel
            environments only.
        outcomes: the sign of an agent's last reward is its outcome: 1 won, 0.5 drawn, 0 lost; requires teams.
        wrappers: classes to wrap each environment in, innermost first, see `read_wrappers`.
        brightest: largest value in images of bytes, which are scaled to 0..255; 1 for maps of 0 and 1.
        images: names of the observations that are images, see `Observations`.
        video: file for a video of the first area of the first simulator; "" for none.
        options: keyword arguments of the environment.

    Raises:
        SettingsError: the package or environment is missing, or an option is unknown or impossible.
        SpecError: a space is not supported, or agents of one behavior have different spaces.
    """
    if areas < 1:
        raise SettingsError(f"got areas={areas}; expected 1 or more; correct the simulator's options")
    name = behavior or re.sub(r"_v\d+$", "", env_id.rpartition(".")[2])
    roles = Teams(
        behavior=name, behaviors=behaviors, teams=teams, groups=groups, shared_reward=shared_reward, outcomes=outcomes
    )
    import_optional("pettingzoo", "pettingzoo")
    make, classes = _environment(env_id), read_wrappers(wrappers)
    try:
        envs = make_areas(partial(make, **options), areas, classes, video)
    except TypeError as error:
        remedy = meant(options, make_pettingzoo) or "check the environment's documentation"
        if "'render_mode'" in str(error):
            remedy = "let the function that makes it take render_mode, which a video needs"
        raise SettingsError(
            f"got options {options} for {env_id!r}: {error}{place_of(error)}; expected its own; {remedy}"
        ) from error
    form = TurnGame if hasattr(envs[0], "last") else ParallelGame
    if shared_reward and form is TurnGame:
        raise SettingsError(
            f"got shared_reward for the turn-based {name!r}; expected a parallel environment; "
            "leave the option out: agents that act in turn keep their own rewards"
        )
    observe = partial(Observations, brightest=brightest, images=images)
    return check_images(form(name, envs, roles, observe), images)


def _environment(env_id: str) -> Callable[..., Value]:
    """Returns the function that makes the environment, in its parallel form if it has one."""
    if "/" in env_id or env_id.endswith(".py") or env_id.startswith((".", "~")):
        path = Path(env_id)
        remedy = f"write {path.stem}, and give its folder, {path.parent}, as pipeline.python_path or --python-path"
        raise SettingsError(f"got environment {env_id!r}, a path; expected the name of a module; {remedy}")
    if ":" in env_id:
        own = env_id.partition(":")[0]
        remedy = f"write name: gymnasium for an id of Gymnasium, env_id: {own} for a module of PettingZoo"
        raise SettingsError(f"got {env_id!r}; expected a module of PettingZoo alone; {remedy}")
    try:
        with warnings.catch_warnings():
            # PettingZoo deprecates the module form in favor of a registry of its own environments.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(env_id)
    except ImportError as error:
        expected, remedy = not_imported(env_id, error)
        if re.search(r"-v\d+$", env_id):
            expected, remedy = "a module of PettingZoo", "write name: gymnasium for an id of Gymnasium"
        got = f"environment {env_id!r}: {error}{place_of(error)}"
        raise SettingsError(f"got {got}; expected {expected}; {remedy}") from error
    forms: list[Callable[..., Value]] = []
    for name in ("parallel_env", "env"):
        if (found := getattr(module, name, None)) is not None:
            if not callable(found):
                got, expected = (
                    f"{shown(found)} as {name} of the module {env_id!r}",
                    "a function that makes the environment",
                )
                raise SettingsError(f"got {got}; expected {expected}; write def {name}(**options): return ...")
            forms.append(found)
    if forms:
        return forms[0] if len(forms) == 1 else _parallel_or_not(*forms)
    others = registered_by(env_id)
    remedy = f"write name: gymnasium and env_id: {others[0]}" if others else "define it, or name another module"
    remedy = hidden_by(module) or remedy
    raise SettingsError(f"got module {env_id!r} without parallel_env() and env(); expected one of them; {remedy}")


def _parallel_or_not(parallel: Callable[..., Value], in_turn: Callable[..., Value]) -> Callable[..., Value]:
    """Returns what makes the parallel form of an environment, or that in turn if PettingZoo refuses to convert it."""
    is_refused = False

    def make(**options: Option) -> Value:
        nonlocal is_refused
        if not is_refused:
            try:
                return parallel(**options)
            except AssertionError as error:
                if "is_parallelizable" not in str(error):
                    raise
            is_refused = True
            sys.stderr.write(f"{NOTICE}env() is played in turn, because parallel_env() cannot be made of it\n")
        return in_turn(**options)

    return make


class _Row(NamedTuple):
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
class _Area:
    """Holds one environment.

    Attributes:
        number: counted from 0.
        match: number of the current episode.
        playing: agents that have decided and not ended in this episode.
    """

    number: int
    env: AECEnv | ParallelEnv
    match: int = 0
    playing: set[str] = field(default_factory=set)


class _PettingZooBase:
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
        self._areas = [_Area(number, env) for number, env in enumerate(envs)]
        self._names: list[str] = list(attribute(envs[0], "possible_agents"))
        self._index = {agent: index for index, agent in enumerate(self._names)}
        if len(self._index) < len(self._names):
            got, expected = f"the agents {self._names} in possible_agents", "a name of its own for each"
            raise SpecError(got=got, expected=expected, remedy="rename those that are there twice")
        self._roles = roles
        ids = roles.ids(self._names)
        self._readers, self._writers, self._masked = _spaces(envs[0], self._names, ids, observe)
        self._is_new, self._is_late_noted = True, False
        self._won, self._lost = 0, False
        self._teams = np.array([identity.team for identity in ids], np.int64)
        self._ids = dict(zip(self._names, map(str, ids), strict=True))
        self._name_of = {str(identity): identity.name for identity in ids}
        roles.check(self._names, ids)
        self._parameters: Mapping[str, float] = {}
        self._deciding: defaultdict[str, list[_Row]] = defaultdict(list)
        self._ended: defaultdict[str, list[_Row]] = defaultdict(list)

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

    def _begin(self, area: _Area, seed: int | None) -> None:
        """Begins an episode and adds its first decisions."""
        area.match += 1
        area.playing.clear()
        if gone := [one for one in self._names if one not in area.env.possible_agents]:
            raise SpecError(
                got=f"possible_agents without {_names(gone)} after an episode",
                expected=f"those at its beginning, {self._names}",
                remedy="let self.agents be another list, as in self.agents = self.possible_agents[:]",
            )
        self._open(area, area.env.reset(seed=seed, options=dict(self._parameters) or None))
        if not area.playing:
            raise SpecError(got="no agents after reset()", expected="some", remedy="set self.agents in reset()")

    def _open(self, area: _Area, begun: Value) -> None:
        """Adds the first decisions of an episode, for which `reset` has returned `begun`; none without agents."""
        raise NotImplementedError

    def _play(self, area: _Area, values: Mapping[str, Value]) -> None:
        """Steps one area with the actions of its agents and adds the rows that follow."""
        raise NotImplementedError

    def _begin_next(self, area: _Area) -> None:
        """Begins the next episode.

        Raises:
            SpecError: an agent of the last one has not ended.
        """
        if area.playing:
            raise SpecError(
                got=f"an episode that is over, because self.agents is empty, without an end of {_names(area.playing)}",
                expected="an end of each agent first",
                remedy="set its termination or truncation, and let it leave self.agents only then",
            )
        self._begin(area, None)

    # ------------------------------------------------------------ one frame

    def _decide(
        self, area: _Area, agent: str, seen: Value, info: Mapping[str, Value], reward: float = 0, shared: float = 0
    ) -> None:
        """Adds an agent that wants an action."""
        area.playing.add(agent)
        if self._is_new:  # the first row tells what is meant as a mask
            self._is_new, name = False, self._name_of[self._ids[agent]]
            note_unread_masks(self._writers[name].spec, self._readers[name].specs, info or {}, "beside 'observation'")
        if isinstance(seen, Mapping) and MASK in seen:
            mask = seen[MASK]
        elif agent not in self._masked:
            mask = (info or {}).get(MASK)
        else:
            raise SpecError(
                got=f"{shown(seen)} as what {agent!r} observes",
                expected=f"a dict with the key {MASK!r}, as its observation_space says",
                remedy="add the mask, or take it out of the space",
            )
        self._deciding[self._ids[agent]].append(_Row(*self._numbers(area, agent), seen, reward, shared, mask=mask))

    def _end(self, area: _Area, agent: str, seen: Value, interrupted: bool, reward: float, shared: float = 0) -> None:
        """Adds an agent that ended, unless it never decided: the trainer does not know it then."""
        if agent not in area.playing:
            self._note_late(agent, reward + shared)
        else:
            area.playing.discard(agent)
            row = _Row(*self._numbers(area, agent), kept(seen), reward, shared, interrupted=interrupted)
            self._ended[self._ids[agent]].append(row)

    def _note_late(self, agent: str, reward: Value) -> None:
        """Notes once where an agent that does not play gets a reward."""
        if self._is_late_noted or not isinstance(reward, int | float | np.number) or not reward:
            return
        self._is_late_noted = True
        sys.stderr.write(
            f"{NOTICE}the reward {reward:g} of {agent!r} is not learned from, because {agent!r} has ended, or was "
            "never observed; give an agent its last reward with its termination or truncation\n"
        )

    def _numbers(self, area: _Area, agent: str) -> tuple[int, int]:
        """Returns an agent's id and the number of its match."""
        number = area.number * len(self._names) + self._index[agent]
        return number, area.match * len(self._areas) + area.number

    def _rows(self, name: str, agents: Sequence[int], seen: Sequence[Value]) -> tuple[Array, ...]:
        """Returns the columns of what agents observe."""
        return self._readers[name].rows(seen, self._whose(agents))

    def _whose(self, agents: Sequence[int]) -> Callable[[int], str]:
        """Returns what names the agent of a row in messages."""

        def whose(row: int) -> str:
            area, index = divmod(agents[row], len(self._names))
            return f" of agent {self._names[index]!r} in area {area}"

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
        return reports

    def _decisions(self, name: str, rows: Sequence[_Row]) -> Decisions:
        agents, matches, seen, rewards, shared, masks, _ = zip(*rows, strict=True)
        return decisions(
            agents,
            self._rows(name, agents, seen),
            rewards=rewards,
            groups=self._group_ids(np.array(agents)) if self._roles.groups else None,
            group_rewards=shared if self._roles.shared_reward else None,
            masks=self._writers[name].forbidden(masks, self._whose(agents)),
            matches=matches if len(self._name_of) > 1 else None,
        )

    def _ends(self, name: str, rows: Sequence[_Row]) -> Ends:
        agents, matches, seen, rewards, shared, _, interrupted = zip(*rows, strict=True)
        outcomes = 0.5 + 0.5 * np.sign(np.add(rewards, shared)) if self._roles.outcomes else None
        if outcomes is not None:
            self._note_outcomes(outcomes)
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

    def _group_ids(self, agents: NDArray[np.int64]) -> NDArray[np.int64]:
        area, index = np.divmod(agents, len(self._names))
        ids: NDArray[np.int64] = 1 + area * (self._teams.max() + 1) + self._teams[index]
        return ids


class ParallelGame(_PettingZooBase):
    """Steps environments whose agents act at once."""

    def _open(self, area: _Area, begun: Value) -> None:
        observations, infos = self._by_agent("reset", begun, _RESET)
        if observations and (absent := {*_present(area.env)} - observations.keys()):
            raise SpecError(
                got=f"no observation of {_names(absent)} from reset()",
                expected="one of each agent in self.agents",
                remedy="add it, or add the agent to self.agents once it plays",
            )
        for agent, seen in observations.items():
            self._decide(area, agent, seen, infos.get(agent, {}))

    def _play(self, area: _Area, values: Mapping[str, Value]) -> None:
        result = self._by_agent("step", area.env.step(values), _STEP)
        observations, rewards, terminations, truncations, infos = result
        if absent := area.playing - observations.keys():
            does_end = all(terminations.get(agent) or truncations.get(agent) for agent in absent)
            what = "which ends with this step" if does_end else "which has not ended"
            raise SpecError(
                got=f"no observation of {_names(absent)}, {what}",
                expected="one of each agent in self.agents, and a last one with its termination or truncation",
                remedy="observe before you empty self.agents" if does_end else "correct what step() returns",
            )
        for agent in rewards.keys() - observations.keys() if len(rewards) > len(observations) else ():
            self._note_late(agent, rewards[agent])
        rewards = {agent: number(rewards[agent], area.number, agent) for agent in observations}
        shared = dict.fromkeys(rewards, 0.0)
        if self._roles.shared_reward:
            rewards, shared = shared, self._shared(rewards)
        for agent, seen in observations.items():
            terminated = flag(terminations[agent], "termination", area.number, agent)
            if flag(truncations[agent], "truncation", area.number, agent) or terminated:
                self._end(area, agent, seen, not terminated, rewards[agent], shared[agent])
            else:
                self._decide(area, agent, seen, infos.get(agent, {}), rewards[agent], shared[agent])
        if not _present(area.env) or not area.playing:  # some leave ended agents in self.agents
            self._begin_next(area)

    def _shared(self, rewards: Mapping[str, float]) -> dict[str, float]:
        """Returns for each agent the mean reward of its team in the area, which is its group."""
        of_team: defaultdict[int, list[float]] = defaultdict(list)
        for agent, reward in rewards.items():
            of_team[self._teams[self._index[agent]]].append(reward)
        means = {team: float(np.mean(several)) for team, several in of_team.items()}
        return {agent: means[self._teams[self._index[agent]]] for agent in rewards}

    def _by_agent(self, call: str, result: Value, names: Sequence[str]) -> Value:
        """Returns what `reset` or `step` has returned.

        Raises:
            SpecError: it is no tuple of mappings that have all agents that are observed.
        """
        if result is None and not isinstance(self.env, import_optional("pettingzoo", "pettingzoo").ParallelEnv):
            raise SpecError(
                got=f"{shown(self.env)}, whose {call}() returns nothing",
                expected="an environment whose agents act together, or in turn",
                remedy="derive it from pettingzoo.ParallelEnv, or from pettingzoo.AECEnv",
            )
        first, *others = parts = returned(call, result, names)
        if wrong := next((name for name, part in zip(names, parts, strict=True) if not isinstance(part, Mapping)), ""):
            raise SpecError(
                got=f"{shown(parts[names.index(wrong)])} as {wrong} from {call}()",
                expected="a dict with a value for each agent",
                remedy=f"correct what {call}() returns",
            )
        if unknown := first.keys() - self._index.keys():
            got, expected = f"an observation of {_names(unknown)} from {call}()", f"agents of {self._names}"
            raise SpecError(got=got, expected=expected, remedy="name all agents in possible_agents")
        if MASK in parts[-1]:
            got, expected = f"{MASK!r} beside the agents in infos from {call}()", "it in the info of each agent"
            raise SpecError(got=got, expected=expected, remedy=f"return {{agent: {{{MASK!r}: mask}}}}")
        for name, part in zip(names[1:-1], others, strict=False):  # infos may be left out
            if absent := first.keys() - part.keys():
                expected = "those of all observed agents"
                raise SpecError(got=f"no {name} of {_names(absent)}", expected=expected, remedy="add them in step()")
        return parts


class TurnGame(_PettingZooBase):
    """Steps environments whose agents act in turn: an agent's reward accumulates until its next turn."""

    _turns_noted = 1000
    """Turns whose sums of rewards are still to be compared."""
    _is_last_noted = False

    def _open(self, area: _Area, begun: Value) -> None:
        if _present(area.env):
            self._advance(area, "reset")

    def _play(self, area: _Area, values: Mapping[str, Value]) -> None:
        agent = attribute(area.env, "agent_selection", call="reset")
        before = dict(_sums_and_rewards(area.env)[0]) if self._turns_noted else {}
        area.env.step(values[agent])
        if self._turns_noted:
            self._turns_noted -= 1
            self._note_sums(area.env, agent, before)
        self._advance(area)

    def _note_sums(self, env: AECEnv, acting: str, before: Mapping[str, float]) -> None:
        """Notes once where rewards of earlier turns are counted again, or are lost."""
        sums, rewards = _sums_and_rewards(env)
        for agent in [one for one in before if one in sums and one in rewards]:
            reward, earlier = rewards[agent], 0.0 if agent == acting else before[agent]
            if math.isclose(sums[agent], earlier + reward, rel_tol=1e-6, abs_tol=1e-9):
                continue
            rule = "begins with self._cumulative_rewards[agent] = 0"
            if agent != acting and earlier:
                rule += ", which leaves those of other agents as they are"
            elif not sums[agent]:
                rule = "ends with self._accumulate_rewards()"
            sys.stderr.write(
                f"{NOTICE}self._cumulative_rewards[{agent!r}] is {sums[agent]:g} after the step() of {acting!r}; with "
                f"its reward of {reward:g} it would be {earlier + reward:g}; step() {rule}\n"
            )
            self._turns_noted = 0
            return

    def _note_last(self, env: AECEnv, agent: str, present: Collection[str]) -> None:
        """Notes once where an agent plays on after all others have ended: of two, this is seldom meant."""
        if self._is_last_noted or len(self._names) == 1:
            return
        ended = [one for one in present if env.terminations.get(one) or env.truncations.get(one)]
        if len(present) - len(ended) == 1:
            self._is_last_noted = True
            sys.stderr.write(
                f"{NOTICE}{agent!r} acts after all others have ended; where that is the end of the game, step() sets "
                "the termination of every agent\n"
            )

    def _advance(self, area: _Area, call: str = "step") -> None:
        """Advances to the next turn of an agent that has not ended, and removes ended agents on the way.

        Args:
            area: with the environment.
            call: the method that has set its state, for messages.
        """
        env = area.env
        while present := _present(env):
            agent = attribute(env, "agent_selection", call="reset")
            if agent not in present:
                got, expected = f"agent_selection {agent!r}", f"one of self.agents {present}"
                raise SpecError(got=got, expected=expected, remedy="select one of them at the end of step()")
            try:
                last = env.last()
            except (AttributeError, KeyError) as error:
                if (absent := _incomplete(env, agent, call)) is None:
                    raise
                raise absent from error
            seen, reward, terminated, truncated, info = returned("last", last, _LAST)
            reward = number(reward, area.number, agent)
            terminated = flag(terminated, "termination", area.number, agent)
            if not (flag(truncated, "truncation", area.number, agent) or terminated):
                self._note_last(env, agent, present)
                self._decide(area, agent, seen, info, reward)
                return
            self._end(area, agent, seen, not terminated, reward)
            try:
                env.step(None)
            except KeyError as error:  # of _was_dead_step(), which deletes all entries of the agent
                if (absent := _incomplete(env, agent, call, "rewards")) is None:
                    raise
                raise absent from error
            if agent in _present(env):
                raise SpecError(
                    got=f"{agent!r}, which has ended, in self.agents after its step(None)",
                    expected="an agent that leaves the game",
                    remedy="begin step() with: if self.terminations[agent] or self.truncations[agent]: "
                    "return self._was_dead_step(action)",
                )
        self._begin_next(area)


def _names(agents: Iterable[Value]) -> str:
    return ", ".join(sorted(map(str, agents)))


def _sums_and_rewards(env: AECEnv) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Returns the sum of each agent's rewards since its last turn, and its reward of the last step."""
    found = (getattr(env.unwrapped, name, None) for name in ("_cumulative_rewards", "rewards"))
    sums, rewards = (one if isinstance(one, Mapping) else {} for one in found)
    return sums, rewards


def _present(env: AECEnv | ParallelEnv) -> Collection[str]:
    """Returns the agents that play now.

    Raises:
        SpecError: self.agents is no list of them.
    """
    agents = attribute(env, "agents", call="reset")
    if isinstance(agents, str) or not isinstance(agents, Collection):
        remedy = "set self.agents to a list in reset() and step()"
        raise SpecError(got=f"{shown(agents)} as self.agents", expected="a list of the agents that play", remedy=remedy)
    return agents


def _incomplete(env: AECEnv, agent: str, call: str, *others: str) -> SpecError | None:
    """Returns the error of an attribute that has no entry of an agent, which `last` reads; None where all have one.

    Attributes other than those are looked at first.
    """
    for name in (*others, "_cumulative_rewards", "terminations", "truncations", "infos"):
        found = getattr(env.unwrapped, name, None)
        if not isinstance(found, Mapping) or agent not in found:
            got = f"no {agent!r} in self.{name} after {call}()"
            return SpecError(got=got, expected="an entry for each of self.agents", remedy=f"set them all in {call}()")
    return None


# ---------------------------------------------------------------- spaces


def _space(env: AECEnv | ParallelEnv, kind: str, agent: str) -> Space[Value]:
    """Returns a space of an agent.

    Raises:
        SpecError: there is none.
    """
    if (of_agents := getattr(env, kind, None)) is not None and not callable(of_agents):
        raise SpecError(
            got=f"{kind} that is {shown(of_agents)}",
            expected="a method that returns the space of an agent",
            remedy=f"define {kind}(self, agent)",
        )
    try:
        found: Space[Value] = getattr(env, kind)(agent)
    except (AttributeError, KeyError, TypeError) as error:
        if place_of(error):
            raise
        raise SpecError(
            got=f"no {kind} of agent {agent!r}", expected="one", remedy=f"define {kind}(self, agent)"
        ) from error
    return found


def _spaces(
    env: AECEnv | ParallelEnv,
    agents: Sequence[str],
    ids: Sequence[BehaviorId],
    observe: Callable[[Space[Value]], Observations],
) -> tuple[dict[str, Observations], dict[str, Actions], frozenset[str]]:
    """Returns readers and writers by behavior name, and the agents whose observation holds their mask."""
    first: dict[str, str] = {}
    for agent, identity in zip(agents, ids, strict=True):
        other = first.setdefault(identity.name, agent)
        for kind in ("observation_space", "action_space"):
            mine, theirs = _space(env, kind, agent), _space(env, kind, other)
            if mine != theirs:
                raise SpecError(
                    got=f"behavior {identity.name!r} with {kind} {theirs} of {other!r} and {mine} of {agent!r}",
                    expected="the same spaces for all agents of a behavior name",
                    remedy="set behaviors=per_type, or pad the spaces with a wrapper (supersuit)",
                )
    masked = frozenset(agent for agent in agents if MASK in getattr(env.observation_space(agent), "spaces", ()))
    readers = {name: observe(_unmasked(env.observation_space(agent))) for name, agent in first.items()}
    writers = {name: Actions(env.action_space(agent)) for name, agent in first.items()}
    return readers, writers, masked


def _unmasked(space: Space[Value]) -> Space[Value]:
    """Returns the space without its action mask."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict) or MASK not in space.spaces:
        return space
    return spaces.Dict({key: inner for key, inner in space.spaces.items() if key != MASK})
