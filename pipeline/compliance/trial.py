"""Leads conversations with a simulator to the state that a rule checks."""

from __future__ import annotations

from typing import Final

import numpy as np

from sparring.pipeline.compliance.peer import ConversationStopped, SimulatorProcess, TrialConnection
from sparring.pipeline.compliance.steps import StepWatch, decisions_of, failed, skipped
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
from sparring.pipeline.specs import ActionSpec, Array

PARAMETER: Final = "compliance"
"""An environment parameter that no simulator knows, and that each must ignore."""
FIRST_SAMPLE: Final = 0.5
"""Its number where it has a sampler."""

FirstObservations = dict[tuple[str, str], Array]
"""Agent ids and observations of a first Step, sorted by agent, by behavior id and name of the column."""


class Trial:
    """Starts one simulator, and leads conversations to the state that a rule needs.

    Attributes:
        peer: the connection; None if there is none.
        hello: the simulator's last introduction.
        step: the last Step, which needs an answer.
        watch: results of its Steps so far.
        first: first observations after the first Reset.
        recount: steps that the simulator and this side counted when it reconnected; None if it did not.
    """

    def __init__(self, host: SimulatorProcess, *, episodes: int, timeout_s: float) -> None:
        self.host = host
        self.episodes = episodes
        self.timeout_s = timeout_s
        self.heartbeat_s = min(0.5, timeout_s / 4)
        self.peer: TrialConnection | None = None
        self.hello: Hello | None = None
        self.step: Step | None = None
        self.watch = StepWatch()
        self.first: FirstObservations = {}
        self.recount: tuple[dict[str, int], dict[str, int]] | None = None
        self._random = np.random.default_rng(0)

    def start(self) -> TrialConnection:
        """Starts a new process and returns its connection."""
        self.disconnect()
        self.host.start()
        self.watch.restarted()
        return self.accept()

    def accept(self) -> TrialConnection:
        """Returns the simulator's next connection."""
        try:
            connected = self.host.accept(self.timeout_s)
        except TimeoutError as error:
            status = self.host.exit_status(0.0)
            state = "it still runs" if status is None else f"it exited with status {status}"
            printed = self.host.output_tail() or "nothing"
            got = f"no connection in {self.timeout_s:g} s; {state}; it printed: {printed}"
            expected = "a connection to the address in SPARRING_ADDRESS or {address}"
            raise ConversationStopped(failed(got, expected, "connect a stream socket there at the start")) from error
        self.peer = TrialConnection(connected, self.timeout_s)
        return self.peer

    def greet(self) -> Hello:
        """Receives and returns Hello."""
        peer = self.peer or self.start()
        self.hello = peer.expect(Hello)
        self.watch.connected(self.hello.behaviors)
        return self.hello

    def welcomed(self) -> TrialConnection:
        """Returns the connection in the state that waits for Reset."""
        peer = self.peer or self.start()
        if peer.state == "greeting":
            self.greet()
        if peer.state == "introduced":
            times = {"heartbeat_s": self.heartbeat_s, "timeout_s": 3 * self.timeout_s}
            peer.send(Welcome(version=VERSION, connection=1, **times))
        return peer

    def deciding(self) -> TrialConnection:
        """Returns the connection with a Step that needs an answer."""
        peer = self.welcomed()
        if peer.state == "welcomed":
            self.reset(None)
        return peer

    def reset(self, seed: int | None, value: float | Sampler | None = None) -> Step:
        """Sends Reset and receives the first Step.

        Args:
            seed: seed in the Reset.
            value: value of `PARAMETER`, None to leave it out.
        """
        peer = self.welcomed()
        self.watch.reset()
        numbers, samplers = _numbers_and_samplers(value)
        peer.send(Reset(seed=seed, parameters=numbers, samplers=samplers))
        return self._next(peer)

    def act(self, value: float | Sampler | None = None) -> Step:
        """Answers the Step with random legal actions and receives the next one.

        Args:
            value: changed value of `PARAMETER`, as for `reset`.
        """
        peer = self.deciding()
        step = self.step
        assert step is not None
        actions = []
        for behavior, decisions in decisions_of(step):
            spec = self.watch.specs[behavior].actions
            actions.append(random_actions(behavior, decisions, spec, self._random))
            self.watch.counter.add_open(behavior, decisions.agents)
        numbers, samplers = _numbers_and_samplers(value)
        peer.send(Act(sequence=step.sequence, actions=tuple(actions), parameters=numbers, samplers=samplers))
        return self._next(peer)

    def disconnect(self) -> None:
        """Closes the connection."""
        if self.peer is not None:
            self.peer.drop()
            self.peer = None

    def _next(self, peer: TrialConnection) -> Step:
        message = peer.expect(Step, Behaviors)
        while isinstance(message, Behaviors):
            self.watch.specs.update(message.behaviors)
            message = peer.expect(Step, Behaviors)
        assert isinstance(message, Step)
        self.step = message
        if not self.watch.read(message):
            raise ConversationStopped(skipped("a Step that cannot be answered"))
        return message


def _numbers_and_samplers(value: float | Sampler | None) -> tuple[dict[str, float], dict[str, Sampler]]:
    """Returns the number and the sampler of `PARAMETER` by name, if it has them."""
    if isinstance(value, Sampler):
        return {PARAMETER: FIRST_SAMPLE}, {PARAMETER: value}
    return {} if value is None else {PARAMETER: value}, {}


def random_actions(
    behavior: str, decisions: Decisions, spec: ActionSpec, random: np.random.Generator
) -> BehaviorActions:
    """Returns uniformly random actions for the rows of `decisions`, none of them forbidden."""
    rows = len(decisions.agents)
    chances = random.random((rows, spec.mask_size))
    if decisions.masks is not None and decisions.masks.shape == chances.shape:
        chances[decisions.masks] = -1.0
    branches = np.split(chances, np.cumsum(spec.discrete, dtype=np.int64), axis=1)[:-1]
    discrete = np.zeros((rows, len(spec.discrete)), np.int32)
    for branch, chance in enumerate(branches):
        discrete[:, branch] = chance.argmax(axis=1)
    continuous = random.uniform(-1, 1, (rows, spec.continuous)).astype(np.float32)
    return BehaviorActions(behavior=behavior, agents=decisions.agents, continuous=continuous, discrete=discrete)


def first_observations(step: Step) -> FirstObservations:
    """Returns agent ids and observations of the decisions in a Step, sorted by agent."""
    first: FirstObservations = {}
    for behavior, decisions in decisions_of(step):
        order = np.argsort(decisions.agents)
        first[behavior, "agents"] = decisions.agents[order]
        first |= {(behavior, str(number)): column[order] for number, column in enumerate(decisions.observations)}
    return first
