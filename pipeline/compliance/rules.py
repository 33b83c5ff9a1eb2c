"""Plays the trainer for a foreign simulator, and reports for each rule whether it keeps the protocol.

The rules of conduct are here in the order of play; those about Steps are in `steps.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sparring.pipeline.compliance.peer import (
    ConversationStopped,
    SilenceTimeout,
    SimulatorHost,
    SimulatorProcess,
    TrialConnection,
)
from sparring.pipeline.compliance.steps import STEP_RULES, Finding, Status, failed, skipped
from sparring.pipeline.compliance.trial import FirstObservations, Trial, first_observations
from sparring.pipeline.messages.simulator import VERSION, Bye, Fault, Ping, Pong, Sampler
from sparring.pipeline.specs import BehaviorId, BehaviorSpec, SpecError

SEED: Final = 1
MOST_STEPS: Final = 2000
"""Most Steps to play until episodes end."""
FEW_STEPS: Final = 3
"""Steps to count before the connection is closed."""
PARAMETER: Final = "compliance"
"""An environment parameter that no simulator knows, and that each must ignore."""
SAMPLER: Final = Sampler(kind="uniform", values=(0.25, 0.75), seed=1)

PASS: Final = Finding(status="PASS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Holds the result of one rule."""

    rule: str
    sentence: str
    status: Status
    got: str
    expected: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Describes one rule of conduct.

    Attributes:
        name: short and stable, for scripts.
        sentence: the rule.
        check: plays the part of the conversation that the rule concerns.
        needed: no other rule can be checked if this one is broken.
    """

    name: str
    sentence: str
    check: Callable[[Trial], Finding]
    needed: bool = False


def check_simulator(
    command: Sequence[str], *, episodes: int = 3, timeout_s: float = 10.0, clock: Callable[[], float] = time.monotonic
) -> list[Verdict]:
    """Starts `command` and checks it against every rule.

    Args:
        command: program and arguments; `{address}` in them is replaced, and the environment variable
            SPARRING_ADDRESS holds the address to connect to.
        episodes: number of ended episodes to play for.
        timeout_s: limit for each answer of the simulator.
        clock: monotonic clock, in seconds.

    Raises:
        OSError: the command cannot be started.
    """
    host = SimulatorProcess(command)
    try:
        return examine(host, episodes=episodes, timeout_s=timeout_s, clock=clock)
    finally:
        host.stop()


def examine(
    host: SimulatorHost, *, episodes: int = 3, timeout_s: float = 10.0, clock: Callable[[], float] = time.monotonic
) -> list[Verdict]:
    """Checks a simulator that `host` runs; see `check_simulator`."""
    trial = Trial(host, episodes=episodes, timeout_s=timeout_s, clock=clock)
    findings: dict[str, Finding] = {}
    blocked = ""
    for rule in RULES:
        if blocked:
            findings[rule.name] = skipped(blocked)
            continue
        try:
            findings[rule.name] = rule.check(trial)
        except ConversationStopped as stopped:
            trial.disconnect()
            if stopped.rule:
                findings.setdefault(stopped.rule, stopped.finding)
            findings[rule.name] = skipped(f"rule {stopped.rule} was broken") if stopped.rule else stopped.finding
        if rule.needed and findings[rule.name].status != "PASS":
            blocked = f"rule {rule.name} did not hold"
    trial.disconnect()
    return _verdicts(findings, trial)


def _verdicts(findings: dict[str, Finding], trial: Trial) -> list[Verdict]:
    watch, unseen = trial.watch, skipped("no Step arrived")
    received = PASS if trial.hello else skipped("no message arrived")
    rows = [(rule.name, rule.sentence, findings.get(rule.name, PASS)) for rule in RULES]
    rows += [(name, sentence, findings.get(name, received)) for name, sentence in ALWAYS.items()]
    for rule in STEP_RULES:
        rows.append((rule.name, rule.sentence, watch.findings.get(rule.name, PASS if watch.steps else unseen)))
    return [
        Verdict(rule=name, sentence=sentence, status=f.status, got=f.got, expected=f.expected, remedy=f.remedy)
        for name, sentence, f in rows
    ]


# ---------------------------------------------------------------- rules of conduct, in the order of play


def _connects(trial: Trial) -> Finding:
    trial.start()
    return PASS


def _hello(trial: Trial) -> Finding:
    hello = trial.greet()
    if hello.version != VERSION:
        return failed(f"version {hello.version}", f"{VERSION}", "speak the version of docs/protocol.md")
    return PASS


def _specs(trial: Trial) -> Finding:
    """Checks ids and names; the codec has rejected specs that no network can be built for."""
    by_name: dict[str, BehaviorSpec] = {}
    for text, spec in trial.watch.specs.items():
        try:
            name = BehaviorId.parse(text).name
        except SpecError as error:
            return failed(error.got, error.expected, error.remedy)
        if by_name.setdefault(name, spec) != spec:
            return failed(f"two specs for {name!r}", "one for all teams of a name", "give the other team another name")
    return PASS


def _ping_waiting(trial: Trial) -> Finding:
    return _answers_ping(trial, trial.welcomed(), 1)


def _ping_deciding(trial: Trial) -> Finding:
    return _answers_ping(trial, trial.deciding(), 2)


def _answers_ping(trial: Trial, peer: TrialConnection, number: int) -> Finding:
    peer.send(Ping(number=number))
    answer = peer.expect(Pong)
    if answer.number != number:
        return failed(f"Pong {answer.number}", f"Pong {number}", "answer with the number of the Ping")
    return PASS


def _heartbeat(trial: Trial) -> Finding:
    peer = trial.welcomed()
    try:
        peer.expect(Ping)
    except SilenceTimeout:
        return failed(
            f"no Ping in {trial.timeout_s:g} s",
            f"a Ping after {trial.heartbeat_s:g} s",
            "send Ping when silent for Welcome.heartbeat_s",
        )
    return PASS


def _reset(trial: Trial) -> Finding:
    trial.first = first_observations(trial.reset(SEED))
    return PASS


def _plays(trial: Trial) -> Finding:
    trial.deciding()
    ends, steps = trial.watch.ended + trial.episodes, trial.watch.steps + MOST_STEPS
    while trial.watch.ended < ends and trial.watch.steps < steps:
        trial.act()
    if trial.watch.ended < ends:
        got = f"{trial.watch.ended} ended episodes in {MOST_STEPS} Steps"
        return Finding(status="WARN", got=got, expected=f"{ends}", remedy="limit the length of episodes")
    return PASS


def _parameters(trial: Trial) -> Finding:
    """Changes a parameter without a reset: a number, then a sampler, then a number again."""
    trial.deciding()
    for value in (1.0, SAMPLER, 2.0):
        trial.act({PARAMETER: value})
    return PASS


def _resets_in_place(trial: Trial) -> Finding:
    trial.deciding()
    trial.act()
    again = first_observations(trial.reset(SEED, {PARAMETER: SAMPLER}))
    if again.keys() != trial.first.keys() or any(len(again[key][0]) != len(trial.first[key][0]) for key in again):
        return Finding(
            status="WARN",
            got=f"first decisions of {_counts(again)}",
            expected=f"those of the first Reset, {_counts(trial.first)}",
            remedy="begin new episodes for all agents at Reset",
        )
    return PASS


def _seed(trial: Trial) -> Finding:
    """Compares the first observations of two Resets with the same seed."""
    trial.deciding()
    again = first_observations(trial.reset(SEED))
    same = again.keys() == trial.first.keys() and all(
        len(again[key]) == len(trial.first[key])
        and all(
            np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
            for a, b in zip(again[key], trial.first[key], strict=True)
        )
        for key in again
    )
    if not same:
        return Finding(
            status="WARN",
            got="other first observations with the same seed",
            expected="the same",
            remedy="seed the random source from Reset.seed; without it no run is reproducible",
        )
    return PASS


def _bye(trial: Trial) -> Finding:
    peer = trial.deciding()
    peer.send(Bye(reason="the check is over"))
    closed = peer.closes()
    trial.disconnect()
    if not closed:
        return failed("an open connection after Bye", "a closed one", "close the connection and end")
    status = trial.host.exit_status(trial.timeout_s)
    if status is None:
        return Finding(status="WARN", got="a process that keeps running", expected="its exit", remedy="end after Bye")
    if status != 0:
        return failed(f"exit status {status}; it printed: {trial.host.output_tail()}", "0", "end in order after Bye")
    return PASS


def _reconnects(trial: Trial) -> Finding:
    trial.deciding()
    for _ in range(FEW_STEPS):
        trial.act()
    counted = dict(trial.watch.counted)
    trial.disconnect()
    try:
        trial.accept()
        trial.recount = (dict(trial.greet().steps), counted)
        trial.deciding()
    except ConversationStopped as stopped:
        finding = stopped.finding
        return Finding(
            status="WARN", got=finding.got, expected="a new connection", remedy="connect again when a connection breaks"
        )
    return PASS


def _counted(trial: Trial) -> Finding:
    if trial.recount is None:
        return skipped("it did not reconnect")
    theirs, ours = trial.recount
    if not theirs and ours:
        return skipped("Hello.steps is empty: it does not count")
    if theirs != ours:
        return failed(f"{theirs} after a new connection", f"{ours}", "count an outcome when its report is sent")
    return PASS


def _fault(trial: Trial) -> Finding:
    peer = trial.deciding()
    peer.send(Fault(code="internal", got="a check", expected="an end", remedy="none: this is a test"))
    closed = peer.closes()
    trial.disconnect()
    return PASS if closed else failed("an open connection after Fault", "a closed one", "show the Fault and end")


RULES: Final = (
    Rule(name="connects", sentence="It connects in time.", check=_connects, needed=True),
    Rule(name="hello", sentence="Its first message is Hello with the right version.", check=_hello, needed=True),
    Rule(name="specs", sentence="Behavior ids can be read; one name has one spec.", check=_specs, needed=True),
    Rule(name="ping_waiting", sentence="It answers Ping while it waits for Reset.", check=_ping_waiting),
    Rule(name="heartbeat", sentence="It sends Ping when it has been silent.", check=_heartbeat),
    Rule(name="reset", sentence="It answers Reset with a Step.", check=_reset, needed=True),
    Rule(name="ping_deciding", sentence="It answers Ping while it waits for Act.", check=_ping_deciding),
    Rule(name="plays", sentence="It answers every Act with a Step, and episodes end.", check=_plays),
    Rule(name="parameters", sentence="It continues after an Act that changes parameters.", check=_parameters),
    Rule(name="reset_in_place", sentence="Reset in place of Act begins all episodes anew.", check=_resets_in_place),
    Rule(name="seed", sentence="The same seed shows the same first observations.", check=_seed),
    Rule(name="bye", sentence="It ends in order on Bye.", check=_bye),
    Rule(name="reconnects", sentence="It reconnects after a broken connection.", check=_reconnects),
    Rule(name="counts", sentence="It counts its steps as the trainer does.", check=_counted),
    Rule(name="fault", sentence="It ends the conversation on Fault.", check=_fault),
)

ALWAYS: Final = {
    "decoding": "Every message can be decoded.",
    "order": "Every message is allowed by the table of the conversation.",
}
"""Rules for every message; a message that breaks one ends its conversation."""


def _counts(first: FirstObservations) -> dict[str, int]:
    return {behavior: len(columns[0]) for behavior, columns in first.items()}
