"""`sparring record CONFIG`: records episodes of one simulator as demonstrations.

consumes       Steps of one simulator
produces       Acts; a file of episodes for each behavior
waits for      each answer of the simulator
unblocked by   the answer, the simulator's Bye or its end, `--timeout`, Ctrl-C

The command is a trainer without learning and without other services. It acts with a checkpoint, asks the simulator to
play by a script of its own, or leaves the choice to a person; the simulator then reports what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sparring.pipeline.compliance.peer import ConversationStopped, TrialConnection
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
from sparring.pipeline.files import Json, write_atomically
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    BehaviorActions,
    BehaviorReport,
    Behaviors,
    Bye,
    Fault,
    Hello,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.settings import Overrides, Settings, not_here, read
from sparring.pipeline.settings.parameters import in_lessons
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.connections import check_step
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.validation import check_report, check_unique
from sparring.services.commands.record_actors import CheckpointActor, RecordingActor, SimulatorActor
from sparring.services.commands.record_simulator import LoneSimulator, lone_simulator
from sparring.services.commands.runs import check_positive, spread
from sparring.services.endpoint.admission import fault_of
from sparring.services.endpoint.registration import check_version
from sparring.services.supervision.launch import new_seed

_MANUAL_S: Final = 3600.0
"""A person may pause a game."""
_PARTING_S: Final = 3.0
_PROGRESS_S: Final = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", type=Path, help="configuration file (YAML); of its simulators the first is started")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--policy", type=Path, metavar="CHECKPOINT", help="act with a checkpoint, or those of a run")
    how.add_argument("--script", metavar="NAME", help="let the simulator play by its own script of this name")
    how.add_argument("--manual", action="store_true", help="a person plays in the simulator, which reports the actions")
    parser.add_argument("--episodes", type=int, default=20, metavar="N", help="episodes of each behavior (20)")
    parser.add_argument("--out", type=Path, default=Path("demos"), metavar="FOLDER", help="for the files (demos)")
    parser.add_argument("--behavior", nargs="+", action="extend", default=[], metavar="NAME", help="these only (all)")
    parser.add_argument("--seed", type=int, metavar="S", help="of simulator and sampling (default: random, printed)")
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
    actor = CheckpointActor(args.policy, seed, args.deterministic) if args.policy else SimulatorActor(args.script or "")
    session = _Session(args, actor)
    try:
        with lone_simulator(settings, seed) as simulator:
            _print(f"seed {seed}")
            if simulator.process is None:
                _print(f"waiting for a simulator at {simulator.address}")
            limit = timeout_s if simulator.process is not None else args.timeout
            peer = TrialConnection(simulator.accept(limit), timeout_s)
            _converse(session, peer, settings, seed, simulator)
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
    if args.policy is not None and not args.policy.exists():
        raise SettingsError(f"got --policy {args.policy}, which is not there; expected a checkpoint or run; correct it")
    loaded = read(args.config, Overrides(seed=args.seed))
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


@dataclass
class _Session:
    """The behaviors of the simulator, and the tapes of those that are recorded.

    Attributes:
        args: of the command.
        actor: chooses the actions.
    """

    args: argparse.Namespace
    actor: RecordingActor
    _ids: dict[str, BehaviorSpec] = field(default_factory=dict, init=False)
    _names: dict[str, BehaviorSpec] = field(default_factory=dict, init=False)
    _tapes: dict[str, Tape] = field(default_factory=dict, init=False)
    _sequence: int = field(default=0, init=False)
    _printed: tuple[int, float] = field(default=(0, 0.0), init=False)

    @property
    def complete(self) -> bool:
        """Returns whether all episodes have ended."""
        return bool(self._tapes) and all(tape.complete for tape in self._tapes.values())

    def register(self, behaviors: Mapping[str, BehaviorSpec], scripts: Mapping[str, Sequence[str]]) -> None:
        """Registers behavior ids with their specs.

        Raises:
            SettingsError: the actor cannot act for one, or its file exists.
            RemoteProtocolError: a name has two specs.
        """
        for text, spec in behaviors.items():
            name = BehaviorId.parse(text).name
            if self._names.get(name, spec) != spec:
                raise RemoteProtocolError(
                    "specs", got=f"two specs for {name!r}", expected="one for all teams", remedy="name one differently"
                )
            self._ids[text] = spec
            if name not in self._names:
                self._names[name] = spec
                recorded = not self.args.behavior or name in self.args.behavior
                self.actor.register(name, spec, scripts.get(name, ()), recorded=recorded)
                if recorded:
                    self._tapes[name] = Tape(name, spec, self.args.episodes)
        if unknown := sorted(set(self.args.behavior) - self._names.keys()):
            raise SettingsError(f"got --behavior {unknown}; expected some of {sorted(self._names)}; correct the name")
        there = [str(path) for name in self._tapes if (path := self._file(name)).exists()]
        if there and not self.args.force:
            raise SettingsError(f"got {', '.join(there)}, which exist; expected none; name another --out, or --force")

    def answer(self, step: Step) -> Act:
        """Records a Step and answers it.

        Raises:
            RemoteProtocolError: it contradicts the specs, or names agents that are not alive.
            SettingsError: it does not report what was done.
        """
        check_step(step, self._sequence, self._ids)
        self._sequence += 1
        answers = [self._answer_report(report) for report in step.reports]
        self._print_progress()
        return Act(sequence=step.sequence, actions=tuple(answer for answer in answers if answer is not None))

    def _answer_report(self, report: BehaviorReport) -> BehaviorActions | None:
        check_report(report, self._ids[report.behavior])
        for what, rows in (("decisions", report.decisions), ("ends", report.ends)):
            if rows is not None:
                check_unique(report.behavior, what, rows.agents)
        name = BehaviorId.parse(report.behavior).name
        tape = self._tapes.get(name)
        if tape is not None:
            tape.report(report)
            if tape.unreported and self.args.policy is None:
                how = "--manual" if self.args.manual else f"--script {self.args.script}"
                raise SettingsError(
                    f"got {how}, and outcomes of {name} that do not report what was done; expected did_continuous and "
                    "did_discrete in the simulator's decisions and ends; fill them as docs/demonstrations.md says, or "
                    "record with --policy"
                )
        answer = self.actor.act(name, report)
        if tape is not None and answer is not None:
            tape.answer(answer)
        return answer

    def _print_progress(self) -> None:
        """Prints the number of ended episodes, at most once a second."""
        ended, now = sum(tape.episodes for tape in self._tapes.values()), time.monotonic()
        if ended > self._printed[0] and now - self._printed[1] > _PROGRESS_S:
            self._printed = (ended, now)
            _print(f"{ended} of {self.args.episodes * len(self._tapes)} episodes")

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
            _print(_summary(name, describe(recording), self._file(name)))
        return bool(self._tapes) and all(tape.episodes for tape in self._tapes.values())

    def _file(self, name: str) -> Path:
        folder = CheckpointFolder(self.args.out, name).path.parent  # refuses a name that cannot be a file's
        return folder / f"{name}-00001{SUFFIX}"


def _summary(name: str, found: Json, path: Path) -> str:
    means = [("returns", "mean return"), ("group_returns", "mean group return")]
    texts = [spread(found[what], called) for what, called in means if what in found]
    return "; ".join([f"{name}: {found['episodes']} episodes, {found['steps']} steps", *texts, str(path)])


# ---------------------------------------------------------------- the conversation


def _converse(
    session: _Session, peer: TrialConnection, settings: Settings, seed: int, simulator: LoneSimulator
) -> None:
    """Plays until all is recorded, or the simulator says Bye.

    Raises:
        SettingsError: the simulator lacks a script or behavior.
        RemoteProtocolError: it broke the protocol, and has received a fault.
        ServiceError: it has disconnected, or did not answer in time.
    """
    try:
        _play(session, peer, settings, seed)
        _part(peer, Bye(reason="the recording is over"))
        peer.closes()
        simulator.end(_PARTING_S)
    except RemoteProtocolError as error:
        _part(peer, fault_of(error))
        raise
    except ConversationStopped as stopped:
        if isinstance(stopped.__cause__, ExplainedError):
            _part(peer, fault_of(stopped.__cause__))
        found = stopped.finding
        ended = f" (the simulator ended: {how})" if (how := simulator.end(_PARTING_S)) else ""
        raise ServiceError(f"got {found.got}{ended}; expected {found.expected}; {found.remedy}") from stopped
    except BaseException:
        _part(peer, Bye(reason="the recording was stopped"))
        raise
    finally:
        peer.drop()


def _play(session: _Session, peer: TrialConnection, settings: Settings, seed: int) -> None:
    hello: Hello = peer.expect(Hello)
    check_version(hello)
    session.register(hello.behaviors, hello.scripts)
    times = settings.pipeline
    peer.send(
        Welcome(version=VERSION, connection=1, heartbeat_s=times.heartbeat_s, timeout_s=times.simulator_timeout_s)
    )
    first = RunParameters(in_lessons(settings.environment_parameters), seed % 2**31).all(0)  # of each curriculum
    peer.send(Reset(parameters=first.parameters, samplers=first.samplers, seed=seed % 2**31))
    while not isinstance(message := peer.expect(Step, Behaviors, Bye), Bye):
        if isinstance(message, Behaviors):
            session.register(message.behaviors, hello.scripts)
            continue
        assert isinstance(message, Step)
        act = session.answer(message)
        if session.complete:
            return
        peer.send(act)
    _print(f"the simulator sent Bye ({message.reason})")


def _part(peer: TrialConnection, last: Bye | Fault) -> None:
    """Sends the last message, if the connection is still open."""
    if peer.state not in ("closed", "parting"):
        with contextlib.suppress(ConversationStopped):
            peer.send(last)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
