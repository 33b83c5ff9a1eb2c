"""Plays environments whose agents act at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from sparring.pipeline.bridges.explain import flag, number, returned, shown
from sparring.pipeline.bridges.making import import_optional
from sparring.pipeline.bridges.pettingzoo.agents import names_of, present_agents
from sparring.pipeline.bridges.pettingzoo.game import Area, PettingZooGame
from sparring.pipeline.bridges.spaces import MASK, Value
from sparring.pipeline.specs import SpecError

_RESET = ("observations", "infos")
_STEP = ("observations", "rewards", "terminations", "truncations", "infos")


class ParallelGame(PettingZooGame):
    """Steps environments whose agents act at once."""

    def _open(self, area: Area, begun: Value) -> None:
        observations, infos = self._by_agent("reset", begun, _RESET)
        if observations and (absent := {*present_agents(area.env)} - observations.keys()):
            raise SpecError(
                got=f"no observation of {names_of(absent)} from reset()",
                expected="one of each agent in self.agents",
                remedy="add it, or add the agent to self.agents once it plays",
            )
        for agent, seen in observations.items():
            self._decide(area, agent, seen, infos.get(agent, {}))

    def _play(self, area: Area, values: Mapping[str, Value]) -> None:
        result = self._by_agent("step", area.env.step(values), _STEP)
        observations, rewards, terminations, truncations, infos = result
        if absent := area.playing - observations.keys():
            does_end = all(terminations.get(agent) or truncations.get(agent) for agent in absent)
            what = "which ends with this step" if does_end else "which has not ended"
            raise SpecError(
                got=f"no observation of {names_of(absent)}, {what}",
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
        if not present_agents(area.env) or not area.playing:  # some leave ended agents in self.agents
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
            got, expected = f"an observation of {names_of(unknown)} from {call}()", f"agents of {self._names}"
            raise SpecError(got=got, expected=expected, remedy="name all agents in possible_agents")
        if MASK in parts[-1]:
            got, expected = f"{MASK!r} beside the agents in infos from {call}()", "it in the info of each agent"
            raise SpecError(got=got, expected=expected, remedy=f"return {{agent: {{{MASK!r}: mask}}}}")
        for name, part in zip(names[1:-1], others, strict=False):  # infos may be left out
            if absent := first.keys() - part.keys():
                expected = "those of all observed agents"
                remedy = "add them in step(), before self.agents is emptied"
                raise SpecError(got=f"no {name} of {names_of(absent)}", expected=expected, remedy=remedy)
        return parts
