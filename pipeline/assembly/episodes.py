"""Notes the episodes of members that end, for the next message."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.columns import Mask, Slots, concatenate
from sparring.pipeline.assembly.members import NO_SLOTS, Members
from sparring.pipeline.messages.segments import Episodes

NO_RETURNS: Final = np.empty(0, np.float32)


def note_episodes(
    one: Members,
    slots: Slots,
    outcomes: NDArray[np.float32] | None = None,
    group_returns: NDArray[np.float32] = NO_RETURNS,
) -> None:
    """Notes the ended episodes of `slots`, whose steps are all in closed segments.

    Args:
        one: members of a behavior name.
        slots: [n] slots of the agents.
        outcomes: [n] outcomes of their matches; None if none was reported.
        group_returns: [g] returns of the groups that have ended with them.
    """
    whole = _are_whole(one, slots)
    reported = slots[whole]
    one.episodes.append(
        Episodes(
            returns=one.episode_returns[reported].astype(np.float32),
            lengths=one.episode_lengths[reported].astype(np.int32),
            group_returns=group_returns,
            teams=one.teams[reported],
            outcomes=np.full(len(reported), -1.0, np.float32) if outcomes is None else outcomes[whole],
            agents=one.agents[reported],
            groups=one.groups[reported],
            shared_returns=one.episode_group_returns[reported].astype(np.float32),
            unreported=one.agents[slots[~whole]],
            lessons=one.lessons[reported if one.has_lessons else reported[:0]],
        )
    )


def has_episodes(one: Members) -> bool:
    """Returns whether any episode has ended since the last message."""
    return any(len(noted.agents) or len(noted.unreported) or len(noted.group_returns) for noted in one.episodes)


def take_episodes(one: Members) -> Episodes:
    """Returns the episodes that have ended since the last message, and forgets them."""
    if not one.episodes:
        note_episodes(one, NO_SLOTS)
    episodes, one.episodes = one.episodes, []
    return concatenate(episodes)


def are_last(one: Members, ending: Slots) -> Mask:
    """Returns [n] whether no agent of the same group remains without `ending`; a lone agent is its own group."""
    groups = one.groups[ending]
    if not groups.any():
        return np.ones(len(ending), bool)
    left = one.live.copy()
    left[ending] = False
    last: Mask = ~np.isin(groups, one.groups[left]) | (groups == 0)
    return last


def group_returns(one: Members, last: Slots) -> NDArray[np.float32]:
    """Returns one return for each group whose last agents are `last`, if one of their episodes was seen whole.

    Members of a group that end together saw the same group rewards; the longest episode saw most of them.
    """
    last = last[one.groups[last] != 0]
    if not last.size:
        return NO_RETURNS
    last = last[_are_whole(one, last)]
    order = last[np.argsort(-one.episode_lengths[last], kind="stable")]
    _, first = np.unique(one.groups[order], return_index=True)
    return one.episode_group_returns[order[np.sort(first)]].astype(np.float32)


def _are_whole(one: Members, slots: Slots) -> Mask:
    """Returns [n] which episodes were seen from start to end, and have at least one step."""
    whole: Mask = one.known[slots] & ~one.lost[slots] & (one.episode_lengths[slots] > 0)
    return whole
