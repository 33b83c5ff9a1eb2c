"""The step budget and the step accounting of one behavior: arithmetic without I/O.

One rule bounds how old the data can be (`docs/decisions/0003-freshness.md`):

    in flight = open + (allowed and not yet produced) <= (1 + overlap) x update_steps

and one rule keeps the learner from starving: once `update_steps` steps have been produced that no update has used or is
using, everything open is flushed. While an update runs, the budget is used up at that time: no further step can arrive
before the update ends, so an early flush changes no segment and delivers the data before the learner is idle.

Step accounting says where every step is. Each term is counted where it happens:

    produced = trained + ghost + stale + lost + open

    produced    by stepping; what died unreported with it: as the learner received it, or as simulators count it
    ghost       by stepping, for ghosts; by a learner that only plays, for learning agents
    trained, stale, and what assembly or an earlier learner lost    by the learner
    lost        also what a dead stepping produced and the learner never received
    open        what stepping produced and the learner has not received, and what it buffers or trains on
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from sparring.pipeline.messages import state as records
from sparring.pipeline.messages.incarnations import precedes, service_of

LAST_EPISODES: Final = 100
_NO_LEARNER: Final = records.LearnerState(behavior="", start="", version=0, updates=0, trained=0)
_SETTINGS: Final = (
    *("least_update_steps", "overlap", "processes", "max_steps"),
    *("added", "most_agents", "budget", "agent_steps"),
)


@dataclass(slots=True)
class SteppingSource:
    """The steps of one incarnation of stepping, for one behavior.

    Attributes:
        produced: steps of learning agents, by its own latest report.
        ghosts: steps of ghosts, likewise.
        serial: of its latest step allowance.
        allowance: cumulative steps allowed.
        agents: live agents.
        received: of them, the most that a learner has ever received, or that had been sent to it at the end.
        held: of them, those that assembly held when it ended in order; None before.
        alive: no later incarnation has taken its place.
        closed: nothing of it is under way any more.
    """

    produced: int = 0
    ghosts: int = 0
    serial: int = 0
    allowance: int = 0
    agents: int = 0
    received: int = 0
    held: int | None = None
    alive: bool = True
    closed: bool = False

    @property
    def total(self) -> int:
        """Steps of learning agents, as far as any stage knows of them."""
        return max(self.produced, self.received + (self.held or 0))

    @property
    def unused(self) -> int:
        """Steps allowed and not yet produced."""
        return max(0, self.allowance - self.total) if self.alive else 0


@dataclass(slots=True)
class EpisodeCounts:
    """The episodes of one behavior that have ended, over all incarnations of its learner.

    Attributes:
        episodes: number of them.
        last_returns: of the latest.
        start: incarnation of the learner that reported them last, and `reported` how many it did.
    """

    episodes: int = 0
    last_returns: list[float] = field(default_factory=list)
    start: str = ""
    reported: int = 0

    @property
    def reward_mean(self) -> float | None:
        """Mean return of the last episodes; None before the first."""
        return sum(self.last_returns) / len(self.last_returns) if self.last_returns else None

    def new(self, latest: records.EpisodeReturns) -> records.EpisodeReturns:
        """Counts what a learner reports, and returns the part of it that is new."""
        if latest.start != self.start:
            self.start, self.reported = latest.start, 0
        new = latest.episodes - self.reported
        self.reported = latest.episodes
        self.episodes += new
        fresh = slice(-new, None) if new else slice(0)
        returns, lessons = latest.returns[fresh], latest.lessons[fresh]
        self.last_returns = [*self.last_returns, *returns.tolist()][-LAST_EPISODES:]
        return replace(latest, returns=returns, lessons=lessons)


@dataclass(slots=True)
class StepLedger:
    """Counts the steps of one behavior and shares out its budget; it is saved as it is.

    Args:
        least_update_steps: an update waits for so many: `update_steps` of the trainer, the `buffer_size` of most.
        overlap: 1 lets one buffer be collected while another is trained, 0 is lockstep.
        processes: stepping processes that share the budget.
        max_steps: where the learner ends.
        added: only simulators have named the behavior; the run does not wait for it where it never steps.
        most_agents: of a stepping process.
        budget: most steps in flight; 0 for (1 + overlap) updates.
        agent_steps: an update has at least as many steps of each agent; 0 where their number does not matter.

    Attributes:
        sources: by incarnation of stepping.
        learner: latest state of the learner.
        version: highest that a learner has published.
        flush: the latest request.
        recovered: steps that simulators had reported to stepping services that died, and that these had not published.
        flushed_at: steps done or in training at the latest flush; -1 where the next buffer is flushed in any case.
        reported: losses by cause that have been logged.
        episodes: that have ended.
    """

    least_update_steps: int
    overlap: int
    processes: int = 1
    max_steps: int = 2**62
    added: bool = False
    most_agents: int = 2**16
    budget: int = 0
    agent_steps: int = 0
    sources: dict[str, SteppingSource] = field(default_factory=dict)
    learner: records.LearnerState = _NO_LEARNER
    version: int = 0
    flush: records.FlushRequest = field(default_factory=lambda: records.FlushRequest(serial=0, required_steps={}))
    recovered: int = 0
    flushed_at: int = -1
    reported: dict[str, int] = field(default_factory=dict)
    episodes: EpisodeCounts = field(default_factory=EpisodeCounts)

    # ---------------------------------------------------------------- where the steps are

    @property
    def update_steps(self) -> int:
        """Steps that an update waits for, with the agents of now."""
        return max(self.least_update_steps, self.agent_steps * self.agents)

    @property
    def limit(self) -> int:
        """Most steps in flight."""
        own = (1 + self.overlap) * self.update_steps
        return max(self.budget, own) if self.agent_steps else self.budget or own

    @property
    def ghosts(self) -> int:
        """Steps of ghosts so far, under self-play."""
        return sum(source.ghosts for source in self.sources.values())

    @property
    def agents(self) -> int:
        """Agents that are alive."""
        return sum(source.agents for source in self.sources.values() if source.alive)

    @property
    def produced(self) -> int:
        """Steps of learning agents so far."""
        return self.both_ends + sum(source.total for source in self.sources.values())

    @property
    def both_ends(self) -> int:
        """Steps that only simulators still know of: dead stepping services had not published them, or sent them on."""
        dead = [source for source in self.sources.values() if not source.alive]
        return max(0, self.recovered - sum(source.total - source.produced for source in dead))

    @property
    def losses(self) -> dict[str, int]:
        """Lost steps by cause: the stage whose death lost them, or `both_ends`."""
        found = Counter(self.learner.lost)
        found["both_ends"] = self.both_ends
        for name, source in self.sources.items():
            if source.closed:
                missing, reached = self._unreceived(name) - (source.held or 0), self.learner.reached.get(name, 0)
                forgotten = min(missing, max(0, source.received - reached))  # an earlier learner had received them
                found["learning"] += forgotten
                # Where assembly ended in order, what it had not received had not left stepping.
                found["assembly" if source.alive and source.held is None else "stepping"] += missing - forgotten
        return {cause: steps for cause, steps in found.items() if steps}

    @property
    def open(self) -> int:
        """Steps that are under way, buffered or in the update under way."""
        total = sum((one.held or 0) if one.closed else self._unreceived(name) for name, one in self.sources.items())
        return total + self.learner.buffered + self.learner.training

    @property
    def done(self) -> int:
        """Steps that are no longer in flight."""
        return self.learner.trained + self.learner.ghost + self.learner.stale + sum(self.losses.values())

    @property
    def in_flight(self) -> int:
        """Steps produced or allowed that no finished update has used."""
        return self.open + sum(source.unused for source in self.sources.values())

    def step_counts(self) -> records.StepCounts:
        """Returns where every produced step is.

        A ghost's step counts as produced and as ghost at once: it needs no budget and no segment carries it.
        """
        return records.StepCounts(
            produced=self.produced + self.ghosts,
            trained=self.learner.trained,
            ghost=self.learner.ghost + self.ghosts,
            stale=self.learner.stale,
            lost=sum(self.losses.values()),
            open=self.open,
        )

    # ---------------------------------------------------------------- what the stages report

    def on_produced(self, name: str, produced: records.ProducedSteps) -> None:
        """Takes over how far a source is, and what it keeps of its allowance."""
        source = self.sources.setdefault(name, SteppingSource(alive=False))
        if not source.alive and not source.closed:
            source.alive = True
            self.flushed_at = -1
        source.produced, source.ghosts, source.agents = produced.steps, produced.ghosts, produced.agents
        if produced.serial >= source.serial:
            source.serial, source.allowance = produced.serial, produced.allowance

    def recover(self, steps: int) -> None:
        """Adds steps that simulators had reported to stepping services that died, and that these had not published.

        More than two deaths can lose is no count but a mistake of a simulator, which `unaccounted` shows.
        """
        if steps <= 2 * (self.limit + self.most_agents):
            self.recovered += steps

    def replace(self, present: str) -> None:
        """Retires all other incarnations of a stepping service."""
        for name in self.sources:
            if name != present and service_of(name) == service_of(present):
                self.retire(name)
        self._close_passed()  # the learner may have heard of `present` first

    def retire(self, name: str) -> None:
        """Takes back the allowance of a source that died or was replaced; its steps may still arrive."""
        source = self.sources[name]
        if source.alive:
            source.alive = False
            self.flushed_at = -1  # a flush that waits for it may never be completed

    def on_learner_state(self, state: records.LearnerState) -> None:
        """Takes over the counts of the learner."""
        self.learner = state
        self.version = max(self.version, state.version)
        for name, steps in state.reached.items():
            source = self.sources.setdefault(name, SteppingSource(alive=False))
            source.received = max(source.received, steps)
        self._close_passed()

    def _close_passed(self) -> None:
        """Closes the sources of which nothing can arrive any more: the learner has received from a later one."""
        reached = self.learner.reached
        latest = {service_of(name): name for name in reached}
        for name, source in self.sources.items():
            newest = latest.get(service_of(name), "")
            passed = name in reached and name != newest
            if passed or name == records.EARLIER or (not source.alive and precedes(name, newest)):
                self.retire(name)
                source.closed = True

    def close(self, assembled: Mapping[str, records.AssembledSteps]) -> None:
        """Closes all sources: the run ends. What assembly holds stays open, and all else on its way is lost.

        Args:
            assembled: final counts of assembly, by source; none where it did not end in order.
        """
        for name, source in self.sources.items():
            if name in assembled:
                one = assembled[name]
                source.received, source.held = max(source.received, one.sent), one.open + one.closed
            source.closed = True

    def close_former_run(self) -> None:
        """Retires the sources of a run that is resumed: what was open at its end is lost.

        Its learner may have more steps to make than the one that ended: it says itself when it is done.
        """
        self.learner = replace(self.learner, done=False)
        for name, source in self.sources.items():
            self.retire(name)
            source.closed, source.held = True, None

    def _unreceived(self, name: str) -> int:
        return self.sources[name].total - self.learner.reached.get(name, 0)

    # ---------------------------------------------------------------- what follows

    def allowances(self) -> dict[str, records.StepAllowance]:
        """Shares out what the budget has left, and returns the allowance of each living source."""
        living = {name: source for name, source in self.sources.items() if source.alive}
        limit, update = self.limit, self.update_steps
        share = limit if self.processes == 1 else max(1, update // (2 * self.processes))
        for source in sorted(living.values(), key=lambda one: one.unused):
            room = limit - self.in_flight
            wanted = share - source.unused
            if (source.agents or not self.overlap) and room > 0 and 2 * wanted >= share:
                source.allowance = max(source.allowance, source.produced) + min(room, wanted)
                source.serial += 1
        # A flush is due once a whole buffer waits: with one source exactly at this number of its steps.
        missing = update - (self.open - self.learner.training)
        # An update makes new room; steps produced before its weights arrive would be older than necessary.
        return {
            name: records.StepAllowance(
                serial=source.serial,
                steps=source.allowance,
                version=self.version,
                report=source.produced + max(0, missing // len(living)),
            )
            for name, source in living.items()
        }

    def next_flush(self) -> bool:
        """Makes a new flush when a whole buffer waits and has not been flushed; returns whether it did.

        It flushes the same buffer once more where the learner stays idle though half a buffer was produced since: a
        crash then took some of the steps that wait, and no stage has noticed so far.
        """
        training = self.learner.training
        basis = self.done + training
        marks = {name: source.produced for name, source in self.sources.items() if source.alive}
        since = sum(steps - self.flush.required_steps.get(name, 0) for name, steps in marks.items())
        again = not training and 2 * since >= self.update_steps
        if self.open - training < self.update_steps or (basis == self.flushed_at and not again):
            return False
        self.flushed_at = basis
        self.flush = records.FlushRequest(serial=self.flush.serial + 1, required_steps=marks)
        return True

    def take_new_losses(self) -> dict[str, int]:
        """Returns the losses by cause since the last call.

        A restored learner counts as its own loss what an earlier incarnation may have counted to another cause.
        """
        now, former = self.losses, self.reported
        self.reported = now
        return {cause: steps - former.get(cause, 0) for cause, steps in now.items() if steps > former.get(cause, 0)}

    def continue_from(self, saved: Self) -> Self:
        """Returns the saved step accounting with the settings of this one."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return replace(saved, **settings)
