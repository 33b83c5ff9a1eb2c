"""What a seed stands for: a run, and the bad things that happen to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from tests.world.world_game import Rules
from tests.world.world_links import CALM, Weather

BUFFER: Final = 32
LONGEST_HANG_S: Final = 14.0
"""Longer than a silent service is left alone."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The run.

    Attributes:
        mode: "overlap" or "lockstep".
        names: of the behaviors.
        trainer: of all.
        self_play: teams take turns.
        rules: of the game.
        simulators: how many.
        stepping: processes.
        messages: capacity of every queue.
        max_steps: of each learner.
        frame_s: a simulator's time for a frame.
        update_s: longest time for an update or a checkpoint.
        real: updates are computed; else a stub moves the weights a little.
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
        """Services and simulators."""
        return (*self.services, *(f"simulator-{number}" for number in range(self.simulators)))

    @property
    def usual_s(self) -> float:
        """About as long as the run takes if nothing happens."""
        rows = self.simulators * self.rules.areas * self.rules.members
        return 0.3 + self.max_steps / rows * self.frame_s + self.max_steps / BUFFER * self.update_s

    def text(self) -> str:
        """The configuration."""
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
    """Something bad.

    Attributes:
        kind: "crash", "hang", "slow", "weather", "reset", "full disk", "torn write" or "clock".
        at: seconds after the start.
        until: when it is over.
        parts: to whom; of weather the two ends of the link, nobody for all links.
        weather: of the link.
        value: of a clock, seconds that it jumps; of what is slow, the share of time that it runs.
    """

    kind: str
    at: float
    until: float
    parts: tuple[str, ...]
    weather: Weather = CALM
    value: float = 0.0

    def __str__(self) -> str:
        about = f" {self.weather}" if self.kind == "weather" else f" {self.value:g}" if self.value else ""
        return f"{self.at:8.3f} to {self.until:8.3f} {self.kind} {' '.join(self.parts)}{about}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run and its faults, in order."""

    seed: int
    setting: Setting
    faults: tuple[Fault, ...]

    @property
    def calm_from(self) -> float:
        """When the last fault is over."""
        return max((fault.until for fault in self.faults), default=0.0)

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.setting}", *map(str, self.faults)])


def draw(seed: int, mode: str | None = None) -> Plan:
    """The plan of a seed; `mode` keeps to one."""
    chance = Random(seed)
    setting = _setting(chance, mode)
    count = chance.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = sorted((_fault(chance, setting) for _ in range(count)), key=lambda fault: fault.at)
    return Plan(seed=seed, setting=setting, faults=tuple(faults))


def _setting(chance: Random, mode: str | None) -> Setting:
    drawn = chance.choice(("overlap", "lockstep"))
    mode = mode or drawn
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
    *("weather",) * 8,
    *("reset",) * 2,
    *("full disk",) * 1,
    *("torn write",) * 2,
    *("clock",) * 1,
)


def _fault(chance: Random, setting: Setting) -> Fault:
    kind = chance.choice(_KINDS)
    at = round(chance.uniform(0.0, 1.3 * setting.usual_s), 4)
    some: Sequence[str] = setting.parts
    if kind == "weather":
        length = chance.choice((0.05, 0.5, 2.0))
        parts, weather = _weather(chance, setting)
        return Fault(kind=kind, at=at, until=at + length, parts=parts, weather=weather)
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


def _weather(chance: Random, setting: Setting) -> tuple[tuple[str, ...], Weather]:
    one, other = chance.sample(setting.parts, 2)
    parts = chance.choice(((), (one, other)))
    if chance.random() < 0.25:
        return parts, Weather(cut=True, held=chance.random() < 0.5)
    strength = chance.choice((0.05, 0.2, 0.5))
    return parts, Weather(
        lost=strength * (chance.random() < 0.6),
        repeated=strength * (chance.random() < 0.5),
        damaged=strength * (chance.random() < 0.3),
        delay_s=chance.choice((0.0, 0.005, 0.1, 0.6)),
        disorder=chance.random() < 0.6,
    )
