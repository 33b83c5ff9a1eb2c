"""Random groups as plain objects.

A history of a group says when each member starts, decides and ends, in group time. It is divided into group segments;
`group_helpers.record` turns these into columns, and slow twins iterate over the objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sparring.pipeline.networks.actor import Actor, InferenceActor
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

OWN = "Walker"
PLAIN = BehaviorSpec(
    observations=(ObservationSpec(name="near", shape=(3,)), ObservationSpec(name="far", shape=(2,))),
    actions=ActionSpec(continuous=2, discrete=(3, 2)),
)
RICH = BehaviorSpec(
    observations=(
        ObservationSpec(name="eye", shape=(1, 6, 5), kind="image", dtype="uint8"),
        ObservationSpec(name="state", shape=(2,)),
        ObservationSpec(name="others", shape=(3, 2), kind="entities"),
        ObservationSpec(name="aim", shape=(2,), kind="goal"),
    ),
    actions=ActionSpec(discrete=(2, 3)),
)
TEAMMATES = {
    "Driver": BehaviorSpec(
        observations=(ObservationSpec(name="road", shape=(4,)),), actions=ActionSpec(continuous=1, discrete=(2,))
    ),
    "Crane": BehaviorSpec(observations=(ObservationSpec(name="load", shape=(1,)),), actions=ActionSpec(discrete=(4,))),
}
"""Behaviors that share groups with ours."""


def specs_of(own: BehaviorSpec = PLAIN, teammates: int = 0) -> dict[str, BehaviorSpec]:
    """Returns the specs of our own behavior and of some others."""
    return {OWN: own, **dict(list(TEAMMATES.items())[:teammates])}


# ---------------------------------------------------------------- groups and members


@dataclass(eq=False)
class Decision:
    """Observations and actions of a member; `time` is group time, of a segment if it belongs to a `Member`."""

    time: int
    seen: tuple[np.ndarray, ...]
    continuous: np.ndarray
    discrete: np.ndarray
    log_prob: float = 0.0
    mask: np.ndarray | None = None
    carried: np.ndarray | None = None
    reward: float = 0.0
    group_reward: float = 0.0
    version: int = 1


@dataclass(eq=False)
class MemberHistory:
    """A member in the history of a group; `last` has its final observations."""

    name: str
    episode: int
    decisions: list[Decision] = field(default_factory=list)
    end: int | None = None
    interrupted: bool = False
    last: Decision | None = None


@dataclass(eq=False)
class Member:
    """A member in a group segment."""

    name: str
    episode: int
    steps: list[Decision]
    following: Decision
    until: int
    terminated: bool = False
    interrupted: bool = False

    @property
    def ended(self) -> bool:
        return self.terminated or self.interrupted

    def at(self, time: int) -> Decision | None:
        """Returns the latest decision at a time, or None if the member is absent."""
        begun = [one for one in (*self.steps, self.following) if one.time <= time]
        return begun[-1] if begun and time < self.until else None


@dataclass(eq=False)
class Group:
    """A group segment."""

    number: int
    span: int
    over: bool
    rewards: np.ndarray
    members: list[Member]

    def of(self, name: str) -> list[Member]:
        return [one for one in self.members if one.name == name]

    def there(self, time: int) -> list[tuple[Member, Decision]]:
        """Returns the members present at a time, with their latest decisions."""
        return [(one, decision) for one in self.members if (decision := one.at(time)) is not None]

    @property
    def steps(self) -> int:
        """Number of our own decisions."""
        return sum(len(one.steps) for one in self.of(OWN))


def observed(spec: BehaviorSpec, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Returns a random row of each observation; some entities are padding."""
    columns = []
    for one in spec.observations:
        if one.dtype == "uint8":
            columns.append(random.integers(0, 256, (1, *one.shape), np.uint8))
            continue
        column = random.standard_normal((1, *one.shape), np.float32)
        if one.kind == "entities":
            column[:, random.random(one.shape[0]) < 0.4] = 0
        columns.append(column)
    return tuple(columns)


class World:
    """Groups whose members start, decide and end at random; ours act by a policy, the others at random.

    Args:
        specs: specs by behavior name, including ours.
        actor: our actor; a new one by default.
        seed: seed of everything random.
    """

    def __init__(self, specs: dict[str, BehaviorSpec], actor: Actor | None = None, seed: int = 0) -> None:
        self.specs = specs
        self.random = np.random.default_rng(seed)
        self._source = np.random.default_rng(seed)
        if actor is None:
            network = NetworkSettings(hidden_units=8, vis_encode_type="match3")
            actor = Actor(specs[OWN], network, torch.Generator().manual_seed(seed))
        self.acting: InferenceActor = actor.frozen()
        self.version = 1
        self._agent_episodes = self._groups = 0
        self._carried: dict[int, np.ndarray] = {}

    def history(self, times: int = 8, most: int = 4, over: bool | None = None) -> tuple[list[MemberHistory], int, bool]:
        """Returns the members of a new group, its last time, and whether it ended (at random if `over` is None)."""
        random, over = self.random, self.random.random() < 0.5 if over is None else over
        histories = [self._newcomer(OWN)]
        present, new, ended = [], histories[:], []
        for time in range(times + 1):
            if time:
                ended = [one for one in present if random.random() < 0.2 and (over or len(present) > 1)]
                ended = present if over and time == times else ended
                present = [one for one in present if one not in ended]
                for one in ended:
                    self._leave(one, time)
                if not present and over:
                    return histories, time, True
                if not present:
                    present.append(self._continue(ended.pop()))
                places = most - len(present)
                new = [self._newcomer() for _ in range(places) if random.random() < 0.3]
                histories += new
            deciding = [*new, *(one for one in present if random.random() < 0.6)]
            present += new
            if not deciding and not ended:
                deciding = [present[random.integers(len(present))]]
            for one in deciding:
                one.decisions.append(self._decide(one, time))
        return histories, times, False

    def group(self, times: int = 8, most: int = 4, over: bool | None = None, horizon: int = 99) -> list[Group]:
        """Returns the segments of a new group with decisions of ours, each of `horizon` times at most."""
        histories, times, over = self.history(times, most, over)
        self._groups += 1
        flushes = [*range(0, times, horizon), times]
        parts = [self._segment(histories, begin, end, over and end == times) for begin, end in pairwise(flushes)]
        return [one for one in parts if one.steps]

    def groups(self, count: int, **how: Any) -> list[Group]:
        """Returns segments of several groups in a random order that keeps the order within each group."""
        segments = [self.group(**how) for _ in range(count)]
        out = []
        while segments := [one for one in segments if one]:
            out.append(segments[self.random.integers(len(segments))].pop(0))
        return out

    # ------------------------------------------------------------ inside

    def _newcomer(self, name: str | None = None) -> MemberHistory:
        self._agent_episodes += 1
        return MemberHistory(
            list(self.specs)[self.random.integers(len(self.specs))] if name is None else name, self._agent_episodes
        )

    def _leave(self, one: MemberHistory, time: int) -> None:
        one.end, one.interrupted = time, bool(self.random.random() < 0.5)
        actions = self.specs[one.name].actions
        nothing = np.zeros(actions.continuous, np.float32), np.zeros(len(actions.discrete), np.int32)
        one.last = Decision(time, observed(self.specs[one.name], self.random), *nothing)

    @staticmethod
    def _continue(one: MemberHistory) -> MemberHistory:
        one.end, one.last = None, None
        return one

    def _decide(self, one: MemberHistory, time: int) -> Decision:
        spec, random = self.specs[one.name], self.random
        seen = observed(spec, random)
        if one.name != OWN:
            continuous = 2 * random.standard_normal(spec.actions.continuous, np.float32)
            discrete = np.array([random.integers(branch) for branch in spec.actions.discrete], np.int32)
            return Decision(time, seen, continuous, discrete)
        mask = np.zeros((1, spec.actions.mask_size), np.bool_)
        mask[0, 0] = random.random() < 0.5
        carried = self._carried.setdefault(one.episode, np.zeros((1, self.acting.carried), np.float32))
        before = carried[0].copy()
        continuous, discrete, log_prob = self.acting.act(seen, mask, self._source, carried=carried)
        rewards = random.standard_normal(2).tolist()
        return Decision(
            time, seen, continuous[0], discrete[0], float(log_prob[0]), mask[0], before, *rewards, self.version
        )

    def _segment(self, histories: list[MemberHistory], begin: int, end: int, over: bool) -> Group:
        members = [one for history in histories if (one := _member(history, begin, end, over)) is not None]
        order = self.random.permutation(len(members)).tolist()
        rewards = self.random.standard_normal(end - begin).astype(np.float32)
        return Group(self._groups, end - begin, over, rewards, [members[at] for at in order])


def _member(history: MemberHistory, begin: int, end: int, over: bool) -> Member | None:
    """Returns a member within the group times from `begin` to `end`, or None if it has no part in them.

    A decision is a step if the next one or the end completes it; an open one follows, and begins the next segment.
    An ended member is absent, except the last ones of a group that were interrupted.
    """
    if history.decisions[0].time > end or (history.end is not None and history.end <= begin):
        return None
    times = [one.time for one in history.decisions]
    done = [*times[1:], np.inf if history.end is None else history.end]
    steps = [_moved(one, begin) for one, at in zip(history.decisions, done, strict=True) if begin < at <= end]
    under_way = [one for one, at in zip(history.decisions, done, strict=True) if one.time <= end < at]
    if under_way:
        return Member(history.name, history.episode, steps, _moved(under_way[0], begin), end - begin + 1)
    assert history.end is not None
    assert history.last is not None
    remains = over and history.end == end and history.interrupted
    until = history.end - begin + remains
    return Member(
        history.name,
        history.episode,
        steps,
        _moved(history.last, begin),
        until,
        not history.interrupted,
        history.interrupted,
    )


def _moved(one: Decision, begin: int) -> Decision:
    columns = {part.name: getattr(one, part.name) for part in fields(Decision)}
    return Decision(**(columns | {"time": max(0, one.time - begin)}))
