"""Plays the trainer for a foreign simulator, and reports for each rule whether it keeps the protocol.

The rules of conduct are here in the order of play; those about Steps are in `steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from sparring.pipeline.compliance.peer import ConversationStopped, SilenceTimeout, SimulatorProcess, TrialConnection
from sparring.pipeline.compliance.steps import STEP_RULES, Finding, explained, failed, skipped, warned
from sparring.pipeline.compliance.trial import FirstObservations, Trial, first_observations
from sparring.pipeline.messages.simulator import VERSION, Bye, Fault, Ping, Pong, Sampler
from sparring.pipeline.specs import BehaviorId, BehaviorSpec, SpecError

SEED: Final = 1
MOST_STEPS: Final = 2000
"""Most Steps to play until episodes end."""
FEW_STEPS: Final = 3
"""Steps to count before the connection is closed."""
SAMPLER: Final = Sampler(kind="uniform", values=(0.25, 0.75), seed=1)

ALWAYS: Final = {
    "decoding": "Every message can be decoded.",
    "order": "Every message is allowed by the table of the conversation.",
}
"""Rules for every message; a message that breaks one ends its conversation."""

Check = Callable[[Trial], Finding | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """Describes one rule of conduct.

    Attributes:
        name: short and stable, for scripts.
        sentence: the rule.
        check: plays its part of the conversation; returns None where the simulator keeps the rule.
        needed: nothing further can be checked if this one is broken.
    """

    name: str
    sentence: str
    check: Check
    needed: bool


RULES: Final[list[Rule]] = []
"""The rules of conduct, in the order of play."""


def _rule(name: str, sentence: str, *, needed: bool = False) -> Callable[[Check], Check]:
    """Returns a decorator that adds a rule with the decorated check."""

    def add(check: Check) -> Check:
        RULES.append(Rule(name, sentence, check, needed))
        return check

    return add


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Finding):
    """Holds the result of one rule, with its name and sentence."""

    rule: str
    sentence: str


def check_simulator(command: Sequence[str], *, episodes: int, timeout_s: float) -> list[Verdict]:
    """Starts `command` and checks it against every rule.

    Args:
        command: program and arguments; `{address}` in them is replaced, and the environment variable
            SPARRING_ADDRESS holds the address to connect to.
        episodes: number of ended episodes to play for.
        timeout_s: limit for each answer of the simulator.

    Raises:
        OSError: the command cannot be started.
    """
    host = SimulatorProcess(command)
    try:
        return examine(host, episodes=episodes, timeout_s=timeout_s)
    finally:
        host.stop()


def examine(host: SimulatorProcess, *, episodes: int, timeout_s: float) -> list[Verdict]:
    """Checks a simulator that `host` runs; see `check_simulator`."""
    trial = Trial(host, episodes=episodes, timeout_s=timeout_s)
    passed = Finding(status="PASS")
    findings: dict[str, Finding] = {}
    blocked = ""
    for rule in RULES:
        if blocked:
            findings[rule.name] = skipped(blocked)
            continue
        try:
            findings[rule.name] = rule.check(trial) or passed
        except ConversationStopped as stopped:
            trial.disconnect()
            if stopped.rule:
                findings.setdefault(stopped.rule, stopped.finding)
            findings[rule.name] = skipped(f"rule {stopped.rule} was broken") if stopped.rule else stopped.finding
        if rule.needed and findings[rule.name].status != "PASS":
            blocked = f"rule {rule.name} did not hold"
    trial.disconnect()
    received = passed if trial.hello else skipped("no message arrived")
    seen = passed if trial.watch.steps else skipped("no Step arrived")
    rows = [(rule.name, rule.sentence, findings[rule.name]) for rule in RULES]
    rows += [(name, sentence, findings.get(name, received)) for name, sentence in ALWAYS.items()]
    rows += [(name, sentence, trial.watch.findings.get(name, seen)) for name, sentence in STEP_RULES.items()]
    return [Verdict(rule=name, sentence=sentence, **asdict(finding)) for name, sentence, finding in rows]


# ---------------------------------------------------------------- rules of conduct, in the order of play


@_rule("connects", "It connects in time.", needed=True)
def _connects(trial: Trial) -> None:
    trial.start()


@_rule("hello", "Its first message is Hello with the right version.", needed=True)
def _hello(trial: Trial) -> Finding | None:
    version = trial.greet().version
    if version == VERSION:
        return None
    return failed(f"version {version}", f"{VERSION}", "speak the version of docs/protocol.md")


@_rule("specs", "Behavior ids can be read; one name has one spec.", needed=True)
def _specs(trial: Trial) -> Finding | None:
    """Checks ids and names; the codec has rejected specs that no network can be built for."""
    by_name: dict[str, BehaviorSpec] = {}
    for text, spec in trial.watch.specs.items():
        try:
            name = BehaviorId.parse(text).name
        except SpecError as error:
            return explained(error)
        if by_name.setdefault(name, spec) != spec:
            return failed(f"two specs for {name!r}", "one for all teams of a name", "give the other team another name")
    return None


@_rule("ping_waiting", "It answers Ping while it waits for Reset.")
def _ping_waiting(trial: Trial) -> Finding | None:
    return _answers_ping(trial.welcomed(), 1)


def _answers_ping(peer: TrialConnection, number: int) -> Finding | None:
    peer.send(Ping(number=number))
    answer = peer.expect(Pong).number
    if answer == number:
        return None
    return failed(f"Pong {answer}", f"Pong {number}", "answer with the number of the Ping")


@_rule("heartbeat", "It sends Ping when it has been silent.")
def _heartbeat(trial: Trial) -> Finding | None:
    try:
        trial.welcomed().expect(Ping)
    except SilenceTimeout:
        got, expected = f"no Ping in {trial.timeout_s:g} s", f"a Ping after {trial.heartbeat_s:g} s"
        return failed(got, expected, "send Ping when silent for Welcome.heartbeat_s")
    return None


@_rule("reset", "It answers Reset with a Step.", needed=True)
def _reset(trial: Trial) -> None:
    trial.first = first_observations(trial.reset(SEED))


@_rule("ping_deciding", "It answers Ping while it waits for Act.")
def _ping_deciding(trial: Trial) -> Finding | None:
    return _answers_ping(trial.deciding(), 2)


@_rule("plays", "It answers every Act with a Step, and episodes end.")
def _plays(trial: Trial) -> Finding | None:
    trial.deciding()
    ends, steps = trial.watch.ended + trial.episodes, trial.watch.steps + MOST_STEPS
    while trial.watch.ended < ends:
        if trial.watch.steps >= steps:
            got = f"{trial.watch.ended} ended episodes in {MOST_STEPS} Steps"
            return warned(got, f"{ends}", "limit the length of episodes")
        trial.act()
    return None


@_rule("parameters", "It continues after an Act that changes parameters.")
def _parameters(trial: Trial) -> None:
    """Changes a parameter without a reset: a number, then a sampler, then a number again."""
    trial.deciding()
    for value in (1.0, SAMPLER, 2.0):
        trial.act(value)


@_rule("reset_in_place", "Reset in place of Act begins all episodes anew.")
def _resets_in_place(trial: Trial) -> Finding | None:
    trial.deciding()
    trial.act()
    again, first = _counts(first_observations(trial.reset(SEED, SAMPLER))), _counts(trial.first)
    if again == first:
        return None
    expected = f"those of the first Reset, {first}"
    return warned(f"first decisions of {again}", expected, "begin new episodes for all agents at Reset")


def _counts(first: FirstObservations) -> dict[str, int]:
    return {behavior: len(column) for (behavior, name), column in first.items() if name == "agents"}


@_rule("seed", "The same seed shows the same first observations.")
def _seed(trial: Trial) -> Finding | None:
    """Compares the first observations of two Resets with the same seed."""
    trial.deciding()
    again, first = first_observations(trial.reset(SEED)), trial.first
    if again.keys() == first.keys() and all(
        np.array_equal(again[key], first[key], equal_nan=first[key].dtype.kind == "f") for key in first
    ):
        return None
    remedy = "seed the random source from Reset.seed; without it no run is reproducible"
    return warned("other first observations with the same seed", "the same", remedy)


@_rule("bye", "It ends in order on Bye.")
def _bye(trial: Trial) -> Finding | None:
    if not _closes(trial, Bye(reason="the check is over")):
        return failed("an open connection after Bye", "a closed one", "close the connection and end")
    status = trial.host.exit_status(trial.timeout_s)
    if status is None:
        return warned("a process that keeps running", "its exit", "end after Bye")
    if status != 0:
        return failed(f"exit status {status}; it printed: {trial.host.output_tail()}", "0", "end in order after Bye")
    return None


def _closes(trial: Trial, last: Bye | Fault) -> bool:
    """Sends a last message, and returns whether the simulator then closes the connection."""
    peer = trial.deciding()
    peer.send(last)
    is_closed = peer.closes()
    trial.disconnect()
    return is_closed


@_rule("reconnects", "It reconnects after a broken connection.")
def _reconnects(trial: Trial) -> Finding | None:
    trial.deciding()
    for _ in range(FEW_STEPS):
        trial.act()
    counted = {name: steps for name, steps in trial.watch.counter.steps.items() if steps}
    trial.disconnect()
    try:
        trial.accept()
        trial.recount = (dict(trial.greet().steps), counted)
        trial.deciding()
    except ConversationStopped as stopped:
        return warned(stopped.finding.got, "a new connection", "connect again when a connection breaks")
    return None


@_rule("counts", "It counts its steps as the trainer does.")
def _counted(trial: Trial) -> Finding | None:
    if trial.recount is None:
        return skipped("it did not reconnect")
    theirs, ours = trial.recount
    if not theirs and ours:
        return skipped("Hello.steps is empty: it does not count")
    if {name: steps for name, steps in theirs.items() if steps} != ours:
        return failed(f"{theirs} after a new connection", f"{ours}", "count an outcome when its report is sent")
    return None


@_rule("fault", "It ends the conversation on Fault.")
def _fault(trial: Trial) -> Finding | None:
    if _closes(trial, Fault(code="internal", got="a check", expected="an end", remedy="none: this is a test")):
        return None
    return failed("an open connection after Fault", "a closed one", "show the Fault and end")
