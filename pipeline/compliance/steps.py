"""Checks a simulator's Steps rule by rule, in order and without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeVar

import numpy as np

from sparring.pipeline.errors import ExplainedError
from sparring.pipeline.messages.simulator import Decisions, Ends, Step
from sparring.pipeline.simulation.counting import StepCounter
from sparring.pipeline.specs import Array, BehaviorSpec

Status = Literal["PASS", "FAIL", "WARN", "SKIP"]
Check = TypeVar("Check")

LONGEST_SILENCE: Final = 500
"""Steps after which an agent that decided and was not reported again breaks the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Holds the result of a rule: `got` is the reason for SKIP, and all texts are empty for PASS."""

    status: Status
    got: str = ""
    expected: str = ""
    remedy: str = ""


def failed(got: str, expected: str, remedy: str) -> Finding:
    """Returns the finding of a broken rule."""
    return Finding(status="FAIL", got=got, expected=expected, remedy=remedy)


def explained(error: ExplainedError) -> Finding:
    """Returns the finding of a rule that is broken with an error."""
    return failed(error.got, error.expected, error.remedy)


def warned(got: str, expected: str, remedy: str) -> Finding:
    """Returns the finding of a rule that may be broken for a reason."""
    return Finding(status="WARN", got=got, expected=expected, remedy=remedy)


def skipped(reason: str) -> Finding:
    """Returns the finding of a rule that could not be checked."""
    return Finding(status="SKIP", got=reason)


@dataclass(frozen=True, slots=True)
class Rule(Generic[Check]):
    """Describes one rule.

    Attributes:
        name: short and stable, for scripts.
        sentence: the rule.
        check: finds out whether a simulator keeps it.
        needed: nothing further can be checked if this one is broken.
    """

    name: str
    sentence: str
    check: Check
    needed: bool


def add_rule(rules: list[Rule[Check]], name: str, sentence: str, *, needed: bool = False) -> Callable[[Check], Check]:
    """Returns a decorator that adds a rule with the decorated check to `rules`."""

    def add(check: Check) -> Check:
        rules.append(Rule(name, sentence, check, needed))
        return check

    return add


@dataclass(slots=True)
class AgentEpisode:
    """Tracks an agent from its first decision to its end.

    Attributes:
        seen: number of the last Step that reported the agent.
        match: id of its match; None if not reported.
    """

    seen: int
    match: int | None


@dataclass(slots=True)
class StepWatch:
    """Tracks the Steps of one simulator.

    Attributes:
        specs: specs by behavior id, as introduced on this connection.
        agent_episodes: running episodes by behavior id and agent id.
        counter: counts the completed steps since the process started.
        ended: ended episodes, since the process started.
        steps: Steps read in all.
        sequence: sequence number of the next Step.
        first: whether the next Step is the first after a Reset.
        findings: first finding of each broken rule.
    """

    specs: dict[str, BehaviorSpec] = field(default_factory=dict)
    agent_episodes: dict[tuple[str, int], AgentEpisode] = field(default_factory=dict)
    counter: StepCounter = field(default_factory=StepCounter)
    ended: int = 0
    steps: int = 0
    sequence: int = 0
    first: bool = True
    findings: dict[str, Finding] = field(default_factory=dict)

    def connected(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Handles a new Hello: Steps are counted from 0 again."""
        self.specs = dict(specs)
        self.sequence = 0

    def restarted(self) -> None:
        """Handles a new process: its counts begin at 0."""
        self.counter = StepCounter()

    def reset(self) -> None:
        """Handles a Reset: no episode is running."""
        self.first = True
        self.agent_episodes = {}
        self.counter.discard_open()

    def read(self, step: Step) -> bool:
        """Checks one Step against all rules; returns False if it cannot be answered."""
        for rule in STEP_RULES:
            finding = next(rule.check(self, step), None)
            if finding is not None:
                self.findings.setdefault(rule.name, finding)
                if rule.needed:
                    return False
        self._follow(step)
        return True

    def _follow(self, step: Step) -> None:
        self.counter.count_report(step.reports)
        for behavior, ends in _ends_of(step):
            self.ended += len(ends.agents)
            for agent in ends.agents.tolist():
                self.agent_episodes.pop((behavior, agent), None)
        for behavior, decisions in decisions_of(step):
            matches = _matches(decisions)
            for agent in decisions.agents.tolist():
                self.agent_episodes[behavior, agent] = AgentEpisode(self.steps, matches.get(agent))
        self.first = False
        self.sequence = step.sequence + 1
        self.steps += 1


STEP_RULES: Final[list[Rule[Callable[[StepWatch, Step], Iterator[Finding]]]]] = []
"""The rules about Steps, in the order of the checks: each yields findings against one Step; the first one counts."""


@add_rule(STEP_RULES, "behaviors", "A Step reports introduced behavior ids, each once.", needed=True)
def _behaviors(watch: StepWatch, step: Step) -> Iterator[Finding]:
    ids = [report.behavior for report in step.reports]
    if unknown := sorted(set(ids) - watch.specs.keys()):
        yield failed(f"a report of {unknown}", f"ids from {sorted(watch.specs)}", "name it in Hello, or send Behaviors")
    if len(set(ids)) < len(ids):
        yield failed(f"reports of {ids}", "each behavior id once", "put all agents of a behavior id into one report")


@add_rule(STEP_RULES, "columns", "All columns have one row per agent.", needed=True)
def _columns(watch: StepWatch, step: Step) -> Iterator[Finding]:
    names = ("groups", "rewards", "group_rewards", "matches", "masks", "interrupted", "outcomes")
    for _, where, rows in _parts(step):
        for name in names:
            column: Array | None = getattr(rows, name, None)
            if column is not None and len(column) != len(rows.agents):
                expected = f"{len(rows.agents)}, one per agent"
                yield failed(f"{len(column)} {name} in {where}", expected, "fill every column")


@add_rule(STEP_RULES, "masks", "Masks have a column per choice and leave a choice in each branch.")
def _masks(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for behavior, decisions in decisions_of(step):
        masks, spec = decisions.masks, watch.specs[behavior].actions
        if masks is None:
            continue
        if masks.shape[1] != spec.mask_size:
            got = f"masks with {masks.shape[1]} columns in {behavior}"
            expected = f"{spec.mask_size}, the choices of the branches {list(spec.discrete)}"
            yield failed(got, expected, "put the choices of all branches side by side")
            continue
        for branch, choices in enumerate(np.split(masks, np.cumsum(spec.discrete, dtype=np.int64), axis=1)[:-1]):
            if (stuck := choices.all(axis=1)).any():
                got = f"branch {branch} of agent {decisions.agents[stuck][0]} with every choice forbidden"
                expected = "at least one choice allowed (True = forbidden)"
                yield failed(got, expected, "allow a choice that does nothing")


@add_rule(STEP_RULES, "sequence", "Steps count from 0 on each connection.")
def _sequence(watch: StepWatch, step: Step) -> Iterator[Finding]:
    if step.sequence != watch.sequence:
        yield failed(f"sequence {step.sequence}", f"{watch.sequence}", "count the Steps of each connection from 0")


@add_rule(STEP_RULES, "observations", "Observations have the spec's order, shapes and dtypes.")
def _observations(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for behavior, where, rows in _parts(step):
        specs = watch.specs[behavior].observations
        if len(rows.observations) != len(specs):
            yield failed(f"{len(rows.observations)} observations in {where}", f"{len(specs)}", "send those of the spec")
            continue
        for spec, values in zip(specs, rows.observations, strict=True):
            wanted = (len(rows.agents), *spec.shape)
            if values.shape != wanted or values.dtype != np.dtype(spec.dtype):
                got = f"observation {spec.name!r} as {values.dtype}{list(values.shape)} in {where}"
                yield failed(got, f"{spec.dtype}{list(wanted)}", "send what the spec says, or correct the spec")


@add_rule(STEP_RULES, "finite", "Observations and rewards are finite.")
def _finite(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for _, where, rows in _parts(step):
        columns: dict[str, Array | None] = {"rewards": rows.rewards, "group_rewards": rows.group_rewards}
        columns |= {f"observation {index}": values for index, values in enumerate(rows.observations)}
        for name, values in columns.items():
            if values is not None and not np.isfinite(values).all():
                row = int(np.argwhere(~np.isfinite(values))[0][0])
                got = f"NaN or infinity in {name} of agent {rows.agents[row]} in {where}"
                yield failed(got, "finite numbers", "find the division by zero or the uninitialized value")


@add_rule(STEP_RULES, "ids", "An agent is at most once in decisions and once in ends.")
def _ids_once(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for _, where, rows in _parts(step):
        ids, counts = np.unique(rows.agents, return_counts=True)
        if (counts > 1).any():
            got = f"agent {ids[counts > 1][0]} twice in {where}"
            yield failed(got, "each agent once", "give every agent of a behavior id an id of its own")


@add_rule(STEP_RULES, "first_step", "The first Step after Reset has decisions and no ends.")
def _first_step(watch: StepWatch, step: Step) -> Iterator[Finding]:
    if watch.first and not any(len(decisions.agents) for _, decisions in decisions_of(step)):
        yield failed("a first Step without decisions", "first decisions of all agents", "report them after Reset")
    if watch.first and any(len(ends.agents) for _, ends in _ends_of(step)):
        remedy = "discard the episodes before a Reset without ends"
        yield failed("ends in the first Step after Reset", "decisions only", remedy)


@add_rule(STEP_RULES, "ends", "Only agents end that have decided in this episode.")
def _ends(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for behavior, ends in _ends_of(step):
        unknown = [agent for agent in ends.agents.tolist() if (behavior, agent) not in watch.agent_episodes]
        if unknown and not watch.first:
            got = f"an end of agent {unknown[0]} in {behavior}, which had no decision in this episode"
            yield failed(got, "ends of agents that decided", "report a decision first, or leave the end out")


@add_rule(STEP_RULES, "groups", "Group ids are from 0 to 2^31 - 1.")
def _groups(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for behavior, decisions in decisions_of(step):
        groups = decisions.groups
        if groups is not None and ((groups < 0) | (groups >= 2**31)).any():
            got = f"group ids {groups.tolist()} in the decisions of {behavior}"[:200]
            yield failed(got, "0 to 2^31 - 1", "number groups from 1")


@add_rule(STEP_RULES, "matches", "An agent stays in one match for an episode.")
def _contests(watch: StepWatch, step: Step) -> Iterator[Finding]:
    ended = {(behavior, agent) for behavior, ends in _ends_of(step) for agent in ends.agents.tolist()}
    for behavior, _, rows in _parts(step):
        for agent, match in _matches(rows).items():
            episode = watch.agent_episodes.get((behavior, agent))
            is_new = isinstance(rows, Decisions) and (behavior, agent) in ended
            if episode is not None and episode.match != match and not is_new:
                got = f"agent {agent} of {behavior} in match {match}, before in {episode.match}"
                yield failed(got, "one match for an episode", "change the match only with a new episode")


@add_rule(STEP_RULES, "outcomes", "Outcomes are 0 to 1 and one for a team in a match.")
def _outcomes(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for behavior, ends in _ends_of(step):
        if ends.outcomes is None:
            continue
        outcomes = dict(zip(ends.agents.tolist(), ends.outcomes.tolist(), strict=True))
        if not all(0 <= outcome <= 1 for outcome in outcomes.values()):
            got = f"outcomes {ends.outcomes.tolist()}"[:200]
            yield failed(got, "1 won, 0.5 drawn, 0 lost", "send a number from 0 to 1")
        by_match: dict[int, float] = {}
        for agent, match in _matches(ends).items():
            if by_match.setdefault(match, outcomes[agent]) != outcomes[agent]:
                got = f"outcomes {by_match[match]} and {outcomes[agent]} for {behavior} in match {match}"
                yield failed(
                    got, "one outcome for all agents of a team", "send the team's result on each of its agents"
                )


@add_rule(STEP_RULES, "silence", "An agent that decided is reported again.")
def _silence(watch: StepWatch, step: Step) -> Iterator[Finding]:
    reported = {(behavior, agent) for behavior, _, rows in _parts(step) for agent in rows.agents.tolist()}
    for (behavior, agent), episode in watch.agent_episodes.items():
        silent = watch.steps - episode.seen
        if silent > LONGEST_SILENCE and (behavior, agent) not in reported:
            got = f"agent {agent} of {behavior} not seen for {silent} Steps after its decision"
            yield warned(got, "its next decision or its end", "report an end when an agent leaves")


def decisions_of(step: Step) -> Iterator[tuple[str, Decisions]]:
    """Yields the decisions in a Step by behavior id."""
    return ((report.behavior, report.decisions) for report in step.reports if report.decisions is not None)


def _ends_of(step: Step) -> Iterator[tuple[str, Ends]]:
    """Yields the ends in a Step by behavior id."""
    return ((report.behavior, report.ends) for report in step.reports if report.ends is not None)


def _parts(step: Step) -> Iterator[tuple[str, str, Decisions | Ends]]:
    """Yields behavior id, name for a reader, and rows of the decisions and ends in a Step."""
    for behavior, decisions in decisions_of(step):
        yield behavior, f"the decisions of {behavior}", decisions
    for behavior, ends in _ends_of(step):
        yield behavior, f"the ends of {behavior}", ends


def _matches(rows: Decisions | Ends) -> dict[int, int]:
    """Returns the match of each agent, if reported."""
    return {} if rows.matches is None else dict(zip(rows.agents.tolist(), rows.matches.tolist(), strict=True))
