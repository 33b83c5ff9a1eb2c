"""Checks a simulator's Steps rule by rule, in order and without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.specs import BehaviorId, BehaviorSpec

Status = Literal["PASS", "FAIL", "WARN", "SKIP"]

LONGEST_SILENCE: Final = 500
"""Steps after which an agent that decided and was not reported again breaks the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Holds the result of a rule: `got` is the reason for SKIP, and all texts are empty for PASS."""

    status: Status
    got: str = ""
    expected: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRule:
    """Describes one rule about Steps.

    Attributes:
        name: short and stable, for scripts.
        sentence: the rule.
        check: yields findings against one Step; the first one counts.
        essential: a Step that breaks it cannot be answered.
    """

    name: str
    sentence: str
    check: Callable[[StepWatch, Step], Iterator[Finding]]
    essential: bool = False


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
        acted: agents with an action and no outcome yet, by behavior id.
        counted: completed steps by behavior name, since the process started.
        ended: ended episodes, since the process started.
        steps: Steps read in all.
        sequence: sequence number of the next Step.
        first: whether the next Step is the first after a Reset.
        findings: first finding of each broken rule.
    """

    specs: dict[str, BehaviorSpec] = field(default_factory=dict)
    agent_episodes: dict[str, dict[int, AgentEpisode]] = field(default_factory=dict)
    acted: dict[str, set[int]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
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
        self.counted = {}

    def reset(self) -> None:
        """Handles a Reset: no episode is running."""
        self.first = True
        self.agent_episodes = {}
        self.acted = {}

    def read(self, step: Step) -> bool:
        """Checks one Step against all rules; returns False if it cannot be answered."""
        for rule in STEP_RULES:
            finding = next(rule.check(self, step), None)
            if finding is not None:
                self.findings.setdefault(rule.name, finding)
                if rule.essential:
                    return False
        self._follow(step)
        return True

    def _follow(self, step: Step) -> None:
        for report in step.reports:
            agent_episodes = self.agent_episodes.setdefault(report.behavior, {})
            acted = self.acted.get(report.behavior, set())
            name = BehaviorId.parse(report.behavior).name
            ended = [] if report.ends is None else report.ends.agents.tolist()
            deciding = [] if report.decisions is None else report.decisions.agents.tolist()
            self.counted[name] = self.counted.get(name, 0) + len(acted & {*ended, *deciding})
            acted -= {*ended, *deciding}
            self.ended += len(ended)
            for agent in ended:
                agent_episodes.pop(agent, None)
            matches = _matches(report.decisions)
            for agent in deciding:
                agent_episodes[agent] = AgentEpisode(self.steps, matches.get(agent))
        self.first = False
        self.sequence = step.sequence + 1
        self.steps += 1


def _sequence(watch: StepWatch, step: Step) -> Iterator[Finding]:
    if step.sequence != watch.sequence:
        yield failed(f"sequence {step.sequence}", f"{watch.sequence}", "count the Steps of each connection from 0")


def _behaviors(watch: StepWatch, step: Step) -> Iterator[Finding]:
    ids = [report.behavior for report in step.reports]
    if unknown := sorted(set(ids) - watch.specs.keys()):
        yield failed(f"a report of {unknown}", f"ids from {sorted(watch.specs)}", "name it in Hello, or send Behaviors")
    if len(set(ids)) < len(ids):
        yield failed(f"reports of {ids}", "each behavior id once", "put all agents of a behavior id into one report")


def _columns(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for where, rows in _parts(step):
        n = len(rows.agents)
        columns: dict[str, Any] = {
            name: getattr(rows, name, None)
            for name in ("groups", "rewards", "group_rewards", "matches", "masks", "interrupted", "outcomes")
        }
        for name, column in columns.items():
            if column is not None and len(column) != n:
                yield failed(f"{len(column)} {name} in {where}", f"{n}, one per agent", "fill every column")


def _observations(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for report in step.reports:
        specs = watch.specs[report.behavior].observations
        for where, rows in _parts_of(report):
            if len(rows.observations) != len(specs):
                yield failed(
                    f"{len(rows.observations)} observations in {where}", f"{len(specs)}", "send those of the spec"
                )
                continue
            for spec, values in zip(specs, rows.observations, strict=True):
                wanted = (len(rows.agents), *spec.shape)
                if values.shape != wanted or values.dtype != np.dtype(spec.dtype):
                    yield failed(
                        f"observation {spec.name!r} as {values.dtype}{list(values.shape)} in {where}",
                        f"{spec.dtype}{list(wanted)}",
                        "send what the spec says, or correct the spec",
                    )


def _finite(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for where, rows in _parts(step):
        columns: list[tuple[str, Any]] = [("rewards", rows.rewards)]
        columns += [] if rows.group_rewards is None else [("group_rewards", rows.group_rewards)]
        columns += [(f"observation {index}", values) for index, values in enumerate(rows.observations)]
        for name, values in columns:
            if values.dtype != np.uint8 and not np.isfinite(values).all():
                row = int(np.argwhere(~np.isfinite(values))[0][0])
                yield failed(
                    f"NaN or infinity in {name} of agent {rows.agents[row]} in {where}",
                    "finite numbers",
                    "find the division by zero or the uninitialized value",
                )


def _ids_once(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for where, rows in _parts(step):
        ids, counts = np.unique(rows.agents, return_counts=True)
        if (counts > 1).any():
            yield failed(
                f"agent {ids[counts > 1][0]} twice in {where}",
                "each agent once",
                "give every agent of a behavior id an id of its own",
            )


def _first_step(watch: StepWatch, step: Step) -> Iterator[Finding]:
    if not watch.first:
        return
    if not any(report.decisions is not None and len(report.decisions.agents) for report in step.reports):
        yield failed("a first Step without decisions", "first decisions of all agents", "report them after Reset")
    if any(report.ends is not None and len(report.ends.agents) for report in step.reports):
        yield failed(
            "ends in the first Step after Reset", "decisions only", "discard the episodes before a Reset without ends"
        )


def _ends(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for report in step.reports:
        if report.ends is None or watch.first:
            continue
        if unknown := [
            agent for agent in report.ends.agents.tolist() if agent not in watch.agent_episodes.get(report.behavior, {})
        ]:
            yield failed(
                f"an end of agent {unknown[0]} in {report.behavior}, which had no decision in this episode",
                "ends of agents that decided",
                "report a decision first, or leave the end out",
            )


def _masks(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for report in step.reports:
        if report.decisions is None or report.decisions.masks is None:
            continue
        spec = watch.specs[report.behavior].actions
        masks = report.decisions.masks
        if masks.shape[1] != spec.mask_size:
            yield failed(
                f"masks with {masks.shape[1]} columns in {report.behavior}",
                f"{spec.mask_size}, the choices of the branches {list(spec.discrete)}",
                "put the choices of all branches side by side",
            )
            continue
        at = 0
        for branch, size in enumerate(spec.discrete):
            if (stuck := masks[:, at : at + size].all(axis=1)).any():
                yield failed(
                    f"branch {branch} of agent {report.decisions.agents[stuck][0]} with every choice forbidden",
                    "at least one choice allowed (True = forbidden)",
                    "allow a choice that does nothing",
                )
            at += size


def _groups(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for report in step.reports:
        groups = None if report.decisions is None else report.decisions.groups
        if groups is not None and bool(((groups < 0) | (groups >= 2**31)).any()):
            yield failed(
                f"group ids {groups.tolist()} in the decisions of {report.behavior}"[:200],
                "0 to 2^31 - 1",
                "number groups from 1",
            )


def _contests(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for report in step.reports:
        agent_episodes = watch.agent_episodes.get(report.behavior, {})
        ended = set() if report.ends is None else set(report.ends.agents.tolist())
        parts = [(report.ends, set[int]()), (report.decisions, ended)]
        for rows, anew in parts:
            for agent, match in _matches(rows).items():
                episode = agent_episodes.get(agent)
                if agent not in anew and episode is not None and episode.match != match:
                    yield failed(
                        f"agent {agent} of {report.behavior} in match {match}, before in {episode.match}",
                        "one match for an episode",
                        "change the match only with a new episode",
                    )


def _outcomes(watch: StepWatch, step: Step) -> Iterator[Finding]:
    for report in step.reports:
        if report.ends is None or report.ends.outcomes is None:
            continue
        outcomes = report.ends.outcomes
        if not ((outcomes >= 0) & (outcomes <= 1)).all():
            yield failed(f"outcomes {outcomes.tolist()}"[:200], "1 won, 0.5 drawn, 0 lost", "send a number from 0 to 1")
        by_match: dict[int | None, float] = {}
        matches = _matches(report.ends)
        for agent, outcome in zip(report.ends.agents.tolist(), outcomes.tolist(), strict=True):
            match = matches.get(agent)
            if match is not None and by_match.setdefault(match, outcome) != outcome:
                yield failed(
                    f"outcomes {by_match[match]} and {outcome} for {report.behavior} in match {match}",
                    "one outcome for all agents of a team",
                    "send the team's result on each of its agents",
                )


def _silence(watch: StepWatch, step: Step) -> Iterator[Finding]:
    reported = {report.behavior: _agents(report) for report in step.reports}
    for behavior, agent_episodes in watch.agent_episodes.items():
        for agent, episode in agent_episodes.items():
            if watch.steps - episode.seen > LONGEST_SILENCE and agent not in reported.get(behavior, ()):
                silent = watch.steps - episode.seen
                yield Finding(
                    status="WARN",
                    got=f"agent {agent} of {behavior} not seen for {silent} Steps after its decision",
                    expected="its next decision or its end",
                    remedy="report an end when an agent leaves",
                )


STEP_RULES: Final = (
    StepRule(
        name="behaviors",
        sentence="A Step reports introduced behavior ids, each once.",
        check=_behaviors,
        essential=True,
    ),
    StepRule(name="columns", sentence="All columns have one row per agent.", check=_columns, essential=True),
    StepRule(name="masks", sentence="Masks have a column per choice and leave a choice in each branch.", check=_masks),
    StepRule(name="sequence", sentence="Steps count from 0 on each connection.", check=_sequence),
    StepRule(
        name="observations", sentence="Observations have the spec's order, shapes and dtypes.", check=_observations
    ),
    StepRule(name="finite", sentence="Observations and rewards are finite.", check=_finite),
    StepRule(name="ids", sentence="An agent is at most once in decisions and once in ends.", check=_ids_once),
    StepRule(name="first_step", sentence="The first Step after Reset has decisions and no ends.", check=_first_step),
    StepRule(name="ends", sentence="Only agents end that have decided in this episode.", check=_ends),
    StepRule(name="groups", sentence="Group ids are from 0 to 2^31 - 1.", check=_groups),
    StepRule(name="matches", sentence="An agent stays in one match for an episode.", check=_contests),
    StepRule(name="outcomes", sentence="Outcomes are 0 to 1 and one for a team in a match.", check=_outcomes),
    StepRule(name="silence", sentence="An agent that decided is reported again.", check=_silence),
)


def failed(got: str, expected: str, remedy: str) -> Finding:
    """Returns the finding of a broken rule."""
    return Finding(status="FAIL", got=got, expected=expected, remedy=remedy)


def skipped(reason: str) -> Finding:
    """Returns the finding of a rule that could not be checked."""
    return Finding(status="SKIP", got=reason)


def _parts(step: Step) -> Iterator[tuple[str, Decisions | Ends]]:
    for report in step.reports:
        yield from _parts_of(report)


def _parts_of(report: BehaviorReport) -> Iterator[tuple[str, Decisions | Ends]]:
    if report.decisions is not None:
        yield f"the decisions of {report.behavior}", report.decisions
    if report.ends is not None:
        yield f"the ends of {report.behavior}", report.ends


def _matches(rows: Decisions | Ends | None) -> dict[int, int]:
    """Returns the match of each agent, if reported."""
    if rows is None or rows.matches is None:
        return {}
    return dict(zip(rows.agents.tolist(), rows.matches.tolist(), strict=True))


def _agents(report: BehaviorReport) -> set[int]:
    return {agent for _, rows in _parts_of(report) for agent in rows.agents.tolist()}
