"""The plan of a seed: a run and its faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from tests.world.world_game import Rules
from tests.world.world_links import CALM, LinkConditions

BUFFER: Final = 32
LONGEST_HANG_S: Final = 14.0
"""A time longer than the heartbeat timeout of services."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a run.

    Attributes:
        mode: "overlap" or "lockstep".
        names: names of the behaviors.
        trainer: trainer type of all behaviors.
        self_play: whether teams take turns in learning.
        rules: rules of the game.
        simulators: number of simulators.
        stepping: number of stepping processes.
        messages: capacity of every queue.
        max_steps: training length of each learner.
        frame_s: time of a simulator's frame.
        update_s: longest time of an update or a checkpoint.
        real: whether updates are computed; otherwise a stub changes the weights slightly.
    """

    mode: str
    names: tuple[str, ...]
    trainer: str
    self_play: bool
    rules: Rules
    simulators: int
    stepping: int
    messages: int
    max_steps: int
    frame_s: float
    update_s: float
    real: bool

    @property
    def services(self) -> tuple[str, ...]:
        stepping = (f"stepping-{index}" for index in range(self.stepping))
        return (*stepping, "assembly", "coordination", *(f"learning-{name}" for name in self.names))

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the names of services and simulators."""
        return (*self.services, *(f"simulator-{number}" for number in range(self.simulators)))

    @property
    def usual_s(self) -> float:
        """Returns the approximate duration of the run without faults."""
        rows = self.simulators * self.rules.areas * self.rules.members
        return 0.3 + self.max_steps / rows * self.frame_s + self.max_steps / BUFFER * self.update_s

    def text(self) -> str:
        """Returns the configuration."""
        play = "{save_steps: 32, team_change: 64, swap_steps: 48, window: 3}"
        behaviors = "".join(
            f"""
  {name}:
    trainer_type: {self.trainer}
    hyperparameters: {{batch_size: 16, buffer_size: {BUFFER}, num_epoch: 1}}
    network_settings: {{hidden_units: 8, num_layers: 1}}
    max_steps: {self.max_steps}
    time_horizon: 8
    checkpoint_interval: 64"""
            + (f"\n    self_play: {play}" if self.self_play else "")
            for name in self.names
        )
        return f"""
behaviors: {behaviors}
pipeline:
  mode: {self.mode}
  recovery_interval: 0.5
  address: "unix:///nowhere"
  stepping_processes: {self.stepping}
  max_agents: 64
  heartbeat_s: 1.0
  simulator_timeout_s: 4.0
  capacities: {{step_batches: {self.messages * self.stepping}, segments: {self.messages}}}
  restarts: {{budget: 10000, period_s: 600.0, backoff_s: 0.1, backoff_max_s: 0.4}}
  export: false
  stall_timeout_s: 600.0
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a run.

    Attributes:
        kind: "crash", "hang", "slow", "link", "reset", "full disk", "torn write" or "clock".
        at: start, in seconds after the start of the run.
        until: end, in seconds after the start of the run.
        parts: affected parts; for "link" the two ends of the link, or () for all links.
        conditions: conditions of the link.
        value: jump of the clock in seconds, or the share of time that a slow part runs.
    """

    kind: str
    at: float
    until: float
    parts: tuple[str, ...]
    conditions: LinkConditions = CALM
    value: float = 0.0

    def __str__(self) -> str:
        about = f" {self.conditions}" if self.kind == "link" else f" {self.value:g}" if self.value else ""
        return f"{self.at:8.3f} to {self.until:8.3f} {self.kind} {' '.join(self.parts)}{about}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run and its faults in the order of their times."""

    seed: int
    setting: Setting
    faults: tuple[Fault, ...]

    @property
    def calm_from(self) -> float:
        """Returns the end of the last fault."""
        return max((fault.until for fault in self.faults), default=0.0)

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.setting}", *map(str, self.faults)])


def sample_plan(seed: int, mode: str | None = None) -> Plan:
    """Returns the plan of a seed, in the given mode unless it is None."""
    chance = Random(seed)
    setting = _setting(chance, mode)
    count = chance.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = sorted((_fault(chance, setting) for _ in range(count)), key=lambda fault: fault.at)
    return Plan(seed=seed, setting=setting, faults=tuple(faults))


def _setting(chance: Random, mode: str | None) -> Setting:
    sampled = chance.choice(("overlap", "lockstep"))
    mode = mode or sampled
    names: tuple[str, ...] = chance.choice((("A",), ("A",), ("A", "B")))
    self_play = chance.random() < 0.35
    trainer = chance.choice(("ppo", "ppo", "poca"))
    behavior_ids = names
    if self_play:
        behavior_ids = ("A?team=0", "B?team=1") if len(names) == 2 else ("A?team=0", "A?team=1")
    grouped = ("", "behavior_id") if self_play else ("", "behavior_id", "area")
    rules = Rules(
        behavior_ids=behavior_ids,
        areas=chance.randint(1, 2),
        members=chance.randint(1, 4),
        groups=chance.choice(grouped) if trainer == "ppo" else grouped[-1],
        contests=self_play,
        ends=chance.choice((0.05, 0.15, 0.4)),
    )
    return Setting(
        mode=mode,
        names=names,
        trainer=trainer,
        self_play=self_play,
        rules=rules,
        simulators=chance.randint(1, 4),
        stepping=1 if mode == "lockstep" else chance.choice((1, 1, 2)),
        messages=chance.choice((2, 3, 6, 16)),
        max_steps=chance.choice((64, 96, 160)),
        frame_s=chance.choice((0.01, 0.03, 0.1)),
        update_s=chance.choice((0.0, 0.02, 0.15)),
        real=chance.random() < 0.04,
    )


_KINDS: Final = (
    *("crash",) * 6,
    *("hang",) * 3,
    *("slow",) * 2,
    *("link",) * 8,
    *("reset",) * 2,
    *("full disk",) * 1,
    *("torn write",) * 2,
    *("clock",) * 1,
)


def _fault(chance: Random, setting: Setting) -> Fault:
    kind = chance.choice(_KINDS)
    at = round(chance.uniform(0.0, 1.3 * setting.usual_s), 4)
    some: Sequence[str] = setting.parts
    if kind == "link":
        length = chance.choice((0.05, 0.5, 2.0))
        parts, conditions = _link(chance, setting)
        return Fault(kind=kind, at=at, until=at + length, parts=parts, conditions=conditions)
    values: dict[str, Any] = {"value": 0.0}
    length = 0.0
    if kind == "hang":
        length = chance.choice((0.02, 0.3, 1.5, 5.0, LONGEST_HANG_S))
    elif kind == "slow":
        length, values["value"] = chance.choice((0.3, 2.0)), chance.choice((0.1, 0.5))
    elif kind == "reset":
        some = [part for part in setting.parts if part.startswith("simulator")]
    elif kind in ("full disk", "torn write"):
        some = [part for part in setting.services if part.startswith(("coordination", "learning"))]
        length = chance.choice((0.1, 1.0))
    elif kind == "clock":
        some, values["value"] = setting.services, chance.choice((-86400.0, -3.0, 3.0, 86400.0))
    return Fault(kind=kind, at=at, until=at + length, parts=(chance.choice(list(some)),), **values)


def _link(chance: Random, setting: Setting) -> tuple[tuple[str, ...], LinkConditions]:
    first, second = chance.sample(setting.parts, 2)
    parts = chance.choice(((), (first, second)))
    if chance.random() < 0.25:
        return parts, LinkConditions(down=True, held=chance.random() < 0.5)
    strength = chance.choice((0.05, 0.2, 0.5))
    return parts, LinkConditions(
        lost=strength * (chance.random() < 0.6),
        repeated=strength * (chance.random() < 0.5),
        damaged=strength * (chance.random() < 0.3),
        delay_s=chance.choice((0.0, 0.005, 0.1, 0.6)),
        disorder=chance.random() < 0.6,
    )
