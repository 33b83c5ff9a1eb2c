"""`sparring record CONFIG`: records episodes of one simulator as demonstrations.

consumes       Steps of one simulator
produces       Acts; a file of episodes for each behavior
waits for      each answer of the simulator
unblocked by   the answer, the simulator's Bye or its end, `--timeout`, Ctrl-C

The command is a trainer without learning and without other services. It acts with a checkpoint, asks the simulator to
play by a script of its own, or leaves the choice to a person; the simulator then reports what was done.
"""

import argparse
import contextlib
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import numpy as np

from sparring.pipeline.compliance.peer import ConversationStopped, SimulatorProcess, TrialConnection
from sparring.pipeline.demonstrations.episodes import SUFFIX, encode
from sparring.pipeline.demonstrations.library import describe
from sparring.pipeline.demonstrations.tape import Tape
from sparring.pipeline.errors import (
    FAILED,
    ExplainedError,
    RemoteProtocolError,
    ServiceError,
    SettingsError,
    SparringError,
)
from sparring.pipeline.files import write_atomically
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.messages import simulator as messages
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.monitoring.logs import printable
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.queues.endpoints import is_open, listen
from sparring.pipeline.settings import Settings, not_here, read
from sparring.pipeline.settings.parameters import in_lessons
from sparring.pipeline.specs import BehaviorId, BehaviorSpec, read_spec
from sparring.pipeline.stepping.acting import Policy
from sparring.pipeline.stepping.agents import Behavior
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.policies import Policies, ScriptedPolicy
from sparring.pipeline.stepping.stepper import Stepper
from sparring.services.commands.compliance import simulator_process
from sparring.services.commands.players import actor_of
from sparring.services.commands.runs import add_config, add_results, check_positive, find, natural, spread
from sparring.services.endpoint.admission import fault_of
from sparring.services.endpoint.peers import check_hello
from sparring.services.process.encryption import exposed
from sparring.services.process.hosting import ending_signals, interrupting
from sparring.services.supervision.launch import checkpoints_of, load_player, new_seed
from sparring.services.supervision.topology import build

_MANUAL_S: Final = 3600.0
"""A person may pause a game."""
_PARTING_S: Final = 3.0
_PROGRESS_S: Final = 1.0
_KEY: Final = 1
"""Key of the only connection."""
_NO_LIMIT: Final = 2**62
"""Steps of an allowance that is never used up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_config(parser)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--policy",
        type=Path,
        metavar="CHECKPOINT",
        help="act with a checkpoint, or those of a run: its folder, or its id",
    )
    how.add_argument("--script", metavar="NAME", help="let the simulator play by its own script of this name")
    how.add_argument("--manual", action="store_true", help="a person plays in the simulator, which reports the actions")
    add_results(parser)
    parser.add_argument("--episodes", type=int, default=20, metavar="N", help="episodes of each behavior (20)")
    parser.add_argument("--out", type=Path, default=Path("demos"), metavar="FOLDER", help="for the files (demos)")
    parser.add_argument("--behavior", nargs="+", action="extend", default=[], metavar="NAME", help="these only (all)")
    parser.add_argument("--seed", type=natural, metavar="S", help="of simulator and sampling (random, and printed)")
    parser.add_argument("--deterministic", action="store_true", help="with --policy: the most likely actions")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    parser.add_argument("--timeout", type=float, metavar="S", help="for each answer (as in a run; --manual: an hour)")


def run(args: argparse.Namespace) -> int:
    """Records episodes and prints a summary of them.

    Returns:
        0 if all episodes were recorded; with --manual also if the person ended the play after at least one; else 1.

    Raises:
        SettingsError: the configuration or an argument is invalid, or the simulator lacks a script or behavior.
        SparringError: a failure at run time; the episodes that had ended by then are written.
    """
    settings, seed = _settings(args)
    timeout_s = args.timeout or (_MANUAL_S if args.manual else settings.pipeline.simulator_timeout_s)
    session = _Session(args, settings, seed)
    with ending_signals(interrupting()):
        try:
            with lone_simulator(settings, seed) as simulator:
                _print(f"seed {seed}")
                if not simulator.command:
                    _print(f"waiting for a simulator at {simulator.address}")
                _converse(session, settings, simulator, args.timeout if not simulator.command else timeout_s, timeout_s)
        except KeyboardInterrupt:
            _print("stopped by the user")
        except SettingsError:
            raise
        except SparringError:
            session.write()
            raise
        written = session.write()
    return 0 if session.complete or (args.manual and written) else FAILED


def _settings(args: argparse.Namespace) -> tuple[Settings, int]:
    """Reads the configuration and the seed."""
    check_positive(args, "episodes", "timeout")
    if args.deterministic and not args.policy:
        raise SettingsError("got --deterministic without --policy; expected both or neither; leave it out")
    if args.policy is not None:
        args.policy = find(args.policy, args.results_dir)
    loaded = read(args.config, {"env_settings.seed": args.seed}, args.assigned)
    sys.stderr.writelines(f"sparring: {notice}\n" for notice in loaded.notices)
    if missing := not_here(loaded.settings):
        raise SettingsError("got " + "; ".join(missing))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"got --out {args.out}: {error.strerror}; expected a folder; name another") from error
    seed = loaded.settings.seed
    return loaded.settings, seed if seed >= 0 else new_seed()


# ---------------------------------------------------------------- what is recorded


class _Session:
    """Acts for one simulator, and records behaviors of it.

    Args:
        args: of the command.
        settings: of the configuration.
        seed: of the sampling.

    Attributes:
        stepper: checks the Steps of the simulator and chooses the actions.
    """

    def __init__(self, args: argparse.Namespace, settings: Settings, seed: int) -> None:
        self._args = args
        network = NetworkSettings(deterministic=args.deterministic)
        self._loaded = Policies(defaultdict(lambda: TrainerSettings(network_settings=network)), seed)
        self._policies: dict[str, Policy] = {}
        self._seed = seed % 2**31
        parameters = RunParameters(in_lessons(settings.environment_parameters), self._seed)  # first lessons
        self.stepper = Stepper(self._policies, parameters=parameters)
        self._scripts: dict[str, int] = {}
        self._tapes: dict[str, Tape] = {}
        self._printed = (0, 0.0)

    @property
    def complete(self) -> bool:
        """Returns whether all episodes have ended."""
        return bool(self._tapes) and all(tape.complete for tape in self._tapes.values())

    def begin(self, hello: messages.Hello) -> messages.Reset:
        """Registers the simulator; returns its first Reset. Raises as `register`."""
        check_hello(hello)
        self.stepper.connect(_KEY, 0, hello.behaviors, hello.scripts)
        self.register({})
        return self.stepper.begin_episodes(_KEY, self._seed)

    def register(self, behaviors: Mapping[str, BehaviorSpec]) -> None:
        """Registers behavior ids with their specs.

        Raises:
            SettingsError: there is no policy for one, or its file exists.
            RemoteProtocolError: a name has two specs.
        """
        self.stepper.add_behaviors(_KEY, behaviors)
        known = self.stepper.behaviors
        for behavior in known.values():
            if behavior.name not in self._policies:
                self._add(behavior, recorded=not self._args.behavior or behavior.name in self._args.behavior)
        if unknown := sorted(set(self._args.behavior) - known.keys()):
            raise SettingsError(f"got --behavior {unknown}; expected some of {sorted(known)}; correct the name")
        there = [str(path) for name in self._tapes if (path := self._file(name)).exists()]
        if there and not self._args.force:
            raise SettingsError(f"got {', '.join(there)}, which exist; expected none; name another --out, or --force")

    def _add(self, behavior: Behavior, *, recorded: bool) -> None:
        """Adds a behavior, which waits for nothing before it acts."""
        name, spec = behavior.name, behavior.spec
        self._policies[name] = self._trained(name, spec) if self._args.policy else self._scripted(name, spec, recorded)
        behavior.grant(StepAllowance(serial=1, steps=_NO_LIMIT))
        if recorded:
            self._tapes[name] = Tape(name, spec, self._args.episodes)

    def _trained(self, name: str, spec: BehaviorSpec) -> Policy:
        """Loads the checkpoint of a behavior."""
        folder: Path = self._args.policy
        path = folder if (folder / "state.json").exists() else checkpoints_of(folder, name)[-1]
        checkpoint = load_player(path)
        if checkpoint.behavior != name:
            raise SettingsError(
                f"got {path}, a checkpoint of {checkpoint.behavior}, and a simulator with {name}; expected one for "
                "each behavior; name the folder of a run that has trained all of them"
            )
        if (trained := read_spec(checkpoint.description["spec"])) != spec:
            raise SettingsError(
                f"got {path}, trained with {trained}; expected {spec}, as {name} has here; "
                "record with the simulator that it was trained in"
            )
        weights = actor_of(checkpoint)
        self._loaded.hold(spec, weights)
        return self._loaded.ghosts[name, weights.version]

    def _scripted(self, name: str, spec: BehaviorSpec, recorded: bool) -> Policy:
        """Leaves the choice to a script of the simulator or to a person: the actions sent are placeholders.

        Behaviors that are not recorded and do not have the script get them as well.
        """
        script, offered = self._args.script or "", self.stepper.connection(_KEY).scripts.get(name, ())
        if script in offered:
            self._scripts[name] = offered.index(script) + 1
        elif script and recorded:
            raise SettingsError(
                f"got --script {script} for {name}; expected one of its scripts, {list(offered) or 'none'}; "
                "correct the name, or record with --policy or --manual"
            )
        return ScriptedPolicy(spec.actions, 0, script)

    def answer(self, step: messages.Step) -> messages.Act:
        """Records a Step and answers it.

        Raises:
            RemoteProtocolError: it contradicts the specs, or names agents that are not alive.
            SettingsError: it does not report what was done.
        """
        self.stepper.receive(_KEY, step, 0.0)
        for report in step.reports:
            if (tape := self._tape(report.behavior)) is None:
                continue
            tape.report(report)
            if tape.unreported and self._args.policy is None:  # it plays by itself
                how = "--manual" if self._args.manual else f"--script {self._args.script}"
                raise SettingsError(
                    f"got {how}, and outcomes of {tape.behavior} that do not report what was done; expected "
                    "did_continuous and did_discrete in the simulator's decisions and ends; fill them as "
                    "docs/demonstrations.md says, or record with --policy"
                )
        ((_, act, _, _),) = self.stepper.tick(0.0).acts
        assert isinstance(act, messages.Act)
        self.stepper.take_steps()
        actions = tuple(map(self._with_script, act.actions))
        for one in actions:
            if (tape := self._tape(one.behavior)) is not None:
                tape.answer(one)
        self._print_progress()
        return replace(act, actions=actions)

    def _tape(self, behavior: str) -> Tape | None:
        return self._tapes.get(BehaviorId.parse(behavior).name)

    def _with_script(self, actions: messages.BehaviorActions) -> messages.BehaviorActions:
        number = self._scripts.get(BehaviorId.parse(actions.behavior).name)
        return actions if number is None else replace(actions, scripts=np.full(len(actions.agents), number, np.int32))

    def _print_progress(self) -> None:
        """Prints the number of ended episodes, at most once a second."""
        ended, now = sum(tape.episodes for tape in self._tapes.values()), time.monotonic()
        if ended > self._printed[0] and now - self._printed[1] > _PROGRESS_S:
            self._printed = (ended, now)
            _print(f"{ended} of {self._args.episodes * len(self._tapes)} episodes")

    def write(self) -> bool:
        """Writes the ended episodes and prints a summary; returns whether each behavior has at least one.

        Raises:
            ServiceError: a file cannot be written.
        """
        for name, tape in self._tapes.items():
            if tape.unfinished:
                _print(f"{name}: {tape.unfinished} episodes had not ended and are left out")
            if not tape.episodes:
                _print(f"{name}: no episode has ended, no file is written")
                continue
            recording = tape.recording()
            try:
                write_atomically(self._file(name), encode(recording))
            except OSError as error:
                raise ServiceError(
                    f"got {self._file(name)}, which cannot be written ({error.strerror}); expected a folder with free "
                    "space; free some, or name another with --out"
                ) from error
            found = describe(recording)
            means = (("returns", "mean return"), ("group_returns", "mean group return"))
            spreads = [spread(found[what], called) for what, called in means if what in found]
            told = f"{name}: {found['episodes']} episodes, {found['steps']} steps"
            _print("; ".join([told, *spreads, str(self._file(name))]))
        return bool(self._tapes) and all(tape.episodes for tape in self._tapes.values())

    def _file(self, name: str) -> Path:
        folder = CheckpointFolder(self._args.out, name).path.parent  # refuses a name that cannot be a file's
        return folder / f"{name}-00001{SUFFIX}"


# ---------------------------------------------------------------- the conversation


def _converse(
    session: _Session, settings: Settings, simulator: SimulatorProcess, connect_s: float | None, timeout_s: float
) -> None:
    """Plays until all is recorded, or the simulator says Bye.

    Raises:
        SettingsError: the simulator lacks a script or behavior.
        RemoteProtocolError: it broke the protocol, and has received a fault.
        ServiceError: it did not connect, has disconnected, or did not answer in time.
    """
    try:
        peer = TrialConnection(simulator.accept(connect_s), timeout_s)
    except ConversationStopped as stopped:
        raise _unanswered(stopped) from stopped
    try:
        _play(session, peer, settings)
        _part(peer, messages.Bye(reason="the recording is over"))
        peer.closes()
        simulator.ended(_PARTING_S)
    except RemoteProtocolError as error:
        _part(peer, fault_of(error))
        raise
    except ConversationStopped as stopped:
        if isinstance(stopped.__cause__, ExplainedError):
            _part(peer, fault_of(stopped.__cause__))
        raise _unanswered(stopped, simulator.ended(_PARTING_S)) from stopped
    except BaseException:
        _part(peer, messages.Bye(reason="the recording was stopped"))
        raise
    finally:
        peer.drop()


def _unanswered(stopped: ConversationStopped, how: str | None = None) -> ServiceError:
    found, ended = stopped.finding, "" if how is None else f" (the simulator ended: {how or 'in order'})"
    return ServiceError(f"got {found.got}{ended}; expected {found.expected}; {found.remedy}")


def _play(session: _Session, peer: TrialConnection, settings: Settings) -> None:
    first = session.begin(peer.expect(messages.Hello))
    times = {"heartbeat_s": settings.pipeline.heartbeat_s, "timeout_s": settings.pipeline.simulator_timeout_s}
    peer.send(messages.Welcome(version=messages.VERSION, connection=1, **times))
    peer.send(first)
    while not isinstance(message := peer.expect(messages.Step, messages.Behaviors, messages.Bye), messages.Bye):
        if isinstance(message, messages.Behaviors):
            session.register(message.behaviors)
            continue
        assert isinstance(message, messages.Step)
        act = session.answer(message)
        if session.complete:
            return
        peer.send(act)
    _print(f"the simulator sent Bye ({message.reason})")


def _part(peer: TrialConnection, last: messages.Bye | messages.Fault) -> None:
    """Sends the last message, if the connection is still open."""
    if peer.state not in ("closed", "parting"):
        with contextlib.suppress(ConversationStopped):
            peer.send(last)


def _print(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


# ---------------------------------------------------------------- the simulator


@contextlib.contextmanager
def lone_simulator(settings: Settings, seed: int) -> Iterator[SimulatorProcess]:
    """Starts the first simulator of a configuration, as the supervisor does; without one, waits for any to connect."""
    topology = build(settings, run_id="record", directory=Path(), seed=seed)
    plan = next(iter(topology.simulators), None)
    address = next(iter(topology.run.addresses.values())) if plan is None else plan.environment["SPARRING_ADDRESS"]
    if is_open(address):
        raise SettingsError(
            f"got {address} for the simulator, which other machines can reach; expected loopback or unix:///PATH, "
            "because a recording is not encrypted; set pipeline.address to one"
        )
    if lines := exposed(topology.run.settings, insecure=False):
        raise SettingsError("\n".join(lines))
    command, environment = ((), {}) if plan is None else (plan.command, plan.environment)
    with (
        contextlib.closing(_listen(address)) as listener,
        simulator_process(address, listener, command, environment) as simulator,
    ):
        simulator.start()
        yield simulator


def _listen(address: str) -> socket.socket:
    parts = urlsplit(address)
    try:
        if parts.scheme == "unix":
            return listen(Path(parts.path))
        family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
        return socket.create_server((parts.hostname or "127.0.0.1", parts.port or 0), family=family, backlog=1)
    except (OSError, SparringError) as error:
        raise SettingsError(
            f"got {address} for the simulator, which cannot be used ({error}); expected a free address; "
            "stop what uses it, or set pipeline.address to another"
        ) from error
