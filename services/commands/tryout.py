"""`sparring try ENV`: shows what a simulator's behaviors observe and do, and plays random steps with it."""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from sparring.pipeline.bridges.explain import frames_of_author, place_of, say, traceback_of
from sparring.pipeline.bridges.pettingzoo.turns import TurnGame
from sparring.pipeline.bridges.spaces import Option
from sparring.pipeline.compliance.steps import StepWatch
from sparring.pipeline.compliance.trial import random_actions
from sparring.pipeline.errors import FAILED, NOTICE, SettingsError, SparringError, how_ended
from sparring.pipeline.games.registry import make, names, parse_options
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.monitoring.logs import printable
from sparring.pipeline.settings import Settings, read, started_by_hand
from sparring.pipeline.settings.document import Problem
from sparring.pipeline.settings.load import LoadedSettings
from sparring.pipeline.simulation.game import Game, ScriptedGame
from sparring.pipeline.specs import Array, BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.limits import (
    LimitSettings,
    check_behaviors,
    check_network,
    check_scripts,
    unknown_behavior,
)
from sparring.pipeline.stepping.validation import describe_report
from sparring.services.commands.runs import add_assigned, check_positive, natural
from sparring.services.process.lifeline import adopt_orphans, children, end_strays

REFUSED = "not usable: "
"""Beginning of a line about a simulator that cannot be used."""
_TRIAL_S = 60.0
_LOOK_S = 0.1
"""A call that takes too long is noticed within this time."""
_STRAYS_S = 5.0
_LARGE = 100.0
"""Values beyond this train badly as they are."""
_LARGE_REWARD = 1e4
_SHORT = 2.0
"""Steps of an episode that seems to begin at its end."""
_SHORT_IN_TURNS = 1.25
"""The same for each agent of a game in turns, where a few moves of each make a match."""
_MANY = 5
"""Where a second episode is so many times as long as each first one, no episode seems to have begun anew."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "env",
        metavar="ENV",
        help="id of Gymnasium (CartPole-v1, module:Id-v0), module of PettingZoo, built-in simulator, or configuration",
    )
    parser.add_argument("--steps", type=natural, default=100, metavar="N", help="random steps to play (100)")
    parser.add_argument("--areas", type=int, metavar="N", help="copies of the environment (1)")
    parser.add_argument("--seed", type=natural, default=0, metavar="S", help="of environment and actions (0)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the simulator; repeat")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="how long the environment may take for a call (60)"
    )
    add_assigned(parser)
    parser.add_argument("--simulator", type=int, metavar="N", help="of a configuration only this one, counted from 0")
    parser.add_argument(
        "--python-path",
        action="append",
        default=[],
        metavar="DIR",
        help="where environments are imported from, before this folder",
    )


def run(args: argparse.Namespace) -> int:
    """Tries one simulator, or each that a configuration starts.

    Returns:
        0 if all played their steps by the rules of the protocol, else 1.

    Raises:
        SettingsError: the environment, the configuration or an option is invalid.
    """
    check_positive(args, "timeout")
    is_file = args.env.endswith((".yaml", ".yml")) or (args.simulator is not None and Path(args.env).is_file())
    others = (args.option, args.areas, args.python_path) if is_file else (args.assigned, args.simulator)
    options = ("--option", "--areas", "--python-path") if is_file else ("--set", "--simulator")
    if unused := [option for option, value in zip(options, others, strict=True) if value not in (None, [])]:
        remedy = "write it there, or say --set KEY=VALUE" if is_file else "leave it out"
        only = "without a configuration" if is_file else "of a configuration"
        raise SettingsError(f"got {unused[0]} for {args.env}; expected it {only} only; {remedy}")
    if is_file:
        settings = read(args.env, assigned=args.assigned).settings
        sys.path.extend(settings.pipeline.python_path)
        launched = settings.launched
        if args.simulator is not None:
            if not 0 <= args.simulator < len(launched):
                got, expected = f"--simulator {args.simulator}", f"a number from 0, below {len(launched)}"
                raise SettingsError(f"got {got}; expected {expected}; correct it")
            launched = launched[args.simulator :][:1]
        named = [Trial(one.name, one.areas, one.options, args.seed, settings) for one in launched if one.name]
        if not settings.simulators:
            say("".join(f"{NOTICE}{args.env} {line}\n" for line in started_by_hand(settings)))
        if not named:
            raise SettingsError(
                f"got {args.env}, which starts no built-in simulator or bridge; expected one; sparring compliance "
                "checks programs of your own"
            )
    else:
        sys.path.extend([*args.python_path, str(Path.cwd())])
        name, texts = args.env, args.option
        files = [one for one in (Path(name), Path(f"{name}.py")) if one.exists()]
        if name in names() and files:
            remedy = f"to try {files[0]}, rename it, or name it in a configuration"
            say(f"{NOTICE}{name} is the built-in simulator; {remedy}\n")
        if name not in names():  # an id of Gymnasium has a version, or the module that registers it
            name = "pettingzoo" if re.fullmatch(r"[A-Za-z_][\w.]*", args.env) else "gymnasium"
            texts = [f"env_id={args.env}", *texts]
        named = [Trial(name, 1 if args.areas is None else args.areas, parse_options(name, texts), args.seed)]
    from sparring.services.process.hosting import ending_signals, interrupting  # loads anyio, which `check` need not

    adopt_orphans()
    spared = children()
    with ending_signals(interrupting()):
        return max([_try(one, args.steps, args.timeout, spared) for one in named])


def _try(trial: "Trial", steps: int, limit_s: float, spared: Collection[int]) -> int:
    """Tries one simulator, and prints what it is like; returns the exit status."""
    trial.calls("while it was made")
    of_thread = trial, limit_s, threading.get_ident(), spared
    threading.Thread(target=_end_where_it_hangs, args=of_thread, daemon=True).start()
    failed, unclosed = _failure_of(trial, partial(_show, trial, steps)), _failure_of(trial, trial.close)
    if first := failed or unclosed:
        (error, moment), place = first, place_of(first[0])
        if isinstance(error, SparringError) or (isinstance(error, BrokenPipeError) and not place):
            raise error  # what has read the output has ended
        if isinstance(error, KeyboardInterrupt):
            say(f"sparring try: {trial.name} was stopped {moment}{place}\n")
            return 128 + signal.SIGINT
        # It is the environment's, and its author's: its traceback is what helps.
        say(f"{printable(traceback_of(error))}sparring try: {trial.name} failed {moment}\n")
        return FAILED
    for rule, finding in trial.watch.findings.items():
        said = f"{finding.status} {rule}: got {finding.got}; expected {finding.expected}; {finding.remedy}"
        say(f"{printable(said)}\n")
    return FAILED if any(one.status == "FAIL" for one in trial.watch.findings.values()) else 0


def _show(trial: "Trial", steps: int) -> None:
    for line in trial.play(steps):
        try:
            sys.stdout.write(f"{printable(line)}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:  # not the environment's
            raise SparringError(f"got {error}; expected an output that can be written; mend it") from error


def _failure_of(trial: "Trial", act: Callable[[], None]) -> tuple[BaseException, str] | None:
    """Returns what a simulator raises, and at which moment; None for nothing."""
    try:
        act()
    except BaseException as error:
        return error, trial.moment
    return None


def _end_where_it_hangs(trial: "Trial", limit_s: float, thread: int, spared: Collection[int]) -> None:
    """Ends this process once a call of the simulator, in the thread of this number, takes too long."""
    while trial.call_s < limit_s:
        if trial.closed.wait(_LOOK_S):
            return
    frames = frames_of_author(thread)
    place = f" ({frames[0].f_code.co_filename}:{frames[0].f_lineno})" if frames else ""
    got = f"no answer within {limit_s:g} s from {trial.name} {trial.moment}{place}"
    remedy = "correct the environment, or give it longer with --timeout"
    say(f"sparring try: got {got}; expected it to return; {remedy}\n")
    end_strays(spared, _STRAYS_S)
    os._exit(FAILED)


class Trial:
    """Plays a simulator in this process with random actions.

    Args:
        name: of the built-in simulator or bridge.
        areas: copies of the environment.
        options: of the simulator.
        seed: of the simulator and of the actions.
        settings: of a run that would have to accept its behaviors; None for no run.

    Attributes:
        name: of the simulator, for messages.
        watch: checks what it reports.
        closed: set at its end.
    """

    def __init__(
        self, name: str, areas: int, options: Mapping[str, Option], seed: int, settings: Settings | None = None
    ) -> None:
        self._made_from, self._seed, self._settings = (name, areas, options), seed, settings
        self._game: Game | None = None
        self._called = ("", time.monotonic())
        self.closed = threading.Event()
        self._returns: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._ended: list[float] = []
        self._lengths: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._ended_after: list[int] = []
        self._ends: Counter[tuple[str, int]] = Counter()
        self._is_rewarded = False
        self._highest = 0.0  # reward
        self._before: dict[tuple[str, int], tuple[Array, ...]] = {}
        self._moving: dict[str, bool] = {}
        self._acting: set[str] = set()
        self._ranges: dict[str, tuple[float, float]] = {}
        self.name = str(options.get("env_id", name))
        self.watch = StepWatch()

    def play(self, steps: int) -> Iterator[str]:
        """Yields what its behaviors are like, and after some steps how they went.

        Raises:
            SparringError: the simulator cannot be made or has failed.
            Exception: the environment has failed.
        """
        (name, areas, options), random = self._made_from, np.random.default_rng(self._seed)
        game = self._game = make(name, areas, **options)
        self._checked_specs(game)  # before it makes an array of a size that a run would reject
        self.calls("at its reset()")
        reports = game.reset({}, self._seed)
        specs = self._checked_specs(game)
        self.watch.connected(specs)
        for report in reports:
            yield f"  {report.behavior}: {describe_report(report, specs[report.behavior])}"
        if silent := sorted(specs.keys() - {report.behavior for report in reports}):
            yield f"  {', '.join(silent)}: no agent at first"
        began, decided = time.perf_counter(), 0
        for number in range(1, steps + 1):
            if not self._follow(reports):
                return
            specs = self._checked_specs(game)
            self.watch.specs.update(specs)
            actions = {
                one.behavior: random_actions(one.behavior, one.decisions, specs[one.behavior].actions, random)
                for one in reports
                if one.decisions is not None
            }
            decided += sum(len(one.agents) for one in actions.values())
            self._acting.update(actions)
            self.calls(f"at step {number}, in step()")
            reports = game.step(actions)
        if steps and self._follow(reports):
            yield from self._summary(steps, decided, time.perf_counter() - began)

    def _checked_specs(self, game: Game) -> dict[str, BehaviorSpec]:
        """Returns the specs of all behaviors.

        Raises:
            RemoteProtocolError: a run would reject one: it exceeds a limit, or with the settings of this trial is
                unknown, lacks a script, or needs an unsupported network.
        """
        specs, settings = dict(game.behaviors()), self._settings
        check_behaviors(specs, 0, LimitSettings() if settings is None else settings.pipeline.limits)
        if settings is None:
            return specs
        scripts = game.scripts() if isinstance(game, ScriptedGame) else {}
        for text, spec in specs.items():
            name = BehaviorId.parse(text).name
            behavior = settings.behaviors.get(name, settings.unnamed)
            if behavior is None:
                raise unknown_behavior(text, settings.behaviors)
            if behavior.self_play is not None:
                check_scripts(name, scripts.get(name, ()), behavior.self_play.scripts)
            check_network(name, spec, behavior.network_settings)
        return specs

    def calls(self, moment: str) -> None:
        """Notes that a call of the simulator begins; `moment` says which, for messages."""
        self._called = moment, time.monotonic()

    @property
    def moment(self) -> str:
        """How far it has come, for messages."""
        return self._called[0]

    @property
    def call_s(self) -> float:
        """How long ago the present call of the simulator began, or the last one."""
        return time.monotonic() - self._called[1]

    def close(self) -> None:
        """Closes the simulator."""
        self.calls("in close()")
        try:
            if self._game is not None:
                self._game.close()
        finally:
            self.closed.set()

    def _follow(self, reports: Sequence[BehaviorReport]) -> bool:
        """Checks and counts what was reported; returns False where a run would reject it."""
        if not self.watch.read(Step(sequence=self.watch.sequence, reports=tuple(reports))):
            return False
        for report in reports:
            observations = self.watch.specs[report.behavior].observations
            for rows in (report.ends, report.decisions):
                if rows is None:
                    continue
                for agent, reward in zip(rows.agents.tolist(), rows.rewards.tolist(), strict=True):
                    key = report.behavior, agent
                    self._returns[key] += reward
                    self._is_rewarded |= bool(reward)
                    if rows is report.ends:
                        self._ends[key] += 1
                        self._ended.append(self._returns.pop(key))
                        self._ended_after.append(self._lengths.pop(key, 0))
                    else:
                        self._lengths[key] += 1
                self._watch_movement(report.behavior, rows, is_end=rows is report.ends)
                self._highest = max(self._highest, float(np.abs(rows.rewards).max(initial=0)))
                self._is_rewarded |= rows.group_rewards is not None and bool(rows.group_rewards.any())
                for values, spec in zip(rows.observations, observations, strict=True):
                    low, high = self._ranges.get(spec.name, (np.inf, -np.inf))
                    self._ranges[spec.name] = min(low, float(values.min())), max(high, float(values.max()))
        return True

    def _watch_movement(self, behavior: str, rows: Decisions | Ends, *, is_end: bool) -> None:
        """Notes whether any observation of an agent differs from that of its step before."""
        for row, agent in enumerate(rows.agents.tolist()):
            seen = tuple(values[row] for values in rows.observations)
            if (before := self._before.pop((behavior, agent), None)) is not None:
                moves = not all(map(np.array_equal, before, seen))
                self._moving[behavior] = self._moving.get(behavior, False) or moves
            if not is_end:
                self._before[behavior, agent] = seen

    def _summary(self, steps: int, decided: int, seconds: float) -> Iterator[str]:
        seen = [one for spec in self.watch.specs.values() for one in spec.observations]
        images = {one.name for one in seen if one.kind == "image"}
        is_normalized = (
            any(one.network_settings.normalize for one in self._settings.behaviors.values())
            if self._settings
            else False
        )
        for name, (low, high) in self._ranges.items():
            yield f"  {name} has values from {low:.4g} to {high:.4g}"
            if low == high:
                yield f"  notice: {name} was the same in every step, so that nothing can be learned from it"
            if name not in images and max(-low, high) > _LARGE and not is_normalized:
                yield f"  notice: the values of {name} are large; set network_settings.normalize: true"
        for behavior, moves in self._moving.items():
            if not moves and any(low != high for low, high in self._ranges.values()):
                yield f"  notice: {behavior} observed the same in each step of an episode; does step() return new ones?"
        if self._highest > _LARGE_REWARD:
            yield f"  notice: rewards are up to {self._highest:.4g}; set reward_signals.extrinsic.normalize: true"
        if silent := sorted(self.watch.specs.keys() - self._acting):
            names = ", ".join(silent)
            yield f"  notice: no agent of {names} has acted; where agents take turns, step() selects the next one"
        if self._ended and not self._is_rewarded:
            remedy = "; step() of a game in turns ends with self._accumulate_rewards()"
            yield f"  notice: every reward was 0{remedy if isinstance(self._game, TurnGame) else ''}"
        mean = ""
        if self._ended:
            length, reward = np.mean(self._ended_after), np.mean(self._ended)
            if length < (_SHORT_IN_TURNS if isinstance(self._game, TurnGame) else _SHORT):
                yield "  notice: episodes are very short; does reset(), or step() of a vector form, begin a new one?"
            keeps_ids = self._made_from[0] in ("gymnasium", "pettingzoo")
            if keeps_ids and max(self._ends.values()) == 1 and steps > _MANY * max(self._ended_after):
                yield "  notice: no agent has ended twice, though first episodes were short; does reset() begin anew?"
            mean = f", on average after {length:.4g} steps, with a return of {reward:.4g}"
        played = f"played {steps} random steps ({decided:,} of agents) in {seconds:.2f} s"
        yield f"{played}: {len(self._ended)} episodes ended{mean}"


def described(config: Path, loaded: LoadedSettings, assigned: Sequence[str] = ()) -> Iterator[str]:
    """Yields what the simulators that a configuration starts here are like, line by line, or why it cannot use them.

    An environment is code of others, so it is made in a process of its own; a game of another engine is not started.

    Args:
        config: the file.
        loaded: its content.
        assigned: what the command line says instead, which is in `loaded` already.
    """
    path = Path(config)
    if not path.is_file() or path.is_relative_to("/dev"):  # a pipe, which holds nothing any more, or /dev/stdin
        yield f"notice: the simulators of {config} are not tried: it is a pipe or the standard input"
        return
    for number, simulator in enumerate(loaded.settings.launched):
        if simulator.name in (None, "unity", "godot"):
            continue
        command = [sys.executable, "-P", "-m", "sparring", "try", str(config), "--simulator", str(number)]
        command += ["--steps", "0", *(word for one in assigned for word in ("--set", one))]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=2 * _TRIAL_S,  # after that of the command itself
            )
        except subprocess.TimeoutExpired:
            yield f"{REFUSED}{loaded.problem(('simulators', number), f'no answer within {2 * _TRIAL_S:g} s')}"
            continue
        lines = done.stderr.strip().splitlines()
        notices = [line for line in lines if line.startswith(NOTICE)]
        if done.returncode or not done.stdout.strip():
            silent = f"its process ended without a word ({how_ended(done.returncode)})"
            said = [line for line in lines if line not in notices]
            yield f"{REFUSED}{_refusal(loaded, number, said or [silent])}"
        else:
            yield from (f"warning: {line.removeprefix(NOTICE)}" for line in notices)
            yield from done.stdout.splitlines()


def _refusal(loaded: LoadedSettings, number: int, lines: Sequence[str]) -> Problem:
    """Returns why a simulator cannot be used, as its last lines say, at the option that they name."""
    last = [line.removeprefix("sparring try: ").removeprefix("sparring: ") for line in lines[-2:]]
    text = ": ".join(last[::-1]) if lines and lines[-1].startswith("sparring try:") else last[-1]
    options = loaded.settings.launched[number].options
    if found := re.search(r"network_settings\.(\w+).* in behavior ([^;]+);", text):
        return loaded.problem(("behaviors", found[2], "network_settings", found[1]), text)
    if found := re.search(r"behavior (\S+) with scripts", text):
        return loaded.problem(("behaviors", found[1], "self_play", "opponents"), text)
    if "below `behaviors`" in text:  # it has a behavior that the configuration does not name
        return loaded.problem(("behaviors",), text)
    named = [key for key in options if re.search(rf"\b{re.escape(key)}\b", text)]
    return loaded.problem(("simulators", number, "options", *(named or ["env_id"])[:1]), text)
