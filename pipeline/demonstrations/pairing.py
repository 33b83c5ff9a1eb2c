"""This module determines which decision's action accompanies an observation in a `.demo` file.

ML-Agents' files exist in two generations:

    previous   the recorder writes a pair before its decision is made: the action is that of the decision before
               (pull request 1999 of ML-Agents; ExpertPyramid.demo)
    own        the action is that of the pair's own observation, and the file's last pair has none
               (older files; Expert3DBall.demo, ExpertBasic.demo)

In both, reward and end of a pair are those of the step that led to its observation. No field of a file names its
generation. They differ in which pair has no action to hold: in `previous` the first of an episode, in `own` the last of
the file. The rule, in this order:

1. own: the file's last pair has no action, and no pair is without one if its episode continues.
2. previous: no pair but the first of an episode is without an action. Every episode begins with an action that is
   missing, zero, or a repetition of the pair before, which an agent holds until its first decision; at least one is
   missing or zero. The file's first episode may begin otherwise: a recording may begin in the middle of one.
3. Any other file is refused, until a setting names its generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sparring.pipeline.bridges.unity import UnreadableData

ActionsOf = Literal["previous", "own"]
DemoActions = Literal["auto", "previous", "own"]

FORCED: Final = "set by demo_actions"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """Names which decision's action a pair of a file holds.

    Attributes:
        actions: that of the decision before, or that of the pair's own observation.
        evidence: how it is known.
    """

    actions: ActionsOf
    evidence: str


class UnknownPairing(UnreadableData):
    """Reports that the pairs of a file match neither generation."""

    expected = (
        "no action in its last pair (the action is that of the pair's own observation), or episodes that begin with an "
        "action of zero (it is that of the decision before)"
    )

    def __init__(self, got: str) -> None:
        super().__init__(got, "set demo_actions beside demo_path to own or previous, or record it again")


def pairing_of(pairs: Sequence[Any], wanted: DemoActions) -> Pairing:
    """Returns the generation of a file.

    Args:
        pairs: messages of the file, at least one.
        wanted: `auto` detects it, anything else forces it.

    Raises:
        UnknownPairing: detection was wanted, and the pairs match neither generation.
    """
    if wanted != "auto":
        return Pairing(actions=wanted, evidence=FORCED)
    actions = [action_values(pair.action_info) for pair in pairs]
    missing = {at for at, action in enumerate(actions) if not any(action)}
    first, last = _borders(pairs)
    if len(pairs) - 1 in missing and missing <= last:
        return Pairing(actions="own", evidence="its last pair has no action")
    if unexpected := sorted(missing - first):
        raise UnknownPairing(
            f"no action in pair {unexpected[0]} of {len(pairs)}, which is not the first of its episode"
        )
    zero = {at for at in first if not any(map(any, actions[at]))}
    decided = {at for at in first - zero if not (at and actions[at] == actions[at - 1])}
    if not zero or decided - {0}:
        raise UnknownPairing(
            f"an action in its last pair, and {len(decided)} of {len(first)} episodes that begin with a new one"
        )
    return Pairing(actions="previous", evidence=f"{len(zero)} of {len(first)} episodes begin with no action or zero")


def action_values(action: Any) -> tuple[bytes, tuple[int, ...], bytes]:
    """Returns all values of an action's message as stored in the file; all are empty if it holds none."""
    return action.continuous_actions, tuple(action.discrete_actions), action.vector_actions_deprecated


def _borders(pairs: Sequence[Any]) -> tuple[set[int], set[int]]:
    """Returns the numbers of the first and of the last pair of each episode: it ends with `done`, or with the file."""
    first: set[int] = set()
    last: set[int] = set()
    running: dict[int, int] = {}
    for at, pair in enumerate(pairs):
        if pair.agent_info.id not in running:
            first.add(at)
        running[pair.agent_info.id] = at
        if pair.agent_info.done:
            last.add(running.pop(pair.agent_info.id))
    return first, last | set(running.values())
