"""Trains one behavior in one process from data of an exact lag: stepping, assembly, self-play and learner, no services.

Iteration i collects one buffer with version v_i and trains on the buffer of iteration i - lag. The buffers wait in a
queue, as in a pipeline whose learner is always `lag` updates behind; the first `lag` iterations train nothing.
`max_policy_lag` has no effect: nothing is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import yaml

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.games.registry import make
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.losses import UpdateReport
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment, one_by_one
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Step
from sparring.pipeline.messages.state import PolicyWeights, StepAllowance
from sparring.pipeline.settings.load import parse_settings
from sparring.pipeline.settings.model import BehaviorSettings
from sparring.pipeline.simulation.game import Game
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.policies import Policies
from sparring.pipeline.stepping.stepper import Stepper

ROOT: Final = Path(__file__).parents[2]
UNLIMITED: Final = 2**40


@dataclass(frozen=True)
class Experiment:
    """The configuration of a run.

    Attributes:
        config: name of a file in configs/.
        behavior: changes to the settings of its behavior.
        simulator: changes to its simulator: name, areas, options.
        name: of the behavior, where it is another than the file's.
    """

    config: str
    behavior: Mapping[str, Any] = field(default_factory=dict)
    simulator: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def settings(self, hyperparameters: Mapping[str, Any]) -> tuple[str, BehaviorSettings]:
        """Returns name and settings of the behavior."""
        (name, behavior), *_ = self._document()["behaviors"].items()
        name = self.name or name
        changed = merged(merged(behavior, self.behavior), {"hyperparameters": hyperparameters})
        text = yaml.safe_dump({"behaviors": {name: changed}})
        return name, parse_settings(text, self.config).settings.behaviors[name]

    def game(self) -> Game:
        """Makes the simulator."""
        simulator = merged(self._document()["simulators"][0], self.simulator)
        areas = simulator.get("areas", 1) * simulator.get("count", 1)
        return make(simulator["name"], areas, **simulator.get("options", {}))

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load((ROOT / "configs" / f"{self.config}.yaml").read_text())
        return document


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with `changes`, merged key by key at every depth."""
    both = dict(base)
    for key, value in changes.items():
        both[key] = merged(both.get(key) or {}, value) if isinstance(value, Mapping) else value
    return both


@dataclass(frozen=True)
class Iteration:
    """One buffer of steps.

    Attributes:
        produced: learning steps collected up to its end.
        trained: steps that the version which acted was trained on.
        rewards: [e] return of each episode that ended in it (of its group under `poca`).
        report: of the update that followed; None while the first `lag` buffers are collected.
        weights: with which the steps were acted.
    """

    produced: int
    trained: int
    rewards: np.ndarray[Any, np.dtype[np.float32]]
    report: UpdateReport | None
    weights: PolicyWeights


class Match:
    """The simulator, and the policies that act in it."""

    def __init__(self, name: str, settings: BehaviorSettings, game: Game, seed: int) -> None:
        self.name = name
        self.policies = Policies({name: settings}, seed)
        played = {name} if settings.self_play is not None else set()
        self.stepper = Stepper(self.policies.current, lockstep=True, self_play=played, ghosts=self.policies.ghosts)
        self._game = game
        self._actions: Mapping[str, BehaviorActions] = {}
        self._reports = game.reset({}, seed)  # a player of Unity knows its behaviors from then on
        self._frame = 0
        self._serial = 0
        self.waiting = False
        self.stepper.connect(0, 0, game.behaviors())
        self.spec = self.stepper.behaviors[name].spec

    def act_with(self, weights: PolicyWeights) -> None:
        """Gives the learning team newer weights."""
        self.policies.learn(weights)
        self.policies.build(self.name, self.spec)

    def assign(self, assignment: MatchupAssignment, weights: Mapping[tuple[str, int], PolicyWeights]) -> None:
        """Sets the matchups of matches that begin from now on."""
        for matchup in assignment.matchups:
            for behavior_id, number in matchup.ghosts.items():
                self.policies.hold(self.spec, weights[BehaviorId.parse(behavior_id).name, number])
        self.stepper.matches.assignment = assignment

    def allow(self, steps: int) -> None:
        """Allows the learning team at least so many further steps, after which its simulator waits."""
        self._serial += 1
        allowance = self.stepper.state()[self.name].steps + steps
        self.stepper.grant(self.name, StepAllowance(serial=self._serial, steps=allowance))

    def step(self) -> bool:
        """Plays one frame, or chooses the actions that the simulator waits for; returns whether it can continue."""
        if not self.waiting:
            if self._frame:
                self._reports = self._game.step(self._actions)
            self.stepper.receive(0, Step(sequence=self._frame, reports=tuple(self._reports)), float(self._frame))
            self._frame += 1
        wake = self.stepper.tick(float(self._frame))
        self.waiting = not wake.acts
        for _, answer, _, _ in wake.acts:
            assert isinstance(answer, Act)
            self._actions = {one.behavior: one for one in answer.actions}
        return not self.waiting

    def close(self) -> None:
        """Ends the simulator."""
        self._game.close()


class ExactLag:
    """One run.

    Args:
        experiment: its configuration.
        seed: of simulator, weights and sampling.
        lag: updates between the version that acted and the version that is trained on the same steps.
        hyperparameters: changes to those of the file.
    """

    def __init__(self, experiment: Experiment, seed: int, lag: int, hyperparameters: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self.name, self.settings = experiment.settings(hyperparameters)
        self.match = Match(self.name, self.settings, experiment.game(), seed)
        self.learner = Learner(self.name, self.match.spec, self.settings, seed)
        self._lag = lag
        hyper = self.settings.hyperparameters
        sizes = Sizes(
            horizon=self.settings.time_horizon,
            message_steps=hyper.buffer_size,
            largest=UNLIMITED,
            sequence=self.settings.network_settings.sequence_length,
        )
        in_groups = self.settings.trainer_type == "poca"
        self._assembler = Assembler("stepping-0.1", "assembly.1", lambda _: sizes, in_groups=lambda _: in_groups)
        self._queue: deque[list[Segments]] = deque()
        self._trained = {1: 0}
        self._rules: SelfPlay | None = None
        self._known: dict[tuple[str, int], PolicyWeights] = {}
        if self.settings.self_play is not None:
            self._rules = SelfPlay(seed=seed, places=4, lockstep=True)
            self._rules.add(self.name, self.settings.self_play, UNLIMITED, ())
            self._rules.set_teams(self.name, self.match.stepper.teams[self.name])
        self._publish()

    def iterations(self) -> Iterator[Iteration]:
        """Runs until `max_steps` are trained."""
        produced, number = 0, 0
        while self.learner.trained < self.settings.max_steps:
            weights, number = self.learner.weights(), number + 1
            trained = self.learner.trained
            segments = self._collect(number)
            produced += sum(len(one.rewards) for one in segments)
            self._queue.append(segments)
            report = self._train(self._queue.popleft()) if len(self._queue) > self._lag else None
            rewards = [self._returns(one) for one in segments]
            yield Iteration(produced, trained, np.concatenate(rewards), report, weights)

    def _returns(self, one: Segments) -> np.ndarray[Any, np.dtype[np.float32]]:
        return one.episodes.group_returns + 0.0 if self.settings.trainer_type == "poca" else one.episodes.returns

    def _collect(self, number: int) -> list[Segments]:
        """Collects one buffer, with all segments closed."""
        found: list[Segments] = []
        self.match.allow(self.settings.hyperparameters.buffer_size)
        while self.match.step():
            found += self._assemble()
        found += self._assemble()
        found += self._assembler.flush(self.name, number)
        return [one for one in found if len(one.rewards) or len(one.episodes.returns)]

    def _assemble(self) -> list[Segments]:
        stepper = self.match.stepper
        parts = stepper.take_steps()
        if self._rules is not None:
            self._rules.ghosts(self.name, stepper.behaviors[self.name].ghosts)
            for results in stepper.matches.take("stepping-0.1"):
                for _ in self._rules.results(results):
                    pass
        self._assembler.apply(parts)
        return list(self._assembler.ready_messages())

    def _train(self, segments: list[Segments]) -> UpdateReport | None:
        for one in segments:
            if len(one.rewards):
                self.learner.add(one)
        report = self.learner.update(everything=True)
        self._publish()
        return report

    def _publish(self) -> None:
        weights = self.learner.weights()
        self.match.act_with(weights)
        if self._rules is None:
            return
        self._known[self.name, weights.version] = weights
        self._rules.weights(self.name, weights.version, self.learner.trained)
        self._known = {key: one for key, one in self._known.items() if key in self._rules.wanted or one is weights}
        if self._rules.assignment is not None:
            self.match.assign(self._rules.assignment, self._known)


def points(experiment: Experiment, own: PolicyWeights, other: PolicyWeights, matches: int, seed: int) -> float:
    """Returns the points per match of a policy against another, from both sides; a draw counts half.

    Args:
        experiment: the game.
        own: the policy that is judged.
        other: its fixed opponent.
        matches: least number of matches from each side.
        seed: of the simulators and of both policies' actions.
    """
    won: list[float] = []
    for side in (0, 1):
        (name, settings), game = experiment.settings({}), experiment.game()
        match = Match(name, settings, game, seed + side)
        match.act_with(own)
        match.allow(UNLIMITED)
        ghosts = {behavior_id: 1 for behavior_id in game.behaviors() if BehaviorId.parse(behavior_id).team != side}
        assignment = MatchupAssignment(serial=1, matchups=(Matchup(number=1, team=side, ghosts=ghosts),))
        match.assign(assignment, {(name, 1): replace(other, version=1)})
        found: list[float] = []
        while len(found) < matches:
            match.step()
            match.stepper.take_steps()
            for results in match.stepper.matches.take("stepping-0.1"):
                found += [_points(one.scores, side) for one in one_by_one(results) if one.behavior_ids]
        won += found
    return float(np.mean(won))


def _points(scores: Mapping[str, float], side: int) -> float:
    """Returns the points of a side; in a match of several teams, the mean over its rivals."""
    own = next(score for behavior_id, score in scores.items() if BehaviorId.parse(behavior_id).team == side)
    rivals = [
        score for behavior_id, score in scores.items() if BehaviorId.parse(behavior_id).team != side and score >= 0
    ]
    return float(np.mean([0.5 + 0.5 * ((own > one) - (own < one)) for one in rivals])) if rivals else own
