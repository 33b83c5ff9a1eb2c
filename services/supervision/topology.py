"""The process graph of a run, as data made by one function.

    simulators -> stepping-0.. -> assembly -> learning-NAME
                      ^  ^                        |  weights
                      |  '------------------------'
                      '-- coordination: allowances, from what all publish;      the monitor reads all topics
                                                                                writers read the files of the monitor

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
from typing import Final

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import DAMAGE, reading, regular, write_atomically
from sparring.pipeline.messages.channels import steps_queue
from sparring.pipeline.monitoring.logs import file_name
from sparring.pipeline.security import token
from sparring.pipeline.settings import Settings
from sparring.pipeline.simulation.replays import FOLDER_VARIABLE
from sparring.services.process.encryption import keys_folder
from sparring.services.process.hosting import SPARRING
from sparring.services.process.runtime import MATCHES, SUPERVISOR, Context, Playback, Run
from sparring.services.supervision.ports import Ports, addresses_of, endpoints_of

RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServicePlan:
    """One service to run.

    Attributes:
        name: as "learning-Ball".
        stage: module of its loop in `services/stages`.
        threads: torch threads, 0 where it uses no torch.
        niceness: above 0 for services whose results are not needed at once.
    """

    name: str
    stage: str
    threads: int = 0
    niceness: int = 0

    def load(self) -> Callable[[Context], Awaitable[None]]:
        """Imports the service's `run` function."""
        return importlib.import_module(f"sparring.services.stages.{self.stage}").run  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarts:
    """How often a part may be restarted before the run ends.

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
        environment: variables beside those of this process.
        restarts: how often it may fail; None: as often as a service.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    restarts: Restarts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterPlan:
    """One writer to run, in a process of its own also where the services are tasks.

    Attributes:
        writer: its name in the configuration.
    """

    writer: str

    @property
    def name(self) -> str:
        """Returns the name of its process, as "writer-tensorboard"."""
        return f"writer-{file_name(self.writer)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Everything that a run consists of.

    Attributes:
        run: description that every service gets.
        endpoints: of queues ("segments:Ball") and topics ("topic:stepping-0").
        services: in the order of the flow.
        simulators: launched after the services.
        writers: of the metrics, behind the monitor.
        origin: random text that identifies the run over all its sessions.
    """

    run: Run
    endpoints: Mapping[str, str]
    services: tuple[ServicePlan, ...]
    simulators: tuple[SimulatorPlan, ...]
    writers: tuple[WriterPlan, ...] = ()
    origin: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def listeners(self) -> dict[str, str]:
        """Returns the service that listens at each queue, and at each topic as "topic:NAME"."""
        return _listeners(self.run, self.services)

    @property
    def cores(self) -> dict[str, tuple[int, ...]]:
        """Returns the CPU cores of this machine that a part may run on, by its name; others may run on all."""
        if self.run.clustered:  # the learners are elsewhere
            return {}
        services, simulators = ([plan.name for plan in plans] for plans in (self.services, self.simulators))
        return cores_beside_learners(self.run.settings, services, simulators, usable_cores())

    def with_behaviors(self, names: Sequence[str], ports: Ports) -> Topology:
        """Returns a topology with learners for further behaviors, and all that they need.

        Raises:
            SettingsError: a port is not free.
        """
        settings = self.run.settings.naming(names)
        run = dataclasses.replace(self.run, settings=settings, added=(*self.run.added, *names))
        plans = service_plans(run)
        further = {name: one for name, one in _listeners(run, plans).items() if name not in self.endpoints}
        endpoints = {**self.endpoints, **endpoints_of(further, ports, len(self.endpoints))}
        return dataclasses.replace(self, run=run, endpoints=endpoints, services=plans)

    def save(self) -> None:
        """Writes what `load_run` reads, so that a service can be started alone."""
        run = self.run
        plain = {name: getattr(run, name) for name in _PLAIN} | {
            "origin": self.origin,
            "playing": None if run.playing is None else dataclasses.asdict(run.playing),
            "endpoints": self.endpoints,
            "settings": run.settings.written,
        }
        write_atomically(run.directory / RUN_FILE, json.dumps(plain, indent=2).encode())


_PLAIN: Final = ("id", "seed", "resumed", "addresses", "local", "simulators", "insecure", "added", "clustered")
"""Fields of a run that its file holds as they are; those of older versions lack some that have a default."""


_NICENESS: Final = {"assembly": 15, "coordination": 15, "learning": 3, "monitor": 15}
"""A simulator waits for stepping at each of its messages; weights are needed only once in a buffer. What runs on all
cores takes what stepping and the learner leave: where that is too little, backpressure slows stepping.
"""


def build(
    settings: Settings,
    ports: Ports | None = None,
    *,
    run_id: str,
    directory: Path,
    seed: int,
    resumed: bool = False,
    playing: Playback | None = None,
    insecure: bool = False,
    added: Sequence[str] = (),
    clustered: bool = False,
) -> Topology:
    """Builds the graph that `settings` describe.

    Args:
        settings: of the run.
        ports: reserves the ports that it finds free; None: they are free now, but not reserved.
        run_id: of the run.
        directory: run folder.
        seed: of the run.
        resumed: continue from what is in the folder.
        playing: what to play instead of learning.
        insecure: other machines may reach it without keys.
        added: behaviors of the settings that only simulators have named.
        clustered: a cluster runs it.

    Raises:
        SettingsError: an address or port is not free.
    """
    with nullcontext(ports) if ports else Ports() as ports:
        stepping = [f"stepping-{index}" for index in range(settings.pipeline.stepping_processes)]
        addresses = addresses_of(settings, stepping, ports)
        local = ports.local(stepping)
        simulators = simulator_plans(settings, seed, addresses, directory, local, learns=playing is None)
        called = [plan.environment["SPARRING_ADDRESS"] for plan in simulators]
        run = Run(
            id=run_id,
            directory=directory,
            settings=settings,
            seed=seed,
            addresses=addresses,
            local=local,
            simulators={
                name: sum(map(called.count, {address, local.get(name, address)})) for name, address in addresses.items()
            },
            resumed=resumed,
            playing=playing,
            keys=keys_folder(settings),
            insecure=insecure,
            added=tuple(added),
            clustered=clustered,
        )
        plans = service_plans(run)
        return Topology(
            run=run,
            endpoints=endpoints_of(_listeners(run, plans), ports),
            services=plans,
            simulators=tuple(simulators),
            writers=writer_plans(run),
            origin=(origin_of(directory) if resumed else "") or secrets.token_hex(8),
        )


def load_run(directory: Path) -> tuple[Run, dict[str, str]]:
    """Loads what `Topology.save` has written: the run and its endpoints.

    Raises:
        SettingsError: the folder holds no run, or its file cannot be read.
    """
    path = directory / RUN_FILE
    with reading(path, "the file that `sparring train` writes", "name the folder of a run that was started"):
        plain = json.loads(regular(path).read_text())
        settings = Settings.model_validate_json(json.dumps(plain["settings"]))
        run = Run(
            **{name: plain[name] for name in _PLAIN if name in plain} | {"added": tuple(plain.get("added", ()))},
            directory=directory,
            settings=settings,
            playing=Playback(**plain["playing"]) if plain.get("playing") else None,
            keys=keys_folder(settings),
        )
        return run, plain["endpoints"]


def origin_of(directory: Path) -> str:
    """Returns the random text that identifies the run in a folder over all its sessions and machines; "" for none."""
    try:
        return str(json.loads(regular(directory / RUN_FILE).read_text())["origin"])
    except DAMAGE:
        return ""


def plan_of(run: Run, name: str) -> ServicePlan:
    """Returns the plan of a service.

    Raises:
        SettingsError: the run has no such service.
    """
    plans = {plan.name: plan for plan in service_plans(run)}
    if name not in plans:
        raise SettingsError(f"got service {name!r}; expected one of {sorted(plans)}; correct the name")
    return plans[name]


# ---------------------------------------------------------------- parts


def _listeners(run: Run, plans: Sequence[ServicePlan]) -> dict[str, str]:
    """Returns the service that listens at each queue, and at each topic as "topic:NAME"."""
    learners = {name: f"learning-{name}" for name in run.settings.behaviors}
    queues = {steps_queue(name).name: name for name in run.assemblies} | {MATCHES: "coordination"}
    queues |= {f"segments:{name}": learner for name, learner in learners.items()}
    topics = {plan.name: plan.name for plan in plans}
    topics |= {f"policy-{name}": learner for name, learner in learners.items()} | {"ghosts": "coordination"}
    if run.grows or run.clustered:
        topics[SUPERVISOR] = SUPERVISOR
    return queues | {f"topic:{topic}": service for topic, service in topics.items()}


def service_plans(run: Run) -> tuple[ServicePlan, ...]:
    """Returns all services of a run in the order of the flow."""
    threads, plans = run.settings.pipeline.torch_threads, []
    for name in (*run.services, "monitor"):
        stage = name.partition("-")[0]
        uses = {"stepping": threads.stepping, "learning": threads.learning}.get(stage, 0)
        plans.append(ServicePlan(name=name, stage=stage, threads=uses, niceness=_NICENESS.get(stage, 0)))
    return tuple(plans)


def writer_plans(run: Run) -> tuple[WriterPlan, ...]:
    """Returns the writers of a run; one that only plays has no others than TensorBoard."""
    names = [name for name in run.settings.active_writers if run.playing is None or name == "tensorboard"]
    return tuple(WriterPlan(writer=name) for name in names)


def simulator_plans(
    settings: Settings,
    seed: int,
    addresses: Mapping[str, str],
    directory: Path,
    local: Mapping[str, str] | None = None,
    *,
    learns: bool = True,
) -> list[SimulatorPlan]:
    """Returns all simulators of a run in the order of their numbers.

    Those of this package connect to the `local` address of their stepping service, if there is one.

    Raises:
        SettingsError: `pipeline.training_analytics` is on, and a library for it is missing.
    """
    of_players = _player_options(settings, learns=learns)
    replays = str(directory / "replays") if directory.is_absolute() else ""  # `sparring record` has no folder
    plans: list[SimulatorPlan] = []
    listening, local = list(addresses), local or {}
    for entry in settings.launched:
        for copy in range(entry.count):
            number = len(plans)
            stepping = listening[number % len(listening)]
            address = addresses[stepping] if entry.name is None else local.get(stepping, addresses[stepping])
            own = (entry.seed + copy if entry.seed is not None else seed + number) % 2**31
            command = entry.arguments(address=address, number=number, seed=own)
            if entry.name is not None:
                words = entry.words(of_players if entry.name == "unity" else {})
                command = [*SPARRING, "simulator", entry.name, *words]
                for folder in settings.pipeline.python_path:
                    command += ["--python-path", folder]
            environment = {
                "SPARRING_ADDRESS": address,
                "SPARRING_NUMBER": str(number),
                "SPARRING_SEED": str(own),
                "SPARRING_LOGS": str(directory / "run_logs"),
                FOLDER_VARIABLE: replays if number == 0 else "",
                **credential_variables(settings, address, number),
            }
            plans.append(
                SimulatorPlan(
                    name=f"simulator-{number}",
                    command=tuple(command),
                    environment=environment,
                    restarts=_restarts(settings) if entry.name == "unity" else None,
                )
            )
    return plans


def credential_variables(settings: Settings, address: str, number: int) -> dict[str, str]:
    """Returns the environment variables from which a simulator takes its credential: a certificate, or the token."""
    keys, pipeline = keys_folder(settings), settings.pipeline
    if keys is None or address.startswith("unix:"):
        return {}
    if not pipeline.encrypt:
        return {"SPARRING_KEYS": "", "SPARRING_NAME": "", "SPARRING_CREDENTIAL": token(keys)}
    name = f"simulator-{number}"
    certified = pipeline.credentials != "token" and (keys / "tls" / f"{name}.pem").exists()
    return {"SPARRING_KEYS": str(keys), "SPARRING_NAME": name if certified else ""}


def _player_options(settings: Settings, *, learns: bool) -> dict[str, str]:
    """Returns the options of all Unity players: the address that they call, and the training analytics that are on."""
    pipeline, players = settings.pipeline, sum(one.count for one in settings.launched if one.name == "unity")
    found = {"host": pipeline.player_host} if "player_host" in pipeline.model_fields_set else {}
    if learns and players and pipeline.training_analytics:
        from sparring.services.supervision.analytics import training

        found["side_channel"] = training(settings, players).hex()
    return found


def _restarts(settings: Settings) -> Restarts | None:
    """Returns the limits of a Unity player's restarts; None where `env_settings` has none."""
    own = settings.env_settings
    if not {"max_lifetime_restarts", "restarts_rate_limit_n", "restarts_rate_limit_period_s"} & own.model_fields_set:
        return None
    unlimited = {-1: math.inf}
    return Restarts(
        budget=unlimited.get(own.restarts_rate_limit_n, own.restarts_rate_limit_n),
        period_s=own.restarts_rate_limit_period_s,
        lifetime=unlimited.get(own.max_lifetime_restarts, own.max_lifetime_restarts),
    )


def usable_cores() -> tuple[int, ...]:
    """Returns the CPU cores that this process may run on; none where the system cannot report them."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def cores_beside_learners(
    settings: Settings, services: Sequence[str], simulators: Sequence[str], usable: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Returns the cores of stepping and of the simulators, so that these do not take a core from a learner.

    It is empty where the learners have a thread for every core. Simulators that are more than the cores which are left
    may run on all cores, because they compute side by side. All other parts may run on all cores, too: their priority
    is the lowest, so that they take what is left.
    """
    learners = {name for name in services if name.startswith("learning-")}
    pipeline = settings.pipeline
    rest = tuple(usable[pipeline.torch_threads.learning * pipeline.ranks * len(learners) :])
    if not pipeline.leave_cores_to_learners or not rest:
        return {}
    stepping = [name for name in services if name.startswith("stepping")]
    placed = [*stepping, *simulators] if len(simulators) <= len(rest) else stepping
    return dict.fromkeys(placed, rest)
