"""Assigns the agents of an environment to behaviors, teams and groups."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sparring.pipeline.errors import NOTICE, SettingsError
from sparring.pipeline.specs import BehaviorId


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
