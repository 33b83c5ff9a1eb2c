"""Leads conversations with a simulator to the state that a rule checks."""

from typing import Final

import numpy as np

from sparring.pipeline.compliance.peer import ConversationStopped, SimulatorProcess, TrialConnection
from sparring.pipeline.compliance.steps import StepWatch, decisions_of, skipped
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    BehaviorActions,
    Behaviors,
    Decisions,
    Hello,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.specs import ActionSpec
from sparring.pipeline.stepping.connections import sort_by_agent
from sparring.pipeline.stepping.parameters import Update

PARAMETER: Final = "compliance"
"""An environment parameter that no simulator knows, and that each must ignore."""

NO_CHANGE: Final[Update] = {}, {}

FirstDecisions = dict[str, Decisions]
"""The decisions of a first Step by behavior id, sorted by agent."""


class Trial:
    """Starts one simulator, and leads conversations to the state that a rule needs.

    Attributes:
        peer: the connection; None if there is none.
        hello: the simulator's last introduction.
        step: the last Step, which needs an answer.
        watch: results of its Steps so far.
        first: first decisions after the first Reset.
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
        self.first: FirstDecisions = {}
        self.recount: tuple[dict[str, int], dict[str, int]] | None = None
        self._random = np.random.default_rng(0)

    def start(self) -> TrialConnection:
        """Starts a new process and returns its connection."""
        self.disconnect()
        self.host.start()
        self.watch.restarted()
        return self.accept()

    def accept(self) -> TrialConnection:
        """Returns the simulator's next connection. Raises as `SimulatorProcess.accept`."""
        self.peer = TrialConnection(self.host.accept(self.timeout_s), self.timeout_s)
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

    def reset(self, seed: int | None, change: Update = NO_CHANGE) -> Step:
        """Sends Reset and receives the first Step.

        Args:
            seed: seed in the Reset.
            change: environment parameters in the Reset.
        """
        peer = self.welcomed()
        self.watch.reset()
        parameters, samplers = change
        peer.send(Reset(seed=seed, parameters=parameters, samplers=samplers))
        return self._next(peer)

    def act(self, change: Update = NO_CHANGE) -> Step:
        """Answers the Step with random legal actions and receives the next one.

        Args:
            change: changed environment parameters.
        """
        peer = self.deciding()
        step = self.step
        assert step is not None
        actions = []
        for behavior, decisions in decisions_of(step):
            spec = self.watch.specs[behavior].actions
            actions.append(random_actions(behavior, decisions, spec, self._random))
            self.watch.counter.add_open(behavior, decisions.agents)
        numbers, samplers = change
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


def first_decisions(step: Step) -> FirstDecisions:
    """Returns the decisions in a Step, sorted by agent."""
    return {behavior: sort_by_agent(decisions)[0] for behavior, decisions in decisions_of(step)}
