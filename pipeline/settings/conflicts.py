"""Finds contradictions in a configuration whose keys are valid one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparring.pipeline.settings.hosts import problems
from sparring.pipeline.settings.parameters import Curriculum
from sparring.pipeline.settings.problems import Path, did_you_mean
from sparring.pipeline.specs import names_a_folder

if TYPE_CHECKING:
    from sparring.pipeline.settings.model import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Describes one contradiction.

    Attributes:
        paths: keys involved; the message points to the first one that is written.
        text: got, expected, remedy.
    """

    paths: tuple[Path, ...]
    text: str


class Conflicts(ValueError):
    """Reports all contradictions of one configuration."""

    def __init__(self, found: tuple[Conflict, ...]) -> None:
        self.found = found
        super().__init__("\n".join(conflict.text for conflict in found))


def conflicts(settings: Settings) -> tuple[Conflict, ...]:
    """Returns all contradictions in `settings`."""
    rules = (_any_behavior, _names, _mode, _lockstep, _sequences, _lessons, _players, _hosts)
    return tuple(conflict for rule in rules for conflict in rule(settings))


def threaded(settings: Settings) -> dict[str, bool]:
    """Returns `threaded` of each behavior that sets it; without behaviors, that of the defaults."""
    default = settings.default_settings
    own = settings.behaviors or ({} if default is None else {"default_settings": default})
    return {name: b.threaded for name, b in own.items() if b.threaded is not None}


def _any_behavior(settings: Settings) -> Iterator[Conflict]:
    if settings.behaviors:
        return
    if settings.default_settings is None:
        yield Conflict(
            paths=(("behaviors",),),
            text="got no behavior; expected at least one; write `behaviors: {NAME: {}}` with its name in the "
            "game, or `default_settings: {}`, which apply to any name",
        )
    elif settings.pipeline.hosts:
        yield Conflict(
            paths=(("default_settings",), ("pipeline", "hosts")),
            text="got default_settings without behaviors on several machines; expected the name of each behavior, "
            "because its learner needs a machine before the game names it; add `behaviors: {NAME: {}}`",
        )


def _names(settings: Settings) -> Iterator[Conflict]:
    for name in settings.behaviors:
        if not names_a_folder(name):
            yield Conflict(
                paths=(("behaviors", name),),
                text=f"got the behavior name {name!r}; expected a valid name of a folder, without #; "
                "write the name alone, without '?team=N': all teams share its settings",
            )


def _mode(settings: Settings) -> Iterator[Conflict]:
    chosen = threaded(settings)
    paths = _threaded_paths(settings)
    if len(set(chosen.values())) == 2:
        yield Conflict(
            paths=paths,
            text=f"got threaded {_listed(chosen)}; expected one value for all behaviors; "
            "leave threaded out and write pipeline.mode: overlap (true) or lockstep (false)",
        )
        return
    mode = settings.pipeline.mode
    if mode is not None and (mode == "lockstep") in chosen.values():
        yield Conflict(
            paths=(*paths, ("pipeline", "mode")),
            text=f"got threaded {_listed(chosen)} with pipeline.mode {mode}; "
            "expected true with overlap, false with lockstep; leave one of the two out",
        )


def _lockstep(settings: Settings) -> Iterator[Conflict]:
    processes = settings.pipeline.stepping_processes
    if settings.mode == "lockstep" and processes > 1:
        yield Conflict(
            paths=(("pipeline", "stepping_processes"), ("pipeline", "mode"), *_threaded_paths(settings)),
            text=f"got {processes} stepping processes in lockstep; expected 1, because the order of rows is fixed; "
            "write stepping_processes: 1, or mode: overlap",
        )


def _sequences(settings: Settings) -> Iterator[Conflict]:
    for name, behavior in settings.behaviors.items():
        memory, size = behavior.network_settings.memory, behavior.hyperparameters.batch_size
        if memory is not None and size < memory.sequence_length:
            place: Path = ("behaviors", name)
            yield Conflict(
                paths=(
                    (*place, "hyperparameters", "batch_size"),
                    (*place, "network_settings", "memory", "sequence_length"),
                    (*place, "network_settings", "memory"),
                ),
                text=f"got batch_size {size} with sequence_length {memory.sequence_length}; "
                "expected a minibatch of at least one sequence; raise batch_size or lower sequence_length",
            )


def _lessons(settings: Settings) -> Iterator[Conflict]:
    for parameter, value in settings.environment_parameters.items():
        lessons = value.curriculum if isinstance(value, Curriculum) else ()
        for number, lesson in enumerate(lessons):
            criteria = lesson.completion_criteria
            if criteria is None:
                continue
            place: Path = ("environment_parameters", parameter, "curriculum", number, "completion_criteria")
            behavior = settings.behaviors.get(criteria.behavior, settings.unnamed)
            if behavior is None:
                yield Conflict(
                    paths=((*place, "behavior"),),
                    text=f"got behavior {criteria.behavior!r}; expected one of {', '.join(settings.behaviors)}; "
                    + (did_you_mean(criteria.behavior, settings.behaviors) or "name a behavior of this file"),
                )
            elif criteria.measure == "rating" and behavior.self_play is None:
                yield Conflict(
                    paths=((*place, "measure"),),
                    text=f"got measure rating of {criteria.behavior}, which has no self_play; expected a behavior that "
                    "is rated; measure reward or progress, or write self_play below it",
                )


def _players(settings: Settings) -> Iterator[Conflict]:
    own = settings.env_settings
    if own.num_envs > 1 and own.env_path is None:
        yield Conflict(
            paths=(("env_settings", "num_envs"),),
            text=f"got num_envs {own.num_envs} without env_path; expected 1, because there is one editor only; name a "
            "build (--env PATH), or write a count at an entry of simulators",
        )


def _hosts(settings: Settings) -> Iterator[Conflict]:
    own = settings.pipeline
    services = [f"stepping-{index}" for index in range(own.stepping_processes)]
    services += ["assembly", *(f"learning-{name}" for name in settings.behaviors)]
    for name, text in problems(own.hosts, services):
        yield Conflict(paths=(("pipeline", "hosts", name, "services"),), text=text)
    for number, simulator in enumerate(settings.simulators):
        if simulator.host is not None and simulator.host not in own.hosts:
            yield Conflict(
                paths=(("simulators", number, "host"),),
                text=f"got the host {simulator.host!r}; expected one of {', '.join(own.hosts) or 'none'}; "
                + (did_you_mean(simulator.host, own.hosts) or "describe it in pipeline.hosts, or leave it out"),
            )
    if own.hosts and (own.transport == "ipc" or own.address.startswith("unix:")):
        yield Conflict(
            paths=(("pipeline", "transport"), ("pipeline", "address"), ("pipeline", "hosts")),
            text="got Unix sockets with pipeline.hosts; expected TCP, which other machines can reach; "
            "leave transport out, and write an address as tcp://0.0.0.0:5005, of which the port counts",
        )


def _threaded_paths(settings: Settings) -> tuple[Path, ...]:
    named = (("behaviors", name) if settings.behaviors else (name,) for name in threaded(settings))
    return tuple((*path, "threaded") for path in named)


def _listed(values: Mapping[str, bool]) -> str:
    return ", ".join(f"{str(value).lower()} for {name}" for name, value in values.items())
