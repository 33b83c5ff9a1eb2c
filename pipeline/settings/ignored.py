"""Finds keys of a valid configuration that have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparring.pipeline.learning.settings import IntrinsicSettings
from sparring.pipeline.settings.conflicts import Conflict
from sparring.pipeline.settings.parameters import Curriculum

if TYPE_CHECKING:
    from sparring.pipeline.settings.behavior import BehaviorSettings
    from sparring.pipeline.settings.model import Settings
    from sparring.pipeline.settings.problems import Path


def ignored(settings: Settings) -> Iterator[Conflict]:
    """Yields the keys that a run ignores; ML-Agents warns of the last two."""
    places: dict[Path, BehaviorSettings] = {("behaviors", name): one for name, one in settings.behaviors.items()}
    if settings.unnamed is not None:
        places["default_settings",] = settings.unnamed
    for place, behavior in places.items():
        yield from _team_change(place, behavior)
        yield from _memory(place, behavior)
    yield from _last_criteria(settings)


def _team_change(place: Path, behavior: BehaviorSettings) -> Iterator[Conflict]:
    own = behavior.self_play
    if own is not None and own.team_change > behavior.max_steps:
        yield Conflict(
            paths=((*place, "self_play", "team_change"), (*place, "self_play", "save_steps"), (*place, "max_steps")),
            text=f"got team_change {own.team_change} with max_steps {behavior.max_steps}; expected at most max_steps, "
            "because the learning team does not change before; lower team_change (not written, it is 5 x save_steps)",
        )


def _memory(place: Path, behavior: BehaviorSettings) -> Iterator[Conflict]:
    for name, signal in behavior.reward_signals.named().items():
        if isinstance(signal, IntrinsicSettings) and signal.network_settings.memory is not None:
            yield Conflict(
                paths=((*place, "reward_signals", name, "network_settings", "memory"),),
                text=f"got a memory for the network of {name}; expected none, because it is ignored: a reward signal "
                "judges each step by itself; remove memory",
            )


def _last_criteria(settings: Settings) -> Iterator[Conflict]:
    for name, parameter in settings.environment_parameters.items():
        lessons = parameter.curriculum if isinstance(parameter, Curriculum) else ()
        if lessons and lessons[-1].completion_criteria is not None:
            place: Path = ("environment_parameters", name, "curriculum", len(lessons) - 1)
            yield Conflict(
                paths=((*place, "completion_criteria"),),
                text=f"got completion_criteria for the last lesson {lessons[-1].name!r}; expected none, because they "
                "are ignored: no lesson follows; remove them, or add a lesson",
            )
