"""Plays the trainer for a foreign simulator, and reports for each rule whether it keeps the protocol.

The rules of conduct are here in the order of play; those about Steps are in `steps.py`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from sparring.pipeline.compliance.peer import ConversationStopped, SilenceTimeout, SimulatorProcess, TrialConnection
from sparring.pipeline.compliance.steps import STEP_RULES, Finding, explained, failed, skipped, warned
from sparring.pipeline.compliance.trial import PARAMETER, FirstDecisions, Trial, first_decisions
from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import VERSION, Bye, Decisions, Fault, Ping, Pong, Sampler
from sparring.pipeline.specs import SpecError
from sparring.pipeline.stepping.connections import SimulatorConnection

SEED: Final = 1
MOST_STEPS: Final = 2000
"""Most Steps to play until episodes end."""
FEW_STEPS: Final = 3
"""Steps to count before the connection is closed."""
SAMPLED: Final = {PARAMETER: 0.5}, {PARAMETER: Sampler(kind="uniform", values=(0.25, 0.75), seed=1)}

ALWAYS: Final = {
    "decoding": "Every message can be decoded.",
    "order": "Every message is allowed by the table of the conversation.",
}
"""Rules for every message; a message that breaks one ends its conversation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Finding):
    """Holds the result of one rule, with its name and sentence."""

    rule: str
    sentence: str


def examine(host: SimulatorProcess, *, episodes: int, timeout_s: float) -> list[Verdict]:
    """Checks a simulator against every rule.

    Args:
        host: runs it.
        episodes: number of ended episodes to play for.
        timeout_s: limit for each answer of the simulator.

    Raises:
        OSError: it cannot be started.
    """
    trial = Trial(host, episodes=episodes, timeout_s=timeout_s)
    passed = Finding(status="PASS")
    findings: dict[str, Finding] = {}
    blocked = ""
    for name, (_, check) in RULES.items():
        if blocked:
            findings[name] = skipped(blocked)
            continue
        try:
            findings[name] = check(trial) or passed
        except ConversationStopped as stopped:
            trial.disconnect()
            if stopped.rule:
                findings.setdefault(stopped.rule, stopped.finding)
            findings[name] = skipped(f"rule {stopped.rule} was broken") if stopped.rule else stopped.finding
        if name in _NEEDED and findings[name].status != "PASS":
            blocked = f"rule {name} did not hold"
    trial.disconnect()
    received = passed if trial.hello else skipped("no message arrived")
    seen = passed if trial.watch.steps else skipped("no Step arrived")
    rows = [(name, sentence, findings[name]) for name, (sentence, _) in RULES.items()]
    rows += [(name, sentence, findings.get(name, received)) for name, sentence in ALWAYS.items()]
    rows += [(name, sentence, trial.watch.findings.get(name, seen)) for name, sentence in STEP_RULES.items()]
    return [Verdict(rule=name, sentence=sentence, **asdict(finding)) for name, sentence, finding in rows]


# ---------------------------------------------------------------- rules of conduct, in the order of play


def _connects(trial: Trial) -> None:
    trial.start()


def _hello(trial: Trial) -> Finding | None:
    version = trial.greet().version
    if version == VERSION:
        return None
    return failed(f"version {version}", f"{VERSION}", "speak the version of docs/protocol.md")


def _specs(trial: Trial) -> Finding | None:
    """Checks ids and names; the codec has rejected specs that no network can be built for."""
    try:
        SimulatorConnection(number=0).register(trial.watch.specs, {}, max_agents=1, of_run={})
    except (SpecError, RemoteProtocolError) as error:
        return explained(error)
    return None


def _answers_ping(peer: TrialConnection, number: int) -> Finding | None:
    peer.send(Ping(number=number))
    answer = peer.expect(Pong).number
    if answer == number:
        return None
    return failed(f"Pong {answer}", f"Pong {number}", "answer with the number of the Ping")


def _heartbeat(trial: Trial) -> Finding | None:
    try:
        trial.welcomed().expect(Ping)
    except SilenceTimeout:
        got, expected = f"no Ping in {trial.timeout_s:g} s", f"a Ping after {trial.heartbeat_s:g} s"
        return failed(got, expected, "send Ping when silent for Welcome.heartbeat_s")
    return None


def _reset(trial: Trial) -> None:
    trial.first = first_decisions(trial.reset(SEED))


def _plays(trial: Trial) -> Finding | None:
    trial.deciding()
    ends, steps = trial.watch.ended + trial.episodes, trial.watch.steps + MOST_STEPS
    while trial.watch.ended < ends:
        if trial.watch.steps >= steps:
            got = f"{trial.watch.ended} ended episodes in {MOST_STEPS} Steps"
            return warned(got, f"{ends}", "limit the length of episodes")
        trial.act()
    return None


def _parameters(trial: Trial) -> None:
    """Changes a parameter without a reset: a number, then a sampler, then a number again."""
    trial.deciding()
    for change in (({PARAMETER: 1.0}, {}), SAMPLED, ({PARAMETER: 2.0}, {})):
        trial.act(change)


def _resets_in_place(trial: Trial) -> Finding | None:
    trial.deciding()
    trial.act()
    again, first = _counts(first_decisions(trial.reset(SEED, SAMPLED))), _counts(trial.first)
    if again == first:
        return None
    expected = f"those of the first Reset, {first}"
    return warned(f"first decisions of {again}", expected, "begin new episodes for all agents at Reset")


def _counts(first: FirstDecisions) -> dict[str, int]:
    return {behavior: len(decisions.agents) for behavior, decisions in first.items()}


def _seed(trial: Trial) -> Finding | None:
    """Compares the first observations of two Resets with the same seed."""
    trial.deciding()
    again, first = first_decisions(trial.reset(SEED)), trial.first
    if again.keys() == first.keys() and all(_same(again[behavior], first[behavior]) for behavior in first):
        return None
    remedy = "seed the random source from Reset.seed; without it no run is reproducible"
    return warned("other first observations with the same seed", "the same", remedy)


def _same(one: Decisions, other: Decisions) -> bool:
    pairs = zip((one.agents, *one.observations), (other.agents, *other.observations), strict=True)
    return all(np.array_equal(column, twin) for column, twin in pairs)


def _bye(trial: Trial) -> Finding | None:
    if not _closes(trial, Bye(reason="the check is over")):
        return failed("an open connection after Bye", "a closed one", "close the connection and end")
    how = trial.host.ended(trial.timeout_s)
    if how is None:
        return warned("a process that keeps running", "its exit", "end after Bye")
    return failed(how, "exit status 0", "end in order after Bye") if how else None


def _closes(trial: Trial, last: Bye | Fault) -> bool:
    """Sends a last message, and returns whether the simulator then closes the connection."""
    peer = trial.deciding()
    peer.send(last)
    is_closed = peer.closes()
    trial.disconnect()
    return is_closed


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


def _counted(trial: Trial) -> Finding | None:
    if trial.recount is None:
        return skipped("it did not reconnect")
    theirs, ours = trial.recount
    if not theirs and ours:
        return skipped("Hello.steps is empty: it does not count")
    if {name: steps for name, steps in theirs.items() if steps} != ours:
        return failed(f"{theirs} after a new connection", f"{ours}", "count an outcome when its report is sent")
    return None


def _fault(trial: Trial) -> Finding | None:
    if _closes(trial, Fault(code="internal", got="a check", expected="an end", remedy="none: this is a test")):
        return None
    return failed("an open connection after Fault", "a closed one", "show the Fault and end")


RULES: Final[dict[str, tuple[str, Callable[[Trial], Finding | None]]]] = {
    "connects": ("It connects in time.", _connects),
    "hello": ("Its first message is Hello with the right version.", _hello),
    "specs": ("Behavior ids can be read; one name has one spec.", _specs),
    "ping_waiting": ("It answers Ping while it waits for Reset.", lambda trial: _answers_ping(trial.welcomed(), 1)),
    "heartbeat": ("It sends Ping when it has been silent.", _heartbeat),
    "reset": ("It answers Reset with a Step.", _reset),
    "ping_deciding": ("It answers Ping while it waits for Act.", lambda trial: _answers_ping(trial.deciding(), 2)),
    "plays": ("It answers every Act with a Step, and episodes end.", _plays),
    "parameters": ("It continues after an Act that changes parameters.", _parameters),
    "reset_in_place": ("Reset in place of Act begins all episodes anew.", _resets_in_place),
    "seed": ("The same seed shows the same first observations.", _seed),
    "bye": ("It ends in order on Bye.", _bye),
    "reconnects": ("It reconnects after a broken connection.", _reconnects),
    "counts": ("It counts its steps as the trainer does.", _counted),
    "fault": ("It ends the conversation on Fault.", _fault),
}
"""The rules of conduct in the order of play, by names for scripts: the sentence, and the check, which plays its part of
the conversation and returns None where the simulator keeps the rule."""

_NEEDED: Final = ("connects", "hello", "specs", "reset")
"""Rules without which nothing further can be checked."""
