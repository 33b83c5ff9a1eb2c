"""The age of data: the ledger's arithmetic with a clock, simulators and a learner of given speeds."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import LearnerState
from tests.coordination.ledger_parts import produced

SOURCE, MAX_LAG = "stepping-0.5f3a-1", 3


@dataclass
class TimedPipeline:
    """One stepping process with one simulator, and one learner whose update takes one second.

    Everything else takes no time. Steps are reported every 32nd of a buffer, as the service does.
    """

    agents: int
    buffer_size: int
    horizon: int
    speed: float
    overlap: int
    rng: random.Random
    lags: list[list[int]] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    updates: int = 0
    dropped: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        self.ledger = StepLedger(least_update_steps=self.buffer_size, overlap=self.overlap)
        self.open: list[list[int]] = [[] for _ in range(self.agents)]
        self.closed: list[list[int]] = []
        self.buffer: deque[list[int]] = deque()
        self.buffered = self.produced = self.reported = self.trained = self.training = 0
        self.allowance = self.serial = 0
        self.version, self.now, self.ended_at = 1, 0.0, 0.0
        self.next_frame = self.ends_at = float("inf")
        # agents begin in the middle of their episodes, each at another step
        self.lengths = [self.rng.randrange(1, self.horizon + 1) for _ in range(self.agents)]

    def run(self, updates: int) -> None:
        """Runs until `updates` updates have ended."""
        self._report()
        while self.updates < updates:
            self.now = min(self.next_frame, self.ends_at)
            assert self.now < float("inf"), "neither simulator nor learner acts"
            if self.next_frame <= self.ends_at:
                self._frame()
            else:
                self._finish()
            self._begin()

    def _frame(self) -> None:
        """Completes a step of each agent that the present weights chose."""
        for agent, steps in enumerate(self.open):
            steps.append(self.version)
            if len(steps) == self.lengths[agent]:
                self.closed.append(steps)
                self.open[agent] = []
                self.lengths[agent] = self.horizon
        self.produced += self.agents
        if self.produced - self.reported >= self.buffer_size // 32 or self.produced >= self.allowance:
            self._report()
        if sum(map(len, self.closed)) >= self.buffer_size // 16:
            self._send()
        self.next_frame = float("inf")
        self._continue()

    def _continue(self) -> None:
        """Starts the next frame if none is computed and the allowance permits it."""
        if self.next_frame == float("inf") and self.allowance > self.produced:
            self.next_frame = self.now + self.agents / (self.speed * self.buffer_size)

    def _report(self) -> None:
        self.reported = self.produced
        self.ledger.on_produced(SOURCE, produced(self.produced, self.serial, self.allowance, self.agents))
        self._decide()

    def _decide(self) -> None:
        if self.ledger.next_flush():
            self.closed += [steps for steps in self.open if steps]
            self.open = [[] for _ in self.open]
            self._send()
        allowance = self.ledger.allowances()[SOURCE]
        self.serial, self.allowance = allowance.serial, allowance.steps
        self.peak = max(self.peak, self.produced - self.ledger.done)
        self._continue()

    def _send(self) -> None:
        steps = sum(map(len, self.closed))
        self.buffer += self.closed
        self.buffered += steps
        self.closed = []

    def _begin(self) -> None:
        if self.training or self.buffered < self.buffer_size:
            return
        self._drop_stale()
        if self.buffered < self.buffer_size:
            return
        self.lags.append([])
        self.idle.append(self.now - self.ended_at)
        while self.training < self.buffer_size:
            segment = self.buffer.popleft()
            missing = self.buffer_size - self.training
            if len(segment) > missing:
                self.buffer.appendleft(segment[missing:])
                segment = segment[:missing]
            self.lags[-1] += [self.version - version for version in segment]
            self.training += len(segment)
        self.buffered -= self.training
        self.ends_at = self.now + 1.0
        self._publish_state()

    def _drop_stale(self) -> None:
        kept: deque[list[int]] = deque()
        for segment in self.buffer:
            if max(segment) < self.version - MAX_LAG and self.buffered - len(segment) >= self.buffer_size:
                self.buffered -= len(segment)
                self.dropped += len(segment)
            else:
                kept.append(segment)
        self.buffer = kept

    def _finish(self) -> None:
        self.ended_at = self.now
        self.trained += self.training
        self.training = 0
        self.updates += 1
        self.version += 1
        self.ends_at = float("inf")
        self._publish_state()

    def _publish_state(self) -> None:
        self.ledger.on_learner_state(
            LearnerState(
                behavior="B",
                start="learning-B.5f3a-1",
                version=self.version,
                updates=self.updates,
                trained=self.trained,
                reached={SOURCE: self.trained + self.training + self.buffered + self.dropped},
                training=self.training,
                buffered=self.buffered,
                stale=self.dropped,
            )
        )
        self._decide()


@pytest.mark.parametrize("speed", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("agents", [12, 64, 256])
def test_data_are_one_version_old_and_the_learner_is_busy(agents: int, speed: float) -> None:
    """With buffer 12,000, horizon 1000 and overlap 1 the mean lag is at most 1.1, and no step is dropped."""
    timed = TimedPipeline(agents, 12_000, 1000, speed, 1, random.Random(agents))
    timed.run(10)
    lags = [lag for update in timed.lags[3:10] for lag in update]
    assert len(lags) == 7 * 12_000
    assert sum(lags) / len(lags) <= 1.1
    assert max(lags) <= 2
    assert max(timed.idle[3:]) <= 0.02
    assert timed.dropped == 0
    assert timed.peak < 24_000 + agents


@settings(max_examples=20, deadline=None)
@given(
    agents=st.integers(1, 300),
    buffer_size=st.sampled_from([64, 500, 3000]),
    horizon=st.sampled_from([1, 64, 1000]),
    speed=st.floats(0.5, 6),
    overlap=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**32),
)
def test_the_budget_bounds_the_steps_in_flight(
    agents: int, buffer_size: int, horizon: int, speed: float, overlap: int, seed: int
) -> None:
    """For up to several buffers of agents at most a frame exceeds the budget, and updates never stop."""
    timed = TimedPipeline(agents, buffer_size, horizon, speed, overlap, random.Random(seed))
    timed.run(6)
    assert timed.peak < (1 + overlap) * buffer_size + agents
    if agents <= buffer_size:
        assert max(map(max, timed.lags)) <= 1 + overlap
