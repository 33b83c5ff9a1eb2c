"""The simulator processes of a run: commands and environments, from the settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparring.pipeline.security import token
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.hosts import main, place
from sparring.services.process.encryption import keys_folder
from sparring.services.process.hosting import SPARRING


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
        host: machine that it runs on; "" where there is one machine only.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    restarts: Restarts | None = None
    host: str = ""


def simulator_plans(
    settings: Settings, seed: int, addresses: Mapping[str, str], directory: Path, *, learns: bool = True
) -> list[SimulatorPlan]:
    """Returns all simulators of a run, on all machines, in the order of their numbers.

    Raises:
        SettingsError: `pipeline.training_analytics` is on, and a library for it is missing.
    """
    hosts = settings.pipeline.hosts
    of_players = _player_options(settings, learns=learns)
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
                words = entry.words(of_players if entry.name == "unity" else {})
                command = [*SPARRING, "simulator", entry.name, *words]
                for folder in settings.pipeline.python_path:
                    command += ["--python-path", folder]
            environment = {
                "SPARRING_ADDRESS": address,
                "SPARRING_NUMBER": str(number),
                "SPARRING_SEED": str(own),
                "SPARRING_LOGS": str(directory / "run_logs"),
                **credential_variables(settings, address, number),
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
