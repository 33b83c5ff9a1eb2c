"""Plays environments whose agents act in turn, and whose rewards accumulate until an agent's next turn."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from sparring.pipeline.bridges.explain import attribute, flag, number, returned
from sparring.pipeline.bridges.pettingzoo.agents import present_agents
from sparring.pipeline.bridges.pettingzoo.game import Area, PettingZooGame
from sparring.pipeline.bridges.spaces import Value
from sparring.pipeline.errors import NOTICE
from sparring.pipeline.specs import SpecError

if TYPE_CHECKING:
    from pettingzoo import AECEnv

_LAST = ("observation", "reward", "terminated", "truncated", "info")


class TurnGame(PettingZooGame):
    """Steps environments whose agents act in turn: an agent's reward accumulates until its next turn."""

    _turns_noted = 1000
    """Turns whose sums of rewards are still to be compared."""
    _is_last_noted = False

    def _open(self, area: Area, begun: Value) -> None:
        if present_agents(area.env):
            self._advance(area, "reset")

    def _play(self, area: Area, values: Mapping[str, Value]) -> None:
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
        agents = [one for one in before if one in sums and one in rewards]
        if not any(rewards.values()) and any(sums[one] not in (0, before[one]) for one in agents):
            return  # cleared after they were added, which changes no sum
        for agent in agents:
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

    def _advance(self, area: Area, call: str = "step") -> None:
        """Advances to the next turn of an agent that has not ended, and removes ended agents on the way.

        Args:
            area: with the environment.
            call: the method that has set its state, for messages.
        """
        env, gone = area.env, ""
        while present := present_agents(env):
            agent = attribute(env, "agent_selection", call="reset")
            if agent not in present:
                got, expected = f"agent_selection {agent!r}", f"one of self.agents {present}"
                remedy = "select one of them at the end of step()"
                if agent == gone:
                    got = f"{got} after its step(None), with which it has left"
                    remedy = "set the terminations of all agents where the game is over; where it goes on without "
                    remedy += f"{agent!r}, end step() with self._deads_step_first()"
                raise SpecError(got=got, expected=expected, remedy=remedy)
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
            gone = agent
            if agent in present_agents(env):
                raise SpecError(
                    got=f"{agent!r}, which has ended, in self.agents after its step(None)",
                    expected="an agent that leaves the game",
                    remedy="begin step() with: if self.terminations[agent] or self.truncations[agent]: "
                    "return self._was_dead_step(action)",
                )
        self._begin_next(area)


def _sums_and_rewards(env: AECEnv) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Returns the sum of each agent's rewards since its last turn, and its reward of the last step."""
    found = (getattr(env.unwrapped, name, None) for name in ("_cumulative_rewards", "rewards"))
    sums, rewards = (one if isinstance(one, Mapping) else {} for one in found)
    return sums, rewards


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
