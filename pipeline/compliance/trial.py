"""Leads conversations with a simulator to the state that a rule examines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.compliance.peer import ConversationStopped, SimulatorHost, TrialConnection
from sparring.pipeline.compliance.steps import StepWatch, failed, skipped
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    BehaviorActions,
    Behaviors,
    Decisions,
    Hello,
    Reset,
    Sampler,
    Step,
    Welcome,
)
from sparring.pipeline.specs import ActionSpec

FIRST_DRAW: Final = 0.5
"""What stands among the parameters for one with a sampler."""

FirstSight = dict[str, tuple[NDArray[Any], ...]]
"""By behavior id: agent ids and observations of a first Step, sorted by agent."""


class Trial:
    """The examination of one simulator: starts it, and leads conversations to where a rule needs them.

    Attributes:
        peer: the connection, None where there is none.
        hello: what the simulator introduced itself with last.
        step: the Step that waits for an answer.
        watch: what its Steps have shown so far.
        first: what agents saw first after the first Reset.
        recount: steps that the simulator and this side counted when it came back; None where it did not.
    """

    def __init__(self, host: SimulatorHost, *, episodes: int, timeout_s: float, clock: Callable[[], float]) -> None:
        self.host = host
        self.episodes = episodes
        self.timeout_s = timeout_s
        self.heartbeat_s = min(0.5, timeout_s / 4)
        self.peer: TrialConnection | None = None
        self.hello: Hello | None = None
        self.step: Step | None = None
        self.watch = StepWatch()
        self.first: FirstSight = {}
        self.recount: tuple[dict[str, int], dict[str, int]] | None = None
        self._clock = clock
        self._random = np.random.default_rng(0)

    def start(self) -> TrialConnection:
        """A new process and its connection."""
        self.lost()
        self.host.start()
        self.watch.restarted()
        return self.accept()

    def accept(self) -> TrialConnection:
        """The simulator's next connection."""
        try:
            connected = self.host.accept(self.timeout_s)
        except TimeoutError as error:
            status = self.host.exit_status(0.0)
            state = "it still runs" if status is None else f"it exited with status {status}"
            printed = self.host.last_words() or "nothing"
            raise ConversationStopped(
                failed(
                    f"no connection in {self.timeout_s:g} s; {state}; it printed: {printed}",
                    "a connection to the address in SPARRING_ADDRESS or {address}",
                    "connect a stream socket there at the start",
                )
            ) from error
        self.peer = TrialConnection(connected, self.timeout_s, self._clock)
        return self.peer

    def greet(self) -> Hello:
        """Receives Hello."""
        peer = self.peer or self.start()
        hello: Hello = peer.expect(Hello)
        self.hello = hello
        self.watch.connected(hello.behaviors)
        return hello

    def welcomed(self) -> TrialConnection:
        """A conversation that waits for Reset."""
        peer = self.peer or self.start()
        if peer.state == "greeting":
            self.greet()
        if peer.state == "introduced":
            peer.send(
                Welcome(version=VERSION, connection=1, heartbeat_s=self.heartbeat_s, timeout_s=3 * self.timeout_s)
            )
        return peer

    def deciding(self) -> TrialConnection:
        """A conversation in which a Step waits for an answer."""
        peer = self.welcomed()
        if peer.state == "welcomed":
            self.reset(None)
        return peer

    def reset(self, seed: int | None, parameters: Mapping[str, float | Sampler] | None = None) -> Step:
        """Sends Reset and receives the first Step.

        Args:
            seed: of it.
            parameters: of it: numbers, and samplers with `FIRST_DRAW`.
        """
        peer = self.welcomed()
        self.watch.reset()
        numbers, samplers = _told(parameters or {})
        peer.send(Reset(seed=seed, parameters=numbers, samplers=samplers))
        return self._next(peer)

    def act(self, parameters: Mapping[str, float | Sampler] | None = None) -> Step:
        """Answers the Step with random legal actions and receives the next one.

        Args:
            parameters: that are told to have changed, as for `reset`.
        """
        peer = self.deciding()
        step = self.step
        assert step is not None
        actions = []
        for report in step.reports:
            if report.decisions is not None:
                spec = self.watch.specs[report.behavior].actions
                actions.append(random_actions(report.behavior, report.decisions, spec, self._random))
                self.watch.acted.setdefault(report.behavior, set()).update(report.decisions.agents.tolist())
        numbers, samplers = _told(parameters or {})
        peer.send(Act(sequence=step.sequence, actions=tuple(actions), parameters=numbers, samplers=samplers))
        return self._next(peer)

    def lost(self) -> None:
        """Gives the connection up."""
        if self.peer is not None:
            self.peer.drop()
            self.peer = None

    def _next(self, peer: TrialConnection) -> Step:
        message = peer.expect(Step, Behaviors)
        while isinstance(message, Behaviors):
            self.watch.specs.update(message.behaviors)
            message = peer.expect(Step, Behaviors)
        step: Step = message
        self.step = step
        if not self.watch.read(step):
            raise ConversationStopped(skipped("a Step that cannot be answered"))
        return step


def _told(parameters: Mapping[str, float | Sampler]) -> tuple[dict[str, float], dict[str, Sampler]]:
    """A number for each, and the samplers."""
    samplers = {name: one for name, one in parameters.items() if isinstance(one, Sampler)}
    return {name: one if isinstance(one, float) else FIRST_DRAW for name, one in parameters.items()}, samplers


def random_actions(
    behavior: str, decisions: Decisions, spec: ActionSpec, random: np.random.Generator
) -> BehaviorActions:
    """Uniform actions for the rows of `decisions`, none of them forbidden."""
    rows = len(decisions.agents)
    chances = random.random((rows, spec.mask_size))
    if decisions.masks is not None and decisions.masks.shape == chances.shape:
        chances[decisions.masks] = -1.0
    discrete = np.zeros((rows, len(spec.discrete)), np.int32)
    at = 0
    for branch, size in enumerate(spec.discrete):
        discrete[:, branch] = chances[:, at : at + size].argmax(axis=1)
        at += size
    continuous = random.uniform(-1, 1, (rows, spec.continuous)).astype(np.float32)
    return BehaviorActions(behavior=behavior, agents=decisions.agents, continuous=continuous, discrete=discrete)


def first_sight(step: Step) -> FirstSight:
    """Agent ids and observations of the decisions in a Step, sorted by agent."""
    sight: FirstSight = {}
    for report in step.reports:
        if report.decisions is not None:
            order = np.argsort(report.decisions.agents)
            seen = (observation[order] for observation in report.decisions.observations)
            sight[report.behavior] = (report.decisions.agents[order], *seen)
    return sight
