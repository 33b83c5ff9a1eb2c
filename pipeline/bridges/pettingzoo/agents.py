"""Reads which agents an environment has, and their spaces; what is wrong there is an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from sparring.pipeline.bridges.actions import Actions
from sparring.pipeline.bridges.explain import attribute, place_of, shown
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.bridges.spaces import MASK, Value
from sparring.pipeline.specs import BehaviorId, SpecError

if TYPE_CHECKING:
    from gymnasium import Space
    from pettingzoo import AECEnv, ParallelEnv


def names_of(agents: Iterable[Value]) -> str:
    return ", ".join(sorted(map(str, agents)))


def present_agents(env: AECEnv | ParallelEnv) -> Collection[str]:
    """Returns the agents that play now.

    Raises:
        SpecError: self.agents is no list of them.
    """
    agents = attribute(env, "agents", call="reset")
    if isinstance(agents, str) or not isinstance(agents, Collection):
        remedy = "set self.agents to a list in reset() and step()"
        raise SpecError(got=f"{shown(agents)} as self.agents", expected="a list of the agents that play", remedy=remedy)
    return agents


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


def spaces_of(
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
