"""What coordination does with what it hears: routes, books, permits and cuts, and what is on disk of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio

from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.coordination.route import LAST_EPISODES, Route, read_state
from sparring.pipeline.coordination.teaching import LessonPlan
from sparring.pipeline.coordination.tournament import Tournament
from sparring.pipeline.errors import Closed
from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.starts import comes_before, start_name
from sparring.pipeline.messages.state import (
    BehaviorSpecs,
    FlushRequest,
    FlushRequests,
    LearnerState,
    PolicyWeights,
    RunState,
    StepAllowance,
    StepAllowances,
    SteppingState,
)
from sparring.pipeline.monitoring.progress import ALL, SIMULATORS
from sparring.pipeline.queues.interface import Topic
from sparring.pipeline.specs import BehaviorSpec
from sparring.services.process.runtime import Context

STATE_FILE = "coordination.json"
_SAVE_INTERVAL_S = 0.05


class Coordination:
    """All routes, and what is published of them.

    Args:
        context: of the service.
        topic: of the service.
        routes: by behavior name.
        ghosts: self-play, if there is any.
        teaching: lessons of environment parameters, if there are any.
    """

    def __init__(
        self,
        context: Context,
        topic: Topic,
        routes: dict[str, Route],
        ghosts: Ghosts | None = None,
        teaching: LessonPlan | None = None,
    ) -> None:
        self._context = context
        self._topic = topic
        self.routes = routes
        self._ghosts = ghosts
        self.teaching = LessonPlan({}, {}, None) if teaching is None else teaching
        self._assigned = 0
        self._late = False
        self._unwritten = False
        self._specs: dict[str, BehaviorSpec] = {}
        self._sources: dict[str, str] = {}
        self._still_there: set[str] = set()  # stepping processes that have not said their last word
        self._last_words = anyio.Event()
        self._versions: dict[str, int] = {}
        self._said: dict[str, object] = {}
        self._path = context.run.directory / STATE_FILE

    # ---------------------------------------------------------------- what arrives

    async def route(self, route: Route) -> None:
        """Hands the segments of one behavior on, until its queue is closed."""
        progress, product = self._context.progress, f"segments/{route.name}"
        try:
            while True:
                progress.waits(product, product, "assembly")
                delivery = await route.receiver.receive()
                progress.works(product)
                segments = delivery.record
                self._count(route, segments)
                if route.name not in self._context.run.learners:  # a tournament: only results, and they are counted
                    delivery.acknowledge()
                    progress.passed(product, delivery.steps)
                    self.publish()
                    continue
                route.held.append(delivery)
                progress.waits(product, f"credit.updates/{route.name}", f"learning-{route.name}")
                await route.sender.put(segments, delivery.steps)
                progress.works(product)
                progress.passed(product, delivery.steps)
                self.publish()
        except Closed:
            return

    def stepping(self, latest: Mapping[str, Any]) -> None:
        """A stepping service says where it stands."""
        specs, state = latest.get("specs"), latest.get("state")
        if not (isinstance(state, SteppingState) and isinstance(specs, BehaviorSpecs)):
            return
        for behavior, spec in specs.behaviors.items():
            self._specs.setdefault(behavior, spec)
        name = start_name(state.source)
        former = self._sources.get(name)
        if former is not None and former != state.source:
            for route in self.routes.values():
                route.ledger.source_gone(former)
        self._sources[name] = state.source
        for behavior, produced in state.behaviors.items():
            if behavior in self.routes:  # else it gets a learner now, and we are started anew
                self.routes[behavior].ledger.stepped(state.source, produced)
        if self._ghosts is not None:
            self._ghosts.stepped(specs.teams, {name: route.ledger.ghosts for name, route in self.routes.items()})
        self._note_last_words(name, final=state.final)
        self.publish()

    def _note_last_words(self, name: str, *, final: bool) -> None:
        """Writes down at once what nobody will say again."""
        if not final:
            self._still_there.add(name)
        elif name in self._still_there:
            self._still_there.remove(name)
            try:
                self.save()
            except OSError as error:
                self._wait_for_room(error)
        if not self._still_there:
            self._last_words.set()

    def weights(self, latest: Mapping[str, Any]) -> None:
        """A learner under self-play has published weights."""
        weights = latest.get("weights")
        if isinstance(weights, PolicyWeights) and self._ghosts is not None:
            try:
                self._ghosts.weights(weights)
            except OSError as error:
                self._wait_for_room(error)
            self.publish()

    def learning(self, route: Route, latest: Mapping[str, Any]) -> None:
        """A learner says where it stands."""
        state = latest.get("state")
        if not isinstance(state, LearnerState) or state.start != route.sender.receiver:
            return  # what its earlier starts have taken is known for certain once its queue was heard of
        route.ledger.on_learner_state(state)
        unrecorded = route.ledger.unrecorded
        route.ledger.learner(state, route.ledger.taken_earlier)
        self._log_incidents(route)
        if unrecorded := route.ledger.unrecorded - unrecorded:
            self._context.log.warning("books_behind_weights", behavior=route.name, start=state.start, steps=unrecorded)
        route.done, route.latest = state.done, state.latest
        for line in self.teaching.learned(state, self.routes):
            self._context.log.info("lesson", **line, notice=True)
        self.publish()

    # ---------------------------------------------------------------- what is said

    def publish(self) -> None:
        """Publishes assignment and lessons, the permits and cuts that follow from the ledgers, and the run's end.

        Where the disk is full, what has to be on it first waits for `settle`.
        """
        try:
            self._publish()
        except OSError as error:
            self._wait_for_room(error)

    def _publish(self) -> None:
        self._assign()
        self.teaching.publish(self._topic, self.save)
        allowances: dict[str, dict[str, StepAllowance]] = {source: {} for source in self._sources.values()}
        for name, route in self.routes.items():
            if route.ledger.next_flush():
                self._context.registry.add(f"cuts/{name}")
            if self._ghosts is not None and not self._ghosts.knows(name, route.ledger.version):
                continue  # who plays with these weights is not decided yet
            for source, allowance in route.ledger.allowances().items():
                if source in allowances:
                    allowances[source][name] = replace(allowance, assignment=self._assigned, lessons=self.teaching.told)
        for source, granted in allowances.items():
            said = tuple(
                (name, one.serial, one.version, one.assignment, one.lessons) for name, one in sorted(granted.items())
            )
            if self._said.get(source) != said:
                self._said[source] = said
                self._topic.publish(
                    f"allowances:{start_name(source)}", StepAllowances(source=source, behaviors=granted)
                )
        if self._said.get("cuts", {}) != self._flushes:
            self.save()  # a later start must not give the serial to another cut
            self.publish_flushes()
        general = (len(self._specs), self.finished)
        if self._said.get("run") != general:
            self._said["run"] = general
            self._topic.publish("run", self.state())

    def _assign(self) -> None:
        """Publishes a new assignment, once it is on disk and the weights that it names are published."""
        assignment = None if self._ghosts is None else self._ghosts.rules.assignment
        if self._ghosts is None or assignment is None or assignment.serial == self._assigned:
            return
        self.save()
        self._ghosts.publish()
        self._topic.publish("assignment", assignment)
        self._assigned = assignment.serial
        self._context.log.info("assigned", serial=assignment.serial, **self._ghosts.described())

    @property
    def finished(self) -> bool:
        """Whether every learner has reached its end, or the tournament is over."""
        if self._ghosts is not None and isinstance(self._ghosts.rules, Tournament):
            return self._late or self._ghosts.rules.complete
        added = self._context.run.added
        waited_for = [route for name, route in self.routes.items() if name not in added or route.ledger.produced]
        return bool(waited_for) and all(route.done for route in waited_for)

    def give_up(self, limit_s: float) -> None:
        """Ends the run without the matches that are missing."""
        if not self.finished:
            self._context.log.error("too_late", seconds=limit_s, notice=True)
            self._late = True
            self.publish()

    def publish_flushes(self) -> None:
        """Publishes the latest cut of each behavior."""
        self._said["cuts"] = latest = self._flushes
        self._topic.publish("cuts", FlushRequests(behaviors=latest))

    @property
    def _flushes(self) -> dict[str, FlushRequest]:
        return {name: route.ledger.flush for name, route in self.routes.items() if route.ledger.flush.serial}

    def state(self) -> RunState:
        """The run as it stands."""
        routes = self.routes
        return RunState(
            start=self._context.start,
            finished=self.finished,
            specs=dict(self._specs),
            step_counts={name: route.ledger.step_counts() for name, route in routes.items()},
            routed={name: route.steps for name, route in routes.items()},
            versions={name: route.ledger.version for name, route in routes.items()},
            reward_mean_last100={
                name: route.reward_mean for name, route in routes.items() if route.reward_mean is not None
            },
            episodes={name: route.episodes for name, route in routes.items()},
            ratings={} if self._ghosts is None else self._ghosts.ratings(),
            heard=self._heard(),
        )

    def _heard(self) -> dict[str, str]:
        known = {name: route.ledger.known_incarnations for name, route in self.routes.items()}
        assembly = [one for one, _ in known.values() if one]
        first = next((one for one in assembly if not any(comes_before(other, one) for other in assembly)), "")
        learners = {f"learning-{name}": learner for name, (_, learner) in known.items()}
        return {name: start for name, start in (self._sources | learners | {"assembly": first}).items() if start}

    def refresh(self) -> None:
        """Brings gauges and the state of the run up to date."""
        self._topic.publish("run", self.state())
        registry = self._context.registry
        for name, route in self.routes.items():
            for gauge, value in (*route.gauges(), *self.teaching.gauges(name)):
                registry.gauge(gauge, value)
            self._context.note_receiver(f"segments:{name}", route.receiver)
            self._context.note_sender(f"updates:{name}", route.sender)
            self._note_waits(name, route.ledger)
        if not self.routes:
            self._context.progress.waits(ALL, "the first simulator", SIMULATORS, who="outside")
        if self._ghosts is not None:
            for gauge, value in self._ghosts.gauges():
                registry.gauge(gauge, value)

    def _note_waits(self, name: str, ledger: StepLedger) -> None:
        """Says whose turn it is where stepping waits for a permit, or a learner for a spec."""
        progress, stepping = self._context.progress, self._context.run.stepping
        if ledger.in_flight >= ledger.budget:
            progress.waits(f"allowances/{name}", f"weights/{name}", f"learning-{name}")
        else:
            progress.works(f"allowances/{name}")
        if name in self._specs:
            progress.works(f"specs/{name}")
        else:
            progress.waits(f"specs/{name}", f"steps/{name}", *stepping, said=f"the first simulator with {name}")

    # ---------------------------------------------------------------- on disk

    async def settle(self) -> None:
        """Writes the books and acknowledges what they hold, whenever a learner has acknowledged."""
        while True:
            if self._unwritten or any(route.releasable for route in self.routes.values()):
                await self._context.writing.until_done(self._settle, "the books")
            await anyio.sleep(_SAVE_INTERVAL_S)

    async def _settle(self) -> None:
        self.save()
        if self._unwritten:
            self._unwritten = False
            self.publish()

    def _wait_for_room(self, error: OSError) -> None:
        """Something could not be written: it is by `settle`, and what waits for that is published then."""
        self._unwritten = True
        self._context.writing.failed(error, "the state of coordination")

    async def hear_all(self) -> None:
        """Waits for the last word of stepping, which may be slow to come: without it steps would be in no place."""
        with anyio.move_on_after(self._context.run.settings.pipeline.stop_timeout_s / 4):
            if self._still_there:
                self._last_words = anyio.Event()
                await self._last_words.wait()

    async def end(self) -> None:
        """Holds what is queued, writes the books a last time, and publishes how all stands.

        Raises:
            NoRoom: the books could not be written.
        """
        for route in self.routes.values():
            route.empty()
            route.ledger.mark_lost(route.latest, over=True)
            self._log_incidents(route)
        limit_s = self._context.run.settings.pipeline.stop_timeout_s / 2
        try:
            await self._context.writing.until_done(self._settle, "the books", limit_s)
        finally:
            self.refresh()
            self.publish()

    def save(self) -> None:
        """Writes the books, then acknowledges to assembly what the learners have acknowledged.

        Raises:
            OSError: the disk is full or the folder cannot be written; nothing is acknowledged.
        """
        counts = {name: route.releasable for name, route in self.routes.items()}
        state = {
            "behaviors": {name: route.to_plain() for name, route in self.routes.items()},
            "self_play": None if self._ghosts is None else self._ghosts.keep(),
            "lessons": self.teaching.to_plain(),
        }
        write_atomically(self._path, json.dumps(state).encode(), durable=False)
        for name, count in counts.items():
            self.routes[name].release(count)

    def restore(self) -> None:
        """Goes on from what an earlier start has written, if there is anything.

        Raises:
            ServiceError: a loss of power or another hand has spoilt the file.
        """
        plain = read_state(self._path)
        if plain is None:
            return
        if self._ghosts is not None and plain["self_play"] is not None:
            self._ghosts.restore(plain["self_play"])
        self.teaching.restore(plain.get("lessons"))  # newer than the file may be
        for name, saved in plain["behaviors"].items():
            if name in self.routes:
                self.routes[name].restore(saved)
        self._context.log.info("books_restored", behaviors=sorted(plain["behaviors"]))

    def close_former_run(self) -> None:
        """A resumed run starts without the steps that its former processes held."""
        for route in self.routes.values():
            ledger = route.ledger
            for source in ledger.sources:
                ledger.source_closed(source)
            ledger.on_all_delivered()
            self._log_incidents(route)

    # ---------------------------------------------------------------- inside

    def _count(self, route: Route, segments: Segments) -> None:
        ledger = route.ledger
        for known in [known for known in ledger.sources if comes_before(known, segments.source)]:
            ledger.source_closed(known)  # nothing of an earlier start comes after the first of a later one
        new = ledger.is_new(segments)
        ledger.routed(segments)
        self._log_incidents(route)
        if not new:
            return
        if self._ghosts is not None and segments.results is not None:
            for learner, score in self._ghosts.results(segments.source, route.name, segments.results):
                self._context.registry.observe_mean("Self-play/Win Rate", score, behavior=learner)
        self._context.registry.add(f"routed_steps/{route.name}", len(segments.log_probs))
        self.teaching.count(segments)
        returns = segments.episodes.returns
        route.last_returns.extend(returns[-LAST_EPISODES:].tolist())
        route.episodes += len(returns)

    def _log_incidents(self, route: Route) -> None:
        for incident in route.ledger.take_new_incidents():
            self._context.log.warning(
                "steps_lost",
                behavior=route.name,
                stage=incident.stage,
                start=incident.start,
                steps=incident.steps,
                cause=incident.cause,
            )
