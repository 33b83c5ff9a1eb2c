"""Finds contradictions in a configuration whose keys are valid one by one, and keys that it ignores."""

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sparring.pipeline.errors import did_you_mean
from sparring.pipeline.learning.settings import IntrinsicSettings
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.settings.document import Path
from sparring.pipeline.settings.model import BehaviorSettings, Settings
from sparring.pipeline.settings.parameters import Curriculum
from sparring.pipeline.specs import names_a_folder

_MOST_PROCESSES: Final = 4096
_MOST_THREADS: Final = 1024
_MOST_STEPS: Final = 10**8
_MOST_LAYERS: Final = 1000
_MOST_WEIGHTS: Final = 10**9
"""They take 4 GB, and training four times that."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Describes one contradiction, or one key without effect.

    Attributes:
        paths: keys involved; the message points to the first one that is written.
        text: got, expected, remedy.
    """

    paths: tuple[Path, ...]
    text: str


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yields all contradictions in `settings`."""
    sizes = list(_sizes(settings))
    yield from sizes
    rules = (_any_behavior, _names, _mode, _budgets, _sequences, _lessons, _opponents, _players, _devices, _ranks)
    for rule in () if sizes else rules:
        yield from rule(settings)


def _any_behavior(settings: Settings) -> Iterator[Conflict]:
    if settings.behaviors:
        return
    if settings.default_settings is None:
        yield Conflict(
            (("behaviors",),),
            "got no behavior; expected at least one; write `behaviors: {NAME: {}}` with its name in the "
            "game, or `default_settings: {}`, which apply to any name",
        )


def _names(settings: Settings) -> Iterator[Conflict]:
    for name in settings.behaviors:
        if not names_a_folder(name):
            yield Conflict(
                (("behaviors", name),),
                f"got the behavior name {name!r}; expected a valid name of a folder, without #; "
                "write the name alone, without '?team=N': all teams share its settings",
            )


def _behaviors(settings: Settings) -> dict[Path, BehaviorSettings]:
    """Returns the settings of all behaviors by their place, those of unnamed ones included."""
    named: dict[Path, BehaviorSettings] = {("behaviors", name): one for name, one in settings.behaviors.items()}
    return named | ({} if settings.unnamed is None else {("default_settings",): settings.unnamed})


def _sizes(settings: Settings) -> Iterator[Conflict]:
    """Finds numbers with which a run would exhaust any machine."""
    for path, got, most, reason in _limits(settings):
        if got > most:
            text = f"got {got:,}; expected at most {most:,}, because {reason}; lower {path[-1]}"
            yield Conflict((path,), text)


def _limits(settings: Settings) -> Iterator[tuple[Path, int, int, str]]:
    """Yields path, value and greatest value of what takes processes or memory, with the reason."""
    process, pipeline = "each is a process of its own", settings.pipeline
    yield ("env_settings", "num_envs"), settings.env_settings.num_envs, _MOST_PROCESSES, process
    yield ("pipeline", "stepping_processes"), pipeline.stepping_processes, _MOST_THREADS, process
    yield ("pipeline", "ranks"), pipeline.ranks, _MOST_THREADS, process
    for name in ("learning", "stepping"):
        threads = getattr(pipeline.torch_threads, name)
        yield ("pipeline", "torch_threads", name), threads, _MOST_THREADS, "each is a thread of its own"
    agents = "each has an agent at least, and pipeline.max_agents limits those of a stepping process"
    for number, simulator in enumerate(settings.simulators):
        yield ("simulators", number, "count"), simulator.count, _MOST_PROCESSES, process
        yield ("simulators", number, "areas"), simulator.areas, pipeline.max_agents, agents
    for place, behavior in _behaviors(settings).items():
        size = behavior.hyperparameters.buffer_size
        yield (*place, "hyperparameters", "buffer_size"), size, _MOST_STEPS, "all its steps are in memory"
        yield from _network_limits((*place, "network_settings"), behavior.network_settings)
        for kind, signal in behavior.reward_signals.named().items():
            yield from _network_limits((*place, "reward_signals", kind, "network_settings"), signal.network_settings)


def _network_limits(place: Path, network: NetworkSettings) -> Iterator[tuple[Path, int, int, str]]:
    layers = min(network.num_layers, _MOST_LAYERS)
    weights = f"more have over {_MOST_WEIGHTS:,} weights"
    yield (*place, "num_layers"), network.num_layers, _MOST_LAYERS, "no deeper network of this kind learns"
    yield (*place, "hidden_units"), network.hidden_units, math.isqrt(_MOST_WEIGHTS // layers), weights
    if network.memory is not None:
        yield (*place, "memory", "memory_size"), network.memory.memory_size, math.isqrt(_MOST_WEIGHTS), weights


def _mode(settings: Settings) -> Iterator[Conflict]:
    chosen, mode, processes = settings.threaded, settings.pipeline.mode, settings.pipeline.stepping_processes
    paths: tuple[Path, ...] = tuple(
        ("behaviors", name, "threaded") if settings.behaviors else (name, "threaded") for name in chosen
    )
    listed = ", ".join(f"{str(value).lower()} for {name}" for name, value in chosen.items())
    if len(set(chosen.values())) == 2:
        yield Conflict(
            paths,
            f"got threaded {listed}; expected one value for all behaviors; "
            "leave threaded out and write pipeline.mode: overlap (true) or lockstep (false)",
        )
    elif mode is not None and (mode == "lockstep") in chosen.values():
        yield Conflict(
            (*paths, ("pipeline", "mode")),
            f"got threaded {listed} with pipeline.mode {mode}; "
            "expected true with overlap, false with lockstep; leave one of the two out",
        )
    if settings.mode == "lockstep" and processes > 1:
        yield Conflict(
            (("pipeline", "stepping_processes"), ("pipeline", "mode"), *paths),
            f"got {processes} stepping processes in lockstep; expected 1, because the order of rows is fixed; "
            "write stepping_processes: 1, or mode: overlap",
        )


def _budgets(settings: Settings) -> Iterator[Conflict]:
    """Finds a step budget that is used up before an update is due."""
    budget = settings.pipeline.step_budget
    for name, behavior in settings.behaviors.items() if budget is not None else ():
        needed = behavior.hyperparameters.update_steps
        if budget is not None and settings.step_budget(behavior) == budget < needed:
            yield Conflict(
                (("pipeline", "step_budget"),),
                f"got {budget} with {name}, whose updates wait for {needed:,} new steps; expected at least as many; "
                "raise or remove step_budget",
            )


def _sequences(settings: Settings) -> Iterator[Conflict]:
    for name, behavior in settings.behaviors.items():
        memory, size = behavior.network_settings.memory, behavior.hyperparameters.batch_size
        if memory is not None and size < memory.sequence_length:
            place: Path = ("behaviors", name)
            network: Path = (*place, "network_settings", "memory")
            yield Conflict(
                ((*place, "hyperparameters", "batch_size"), (*network, "sequence_length"), network),
                f"got batch_size {size} with sequence_length {memory.sequence_length}; "
                "expected a minibatch of at least one sequence; raise batch_size or lower sequence_length",
            )


def _lessons(settings: Settings) -> Iterator[Conflict]:
    for parameter, value in settings.environment_parameters.items():
        for number, lesson in enumerate(value.curriculum if isinstance(value, Curriculum) else ()):
            criteria = lesson.completion_criteria
            if criteria is None:
                continue
            place: Path = ("environment_parameters", parameter, "curriculum", number, "completion_criteria")
            behavior = settings.behaviors.get(criteria.behavior, settings.unnamed)
            if behavior is None:
                remedy = did_you_mean(criteria.behavior, settings.behaviors) or "name a behavior of this file"
                expected = ", ".join(settings.behaviors)
                text = f"got behavior {criteria.behavior!r}; expected one of {expected}; {remedy}"
                yield Conflict(((*place, "behavior"),), text)
            elif criteria.measure == "rating" and behavior.self_play is None:
                yield Conflict(
                    ((*place, "measure"),),
                    f"got measure rating of {criteria.behavior}, which has no self_play; expected a behavior that "
                    "is rated; measure reward or progress, or write self_play below it",
                )


def _devices(settings: Settings) -> Iterator[Conflict]:
    device = settings.torch_settings.device
    for name in device if isinstance(device, dict) and settings.unnamed is None else ():
        if name not in settings.behaviors:
            remedy = did_you_mean(name, settings.behaviors) or "name a behavior of this file"
            text = f"got behavior {name!r}; expected one of {', '.join(settings.behaviors)}; {remedy}"
            yield Conflict((("torch_settings", "device", name),), text)


def _ranks(settings: Settings) -> Iterator[Conflict]:
    """Finds learners whose updates their ranks cannot share."""
    ranks, of_torch = settings.pipeline.ranks, settings.torch_settings
    for place, behavior in _behaviors(settings).items() if ranks > 1 else ():
        device, path = of_torch.of_learner(str(place[-1])), ("pipeline", "ranks")
        per_unit = behavior.network_settings.sequence_length or 1
        size: Path = (*place, "hyperparameters", "batch_size")
        if not behavior.hyperparameters.shares_minibatches:
            text = (
                f"got {ranks} ranks for a trainer of type {behavior.trainer_type}; expected 1, because it shares none"
            )
            yield Conflict((path,), f"{text}; remove ranks")
        elif device not in (None, "cpu", "cuda"):
            text = f"got {ranks} ranks on device {device!r}; expected cpu, or cuda, which is a GPU for each"
            yield Conflict((path, ("torch_settings", "device")), f"{text}; correct the device")
        elif (units := behavior.hyperparameters.batch_size // per_unit) < ranks:
            what = "rows" if per_unit == 1 else f"sequences of {per_unit} rows"
            text = f"got {ranks} ranks with minibatches of {units} {what}; expected at least one for each rank"
            yield Conflict((path, size), f"{text}; raise batch_size or lower ranks")


def of_one_team(settings: Settings) -> str:
    """Returns the kind of the environments, if all are known to have one team only; else ""."""
    kinds = {one.name for one in settings.simulators}
    teams = {one.options.get("teams", "shared") for one in settings.simulators}
    if not kinds or not kinds <= {"gymnasium", "pettingzoo"} or teams != {"shared"}:
        return ""
    return "a PettingZoo environment without teams" if "pettingzoo" in kinds else "a Gymnasium environment"


def _opponents(settings: Settings) -> Iterator[Conflict]:
    """Finds self-play in environments of which all are known to have one team only."""
    if not (what := of_one_team(settings)):
        return
    remedy = "write teams: each, or per_type, in the options of a pettingzoo simulator, or remove self_play"
    written = {key for one in settings.simulators for key in one.options}
    for near in difflib.get_close_matches("teams", written - {"teams"}, n=1, cutoff=0.8):
        remedy = f"write teams in place of {near}"
    for section, behavior in settings.sections.items():
        if behavior.self_play is not None:
            yield Conflict(
                ((*section.split(".", 1), "self_play"), ("simulators",)),
                f"got self_play with {what}, whose agents are all in team 0; expected two teams or more, which play "
                f"against each other; {remedy}",
            )


def _players(settings: Settings) -> Iterator[Conflict]:
    own = settings.env_settings
    if own.num_envs > 1 and own.env_path is None:
        yield Conflict(
            (("env_settings", "num_envs"),),
            f"got num_envs {own.num_envs} without env_path; expected 1, because there is one editor only; name a "
            "build (--env PATH), or write a count at an entry of simulators",
        )


def ignored(settings: Settings) -> Iterator[Conflict]:
    """Yields the keys that a run ignores, or makes little of; ML-Agents warns of the last two."""
    has_groups = any(one.name != "pettingzoo" or one.options.get("groups") for one in settings.simulators)
    for place, behavior in _behaviors(settings).items():
        if behavior.hyperparameters.groups and settings.simulators and not has_groups:
            yield Conflict(
                ((*place, "trainer_type"), ("simulators",)),
                f"got trainer_type {behavior.trainer_type} with a PettingZoo environment without groups; expected a "
                "group of the agents of each team; write groups: true in its options",
            )
        own, most = behavior.self_play, behavior.max_steps
        if own is not None and own.team_change > most:
            yield Conflict(
                ((*place, "self_play", "team_change"), (*place, "self_play", "save_steps"), (*place, "max_steps")),
                f"got team_change {own.team_change} with max_steps {most}; expected at most max_steps, because the "
                "learning team does not change before; lower team_change (5 x save_steps where it is not written)",
            )
        elif own is not None and own.save_steps > most:
            yield Conflict(
                ((*place, "self_play", "save_steps"), (*place, "max_steps")),
                f"got save_steps {own.save_steps} with max_steps {most}; expected at most max_steps, because no "
                "snapshot is saved before; lower save_steps",
            )
        for name, signal in behavior.reward_signals.named().items():
            if isinstance(signal, IntrinsicSettings) and signal.network_settings.memory is not None:
                yield Conflict(
                    ((*place, "reward_signals", name, "network_settings", "memory"),),
                    f"got a memory for the network of {name}; expected none, because it is ignored: a reward signal "
                    "judges each step by itself; remove memory",
                )
    for parameter, value in settings.environment_parameters.items():
        lessons = value.curriculum if isinstance(value, Curriculum) else ()
        if lessons and lessons[-1].completion_criteria is not None:
            yield Conflict(
                (("environment_parameters", parameter, "curriculum", len(lessons) - 1, "completion_criteria"),),
                f"got completion_criteria for the last lesson {lessons[-1].name!r}; expected none, because they "
                "are ignored: no lesson follows; remove them, or add a lesson",
            )
