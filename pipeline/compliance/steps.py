"""Checks a simulator's Steps rule by rule, in order and without I/O.

What one Step must hold is checked by the same functions as in a run; this module adds what only several Steps show.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from sparring.pipeline.errors import ExplainedError, RemoteProtocolError
from sparring.pipeline.messages.simulator import Decisions, Ends, Step
from sparring.pipeline.simulation.counting import StepCounter
from sparring.pipeline.specs import BehaviorSpec
from sparring.pipeline.stepping.connections import check_step
from sparring.pipeline.stepping.validation import check_report, check_unique

Status = Literal["PASS", "FAIL", "WARN", "SKIP"]

LONGEST_SILENCE: Final = 500
"""Steps after which an agent that decided and was not reported again breaks the rule."""

STEP_RULES: Final = {
    "behaviors": "A Step reports introduced behavior ids, each once.",
    "columns": "All columns have one row per agent, and the spec's width.",
    "masks": "Masks have a column per choice and leave a choice in each branch.",
    "sequence": "Steps count from 0 on each connection.",
    "observations": "Observations have the spec's order, shapes and dtypes.",
    "finite": "Observations, rewards and continuous actions are numbers from -1e18 to 1e18.",
    "ids": "An agent is at most once in decisions and once in ends.",
    "first_step": "The first Step after Reset has decisions and no ends.",
    "ends": "Only agents end that have decided in this episode.",
    "groups": "Group ids are from 0 to 2^31 - 1.",
    "matches": "An agent stays in one match for an episode.",
    "outcomes": "Outcomes are 0 to 1 and one for a team in a match.",
    "silence": "An agent that decided is reported again.",
}
"""The rules about Steps, with their sentences."""

_RULE_OF_CODE: Final = {
    "unknown_behavior": "behaviors",
    "duplicate_behavior": "behaviors",
    "dtype": "observations",
    "not_finite": "finite",
    "duplicate_agent": "ids",
    "group": "groups",
}
"""Rules that have another name than the code with which a run rejects the Step; `shape` is of several rules."""


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
        """Checks one Step against all rules; returns False if a run would reject it."""
        rejections = list(self._rejections(step))
        for error in rejections:
            self.findings.setdefault(_rule_of(error), explained(error))
        if rejections:
            return False
        for rule, check in _OVER_STEPS.items():
            if (finding := next(check(self, step), None)) is not None:
                self.findings.setdefault(rule, finding)
        self._follow(step)
        return True

    def _rejections(self, step: Step) -> Iterator[RemoteProtocolError]:
        """Yields the errors with which a run would reject a Step: the first one of each check."""
        checks: list[Callable[[], None]] = [partial(check_step, step, self.sequence, self.specs)]
        if step.sequence != self.sequence:  # which hides wrong behavior ids
            checks.append(partial(check_step, step, step.sequence, self.specs))
        known = [report for report in step.reports if report.behavior in self.specs]
        checks += [partial(check_report, report, self.specs[report.behavior]) for report in known]
        checks += [partial(check_unique, behavior, part, rows.agents) for behavior, part, rows in _parts(step)]
        for check in checks:
            try:
                check()
            except RemoteProtocolError as error:
                yield error

    def _follow(self, step: Step) -> None:
        self.counter.count_report(step.reports)
        for behavior, part, rows in _parts(step):
            matches = _matches(rows)
            self.ended += len(rows.agents) if part == "ends" else 0
            for agent in rows.agents.tolist():
                if part == "ends":
                    self.agent_episodes.pop((behavior, agent), None)
                else:
                    self.agent_episodes[behavior, agent] = AgentEpisode(self.steps, matches.get(agent))
        self.first = False
        self.sequence = step.sequence + 1
        self.steps += 1


def _rule_of(error: RemoteProtocolError) -> str:
    """Returns the rule that a rejected Step breaks."""
    if error.code != "shape":
        return _RULE_OF_CODE.get(error.code, error.code)
    return next((rule for rule in ("observations", "outcomes") if f".{rule}" in error.got), "columns")


def _first_step(watch: StepWatch, step: Step) -> Iterator[Finding]:
    if watch.first and not any(len(decisions.agents) for _, decisions in decisions_of(step)):
        yield failed("a first Step without decisions", "first decisions of all agents", "report them after Reset")
    if watch.first and any(len(ends.agents) for _, ends in _ends_of(step)):
        remedy = "discard the episodes before a Reset without ends"
        yield failed("ends in the first Step after Reset", "decisions only", remedy)


def _ends(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for behavior, ends in _ends_of(step):
        unknown = [agent for agent in ends.agents.tolist() if (behavior, agent) not in watch.agent_episodes]
        if unknown and not watch.first:
            got = f"an end of agent {unknown[0]} in {behavior}, which had no decision in this episode"
            yield failed(got, "ends of agents that decided", "report a decision first, or leave the end out")


def _contests(watch: StepWatch, step: Step) -> Iterator[Finding]:
    ended = {(behavior, agent) for behavior, ends in _ends_of(step) for agent in ends.agents.tolist()}
    for behavior, _, rows in _parts(step):
        for agent, match in _matches(rows).items():
            episode = watch.agent_episodes.get((behavior, agent))
            is_new = isinstance(rows, Decisions) and (behavior, agent) in ended
            if episode is not None and episode.match != match and not is_new:
                got = f"agent {agent} of {behavior} in match {match}, before in {episode.match}"
                yield failed(got, "one match for an episode", "change the match only with a new episode")


def _outcomes(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for behavior, ends in _ends_of(step):
        if ends.outcomes is None:
            continue
        outcomes = dict(zip(ends.agents.tolist(), ends.outcomes.tolist(), strict=True))
        by_match: dict[int, float] = {}
        for agent, match in _matches(ends).items():
            if by_match.setdefault(match, outcomes[agent]) != outcomes[agent]:
                got = f"outcomes {by_match[match]} and {outcomes[agent]} for {behavior} in match {match}"
                yield failed(
                    got, "one outcome for all agents of a team", "send the team's result on each of its agents"
                )


def _silence(watch: StepWatch, step: Step) -> Iterator[Finding]:
    reported = {(behavior, agent) for behavior, _, rows in _parts(step) for agent in rows.agents.tolist()}
    for (behavior, agent), episode in watch.agent_episodes.items():
        silent = watch.steps - episode.seen
        if silent > LONGEST_SILENCE and (behavior, agent) not in reported:
            got = f"agent {agent} of {behavior} not seen for {silent} Steps after its decision"
            yield warned(got, "its next decision or its end", "report an end when an agent leaves")


_OVER_STEPS: Final[dict[str, Callable[[StepWatch, Step], Iterator[Finding]]]] = {
    "first_step": _first_step,
    "ends": _ends,
    "matches": _contests,
    "outcomes": _outcomes,
    "silence": _silence,
}
"""The checks of rules that need the Steps before; each yields findings, of which the first counts."""


def decisions_of(step: Step) -> Iterator[tuple[str, Decisions]]:
    """Yields the decisions in a Step by behavior id."""
    return ((report.behavior, report.decisions) for report in step.reports if report.decisions is not None)


def _ends_of(step: Step) -> Iterator[tuple[str, Ends]]:
    """Yields the ends in a Step by behavior id."""
    return ((report.behavior, report.ends) for report in step.reports if report.ends is not None)


def _parts(step: Step) -> Iterator[tuple[str, str, Decisions | Ends]]:
    """Yields behavior id, "ends" or "decisions", and their rows: first all ends, because agents may decide again."""
    for behavior, ends in _ends_of(step):
        yield behavior, "ends", ends
    for behavior, decisions in decisions_of(step):
        yield behavior, "decisions", decisions


def _matches(rows: Decisions | Ends) -> dict[int, int]:
    """Returns the match of each agent, if reported."""
    return {} if rows.matches is None else dict(zip(rows.agents.tolist(), rows.matches.tolist(), strict=True))
