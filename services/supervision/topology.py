"""The process graph of a run, as data made by one function.

    simulators -> stepping-0.. -> assembly -> coordination -> learning-NAME
                      ^ permits, weights <----------'--------------'      monitor reads all boards

The same graph runs as processes over ZeroMQ and in one process over memory queues.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.files import write_atomically
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.security import token
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.hosts import main, place
from sparring.pipeline.stepping.settings import GATHERED_STEPS
from sparring.services.process.encryption import keys_folder
from sparring.services.process.hosting import SPARRING
from sparring.services.process.runtime import Context, Playing, Run
from sparring.services.supervision.ports import Ports, addresses_of, endpoints_of

RUN_FILE = "run.json"
_LARGEST_GROUP = 1024
_SHARES = 4  # a queue holds this many of the largest messages


@dataclass(frozen=True, kw_only=True, slots=True)
class ServicePlan:
    """One service to run.

    Attributes:
        name: as "learning-Ball".
        entry: module and function of its loop.
        threads: torch threads, 0 where it uses no torch.
        niceness: above 0 for those that nobody waits for at once: they let the others go first.
    """

    name: str
    entry: str
    threads: int = 0
    niceness: int = 0

    def load(self) -> Callable[[Context], Awaitable[None]]:
        """The service's `run` function."""
        module, _, function = self.entry.partition(":")
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarts:
    """How often a part may be started again before the run stops.

    Attributes:
        budget: times within `period_s`.
        period_s: seconds.
        lifetime: times in all.
    """

    budget: float
    period_s: float
    lifetime: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorPlan:
    """One simulator process to launch.

    Attributes:
        name: as "simulator-3", for logs.
        command: program and arguments.
        environment: variables beside ours.
        restarts: how often it may fail; None: as often as a service.
        host: that it runs on; "" where there is one machine only.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    restarts: Restarts | None = None
    host: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Everything that a run consists of.

    Attributes:
        run: what every service is told.
        endpoints: of queues ("segments:Ball") and boards ("topic:stepping-0").
        services: in the order of the flow.
        simulators: launched after the services.
        cores: processor cores that a service keeps to; none where it may run on all.
        host: this machine; "" where there is no other.
        grown: behaviors were added to it since the run started.
    """

    run: Run
    endpoints: Mapping[str, str]
    services: tuple[ServicePlan, ...]
    simulators: tuple[SimulatorPlan, ...]
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    host: str = ""
    grown: bool = False

    def place(self, name: str) -> str:
        """The host of a service or simulator."""
        simulator = next((plan for plan in self.simulators if plan.name == name), None)
        return place(self.run.hosts, name) if simulator is None else simulator.host

    def growing(self, names: Sequence[str], sockets: Path | None, ports: Ports) -> Topology:
        """The same with learners for further behaviors, and all that they need.

        Args:
            names: of the behaviors.
            sockets: as in `build`.
            ports: likewise.

        Raises:
            SettingsError: a port is not free.
        """
        settings = self.run.settings.naming(names)
        run = dataclasses.replace(
            self.run,
            settings=settings,
            capacities=_capacities(settings, len(self.run.stepping)),
            added=(*self.run.added, *names),
        )
        plans = service_plans(run)
        further = [name for name in _channels(run, plans) if name not in self.endpoints]
        return dataclasses.replace(
            self,
            run=run,
            endpoints={**self.endpoints, **endpoints_of(settings, further, sockets, ports, len(self.endpoints))},
            services=plans,
            cores=_cores(settings, plans, self.host),
            grown=True,
        )

    def save(self) -> None:
        """Writes what `load_run` reads, so that a service can be started alone."""
        run = self.run
        origin = (origin_of(run.directory) if run.resumed or self.grown else "") or secrets.token_hex(8)
        plain = {
            "origin": origin,
            "id": run.id,
            "seed": run.seed,
            "resumed": run.resumed,
            "playing": None if run.playing is None else dataclasses.asdict(run.playing),
            "addresses": dict(run.addresses),
            "simulators": dict(run.simulators),
            "capacities": {n: [c.messages, c.steps, c.senders] for n, c in run.capacities.items()},
            "endpoints": dict(self.endpoints),
            "insecure": run.insecure,
            "added": run.added,
            "settings": run.settings.written,
        }
        write_atomically(run.directory / RUN_FILE, json.dumps(plain, indent=2).encode())


def build(
    settings: Settings,
    sockets: Path | None = None,
    ports: Ports | None = None,
    *,
    run_id: str,
    directory: Path,
    seed: int,
    resumed: bool = False,
    playing: Playing | None = None,
    insecure: bool = False,
    added: Sequence[str] = (),
) -> Topology:
    """The graph that `settings` ask for.

    Args:
        settings: of the run.
        sockets: a folder for Unix sockets, or None for loopback ports.
        ports: keeps those that it finds free; None: they are free at this moment, no more.
        run_id: of the run.
        directory: run folder.
        seed: of the run.
        resumed: go on from what is in the folder.
        playing: what to play instead of learning, on this machine.
        insecure: other machines may reach it without keys.
        added: behaviors of the settings that only simulators have named.

    Raises:
        SettingsError: an address or port is not free.
    """
    with nullcontext(ports) if ports else Ports() as ports:
        settings = settings if playing is None else settings.alone
        stepping = [f"stepping-{index}" for index in range(settings.pipeline.stepping_processes)]
        addresses = addresses_of(settings, stepping, ports)
        simulators = simulator_plans(settings, seed, addresses, directory, learns=playing is None)
        run = Run(
            id=run_id,
            directory=directory,
            settings=settings,
            seed=seed,
            capacities=_capacities(settings, len(stepping)),
            addresses=addresses,
            simulators={
                name: sum(plan.environment["SPARRING_ADDRESS"] == address for plan in simulators)
                for name, address in addresses.items()
            },
            resumed=resumed,
            playing=playing,
            keys=keys_folder(settings),
            insecure=insecure,
            added=tuple(added),
        )
        plans = service_plans(run)
        return Topology(
            run=run,
            endpoints=endpoints_of(settings, _channels(run, plans), sockets, ports),
            services=plans,
            simulators=tuple(simulators),
            cores=_cores(settings, plans, main(settings.pipeline.hosts)),
            host=main(settings.pipeline.hosts),
        )


def joined(directory: Path, host: str) -> Topology:
    """The topology of a run that another machine has started.

    Args:
        directory: of the run on this machine, with the file that the other machine has written.
        host: this machine.

    Raises:
        ServiceError: as `load_run`.
    """
    run, endpoints = load_run(directory)
    plans = service_plans(run)
    return Topology(
        run=run,
        endpoints=endpoints,
        services=plans,
        simulators=tuple(simulator_plans(run.settings, run.seed, run.addresses, directory, learns=run.playing is None)),
        cores=_cores(run.settings, plans, host),
        host=host,
    )


def load_run(directory: Path) -> tuple[Run, dict[str, str]]:
    """What `Topology.save` has written: the run and its endpoints.

    Raises:
        ServiceError: the folder holds no run, or its file cannot be read.
    """
    path = directory / RUN_FILE
    try:
        plain = json.loads(path.read_text())
        settings = Settings.model_validate_json(json.dumps(plain["settings"]))
        run = Run(
            id=plain["id"],
            directory=directory,
            settings=settings,
            seed=plain["seed"],
            capacities={n: Capacity(messages=m, steps=s, senders=k) for n, (m, s, k) in plain["capacities"].items()},
            addresses=plain["addresses"],
            simulators=plain["simulators"],
            resumed=plain["resumed"],
            playing=Playing(**plain["playing"]) if plain.get("playing") else None,  # newer than the file may be
            keys=keys_folder(settings),
            insecure=plain.get("insecure", False),
            added=tuple(plain.get("added", ())),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServiceError(
            f"got {path}, which cannot be read ({error}); expected the file that `sparring train` writes; "
            "name the folder of a run that was started"
        ) from error
    return run, plain["endpoints"]


def origin_of(directory: Path) -> str:
    """What tells the run in a folder from others of its name, over all its sessions and machines; "" for none."""
    try:
        return str(json.loads((directory / RUN_FILE).read_text())["origin"])
    except (OSError, ValueError, KeyError):
        return ""


def plan_of(run: Run, name: str) -> ServicePlan:
    """The plan of service `name`.

    Raises:
        ServiceError: the run has no such service.
    """
    plans = {plan.name: plan for plan in service_plans(run)}
    if name not in plans:
        raise ServiceError(f"got service {name!r}; expected one of {sorted(plans)}; correct the name")
    return plans[name]


# ---------------------------------------------------------------- parts


def _channels(run: Run, plans: Sequence[ServicePlan]) -> list[str]:
    """Names of all queues, and of all boards as "topic:NAME"."""
    topics = [*(plan.name for plan in plans), *(f"policy-{name}" for name in run.settings.behaviors), "ghosts"]
    return [*run.capacities, *(f"topic:{topic}" for topic in topics)]


def service_plans(run: Run) -> tuple[ServicePlan, ...]:
    """All services of a run in the order of the flow."""
    threads = run.settings.pipeline.torch_threads
    learner = "sparring.services.stages.learning:run" if run.playing is None else "sparring.services.stages.playing:run"
    return (
        *(
            ServicePlan(name=name, entry="sparring.services.stages.stepping:run", threads=threads.stepping)
            for name in run.stepping
        ),
        ServicePlan(name="assembly", entry="sparring.services.stages.assembly:run", niceness=5),
        ServicePlan(name="coordination", entry="sparring.services.stages.coordination:run", niceness=5),
        *(
            # A simulator waits for stepping at each of its messages, a learner's work is wanted once in a buffer.
            ServicePlan(name=f"learning-{name}", entry=learner, threads=threads.learning, niceness=3)
            for name in run.learners
        ),
        ServicePlan(name="monitor", entry="sparring.services.stages.monitor:run", niceness=10),
    )


def usable_cores() -> tuple[int, ...]:
    """Processor cores that this process may run on; none where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def _cores(settings: Settings, plans: Sequence[ServicePlan], host: str) -> dict[str, tuple[int, ...]]:
    here = [plan for plan in plans if place(settings.pipeline.hosts, plan.name) == host]
    return cores_beside_learners(settings, here, usable_cores())


def cores_beside_learners(
    settings: Settings, plans: Sequence[ServicePlan], usable: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The cores that every service but the learners keeps to, so that none of them pushes a learner aside.

    Simulators may run on all. None where the learners have a thread for every core.
    """
    learners = {plan.name for plan in plans if plan.name.startswith("learning-")}
    rest = tuple(usable[settings.pipeline.torch_threads.learning * len(learners) :])
    if not settings.pipeline.leave_cores_to_learners or not rest:
        return {}
    return {plan.name: rest for plan in plans if plan.name not in learners}


def _capacities(settings: Settings, stepping: int) -> dict[str, Capacity]:
    """How much each queue holds: the budget twice, so that the budget and not a queue is what fills."""
    limits = settings.pipeline.capacities
    agents = settings.pipeline.max_agents * len(settings.behaviors) + GATHERED_STEPS
    found = {"steps": Capacity(messages=limits.step_batches, steps=_SHARES * agents * stepping, senders=stepping)}
    for name, behavior in settings.behaviors.items():
        steps = max(2 * settings.budget(name), _SHARES * behavior.time_horizon)
        if behavior.trainer_type == "poca":  # a message holds at least a time of a whole group
            steps = max(steps, _SHARES * _LARGEST_GROUP)
        capacity = Capacity(messages=limits.segments, steps=steps)
        found[f"segments:{name}"] = found[f"updates:{name}"] = capacity
    return found


def simulator_plans(
    settings: Settings, seed: int, addresses: Mapping[str, str], directory: Path, *, learns: bool = True
) -> list[SimulatorPlan]:
    """All simulators of a run, on all machines, in the order of their numbers.

    Raises:
        SettingsError: players are to be told something, and a library for it is missing.
    """
    hosts = settings.pipeline.hosts
    of_players = _of_players(settings, learns=learns)
    plans: list[SimulatorPlan] = []
    for entry in settings.launched:
        host = entry.host or main(hosts)
        near = [one for name, one in addresses.items() if place(hosts, name) == host] or list(addresses.values())
        for copy in range(entry.count):
            number = len(plans)
            address = near[sum(plan.host == host for plan in plans) % len(near)]
            own = (entry.seed + copy if entry.seed is not None else seed + number) % 2**31
            command = entry.arguments(address=address, number=number, seed=own)
            if entry.name is not None:
                command = [*SPARRING, "simulator", entry.name, "--areas", str(entry.areas)]
                for key, value in {**(of_players if entry.name == "unity" else {}), **entry.options}.items():
                    command += ["--option", f"{key}={_text(value)}"]
                for folder in settings.pipeline.python_path:
                    command += ["--python-path", folder]
            environment = {
                "SPARRING_ADDRESS": address,
                "SPARRING_NUMBER": str(number),
                "SPARRING_SEED": str(own),
                "SPARRING_LOGS": str(directory / "run_logs"),
                **shown(settings, address, number),
            }
            plans.append(
                SimulatorPlan(
                    name=f"simulator-{number}",
                    command=tuple(command),
                    environment=environment,
                    restarts=_restarts(settings) if entry.name == "unity" else None,
                    host=host,
                )
            )
    return plans


def shown(settings: Settings, address: str, number: int) -> dict[str, str]:
    """Variables that tell a simulator of the run's what to show at an address: its certificate, or the token."""
    keys, pipeline = keys_folder(settings), settings.pipeline
    if keys is None or address.startswith("unix:"):
        return {}
    if not pipeline.encrypt:
        return {"SPARRING_KEYS": "", "SPARRING_NAME": "", "SPARRING_CREDENTIAL": token(keys)}
    name = f"simulator-{number}"
    certified = pipeline.credentials != "token" and (keys / "tls" / f"{name}.pem").exists()
    return {"SPARRING_KEYS": str(keys), "SPARRING_NAME": name if certified else ""}


def _of_players(settings: Settings, *, learns: bool) -> dict[str, str]:
    """Options of all Unity players: where they call, and what they are told of the training where that is asked for."""
    pipeline, players = settings.pipeline, sum(one.count for one in settings.launched if one.name == "unity")
    found = {"host": pipeline.player_host} if "player_host" in pipeline.model_fields_set else {}
    if learns and players and pipeline.training_analytics:
        from sparring.services.supervision.analytics import training

        found["told"] = training(settings, players).hex()
    return found


def _restarts(settings: Settings) -> Restarts | None:
    """Of a Unity player, where `env_settings` says something about that."""
    own = settings.env_settings
    if not {"max_lifetime_restarts", "restarts_rate_limit_n", "restarts_rate_limit_period_s"} & own.model_fields_set:
        return None
    unlimited = {-1: math.inf}
    return Restarts(
        budget=unlimited.get(own.restarts_rate_limit_n, own.restarts_rate_limit_n),
        period_s=own.restarts_rate_limit_period_s,
        lifetime=unlimited.get(own.max_lifetime_restarts, own.max_lifetime_restarts),
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
