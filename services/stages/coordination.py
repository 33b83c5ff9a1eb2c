"""The process around coordination: routes segments, keeps books and budget.

consumes       Segments from "segments:NAME"; the state of stepping, of assembly and of the learners; under self-play
               PolicyWeights from the policy boards
produces       Segments on "updates:NAME"; permits, cuts, the assignment of opponents, the lessons of environment
               parameters and the state of the run on its board; the weights of ghosts on the board "ghosts"
waits for      segments; credit for updates while a learner is busy and its queue is full
unblocked by   the next segments, a learner's acknowledgement, a published update

A segment is acknowledged only after its learner has acknowledged it and the books that count it are
on disk, so a restart loses nothing.
"""

from __future__ import annotations

import anyio

from sparring.pipeline.coordination.ghosts import Ghosts, elsewhere
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.coordination.opponents import ExternalOpponent, opponents_of
from sparring.pipeline.coordination.route import Route, read_state
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.teaching import LessonPlan
from sparring.pipeline.coordination.tournament import Tournament
from sparring.pipeline.queues.interface import Subscription
from sparring.pipeline.settings.parameters import curricula
from sparring.services.process.runtime import Context, follow, publish_metrics, refuse_restart
from sparring.services.stages.coordinator import STATE_FILE, Coordination

_LEAST_PLACES = 4
_MOST_PLACES = 16


async def open_routes(context: Context) -> dict[str, Route]:
    """Opens the queues of all behaviors and their ledgers."""
    routes = {}
    settings = context.run.settings
    for name, behavior in settings.behaviors.items():
        receiver = await context.transport.receiver(
            f"segments:{name}", context.run.capacities[f"segments:{name}"], name
        )
        sender = await context.transport.sender(f"updates:{name}", name)
        ledger = StepLedger(
            buffer_size=behavior.hyperparameters.buffer_size,
            overlap=settings.overlap,
            processes=len(context.run.stepping),
        )
        routes[name] = Route(name, ledger, receiver, sender)
    return routes


async def open_ghosts(context: Context) -> Ghosts | None:
    """Self-play, if any behavior is under it, or the tournament that is asked for."""
    names, settings, playing = context.run.self_play, context.run.settings, context.run.playing
    if not names:
        return None
    topic = await context.transport.topic("ghosts")
    directory = context.run.directory
    if playing is not None:
        tournament = Tournament(names, playing.players, playing.matches, mirror=playing.mirror)
        players = [ExternalOpponent(label, 1.0) for label in playing.players]
        return Ghosts(tournament, directory, elsewhere(directory, dict.fromkeys(names, players)), topic)
    behaviors = {name: settings.behaviors[name] for name in names}
    others = opponents_of(directory)
    rules = SelfPlay(
        {name: one.self_play for name, one in behaviors.items() if one.self_play is not None},
        {name: one.max_steps for name, one in behaviors.items()},
        seed=context.run.seed,
        places=min(_MOST_PLACES, max(_LEAST_PLACES, sum(context.run.simulators.values()))),
        lockstep=settings.overlap == 0,
        elsewhere=others,
    )
    return Ghosts(rules, directory, elsewhere(directory, others), topic)


async def run(context: Context) -> None:
    """Coordinates until stopped; then writes the books."""
    topic = await context.transport.topic(context.service)
    playing = context.run.playing
    if playing is not None and playing.players:
        refuse_restart(context)
    ghosts = await open_ghosts(context)
    settings = context.run.settings
    max_steps = {name: behavior.max_steps for name, behavior in settings.behaviors.items()}
    teaching = LessonPlan(curricula(settings.environment_parameters), max_steps, ghosts)
    coordination = Coordination(context, topic, await open_routes(context), ghosts, teaching)
    if playing is not None:  # in the lessons that the run has come to whose checkpoints play
        teaching.restore((read_state(context.run.directory.parent / STATE_FILE) or {}).get("lessons"))
    coordination.restore()
    if context.run.resumed and context.first:
        coordination.close_former_run()
    coordination.publish_flushes()
    teaching.publish(topic, coordination.save)
    stepping = [await context.transport.subscribe(name) for name in context.run.stepping]
    learners = {name: await context.transport.subscribe(f"learning-{name}") for name in context.run.learners}
    async with anyio.create_task_group() as tasks:
        if playing is not None and playing.players:
            tasks.start_soon(_give_up, coordination, playing.timeout_s)
        for subscription in stepping:
            tasks.start_soon(follow, subscription, coordination.stepping)
        for name, subscription in learners.items():
            tasks.start_soon(_follow_learner, coordination, name, subscription)
        for name in context.run.self_play if playing is None else ():
            tasks.start_soon(follow, await context.transport.subscribe(f"policy-{name}"), coordination.weights)
        for route in coordination.routes.values():
            tasks.start_soon(coordination.route, route)
        tasks.start_soon(coordination.settle)
        tasks.start_soon(publish_metrics, context, topic, coordination.refresh)
        await context.stop.wait()
        await coordination.hear_all()
        tasks.cancel_scope.cancel()
    try:
        await coordination.end()
    finally:
        topic.publish("metrics", context.numbers())


async def _give_up(coordination: Coordination, limit_s: float) -> None:
    """Ends a tournament that takes too long."""
    await anyio.sleep(limit_s)
    coordination.give_up(limit_s)


async def _follow_learner(coordination: Coordination, name: str, subscription: Subscription) -> None:
    """Hears a learner from its board, and looks again when its queue, which may come later, was heard of."""
    route = coordination.routes[name]
    heard = anyio.Event()

    def hear(_starts: int) -> None:
        heard.set()

    async def look_again() -> None:
        nonlocal heard
        while True:
            await heard.wait()
            heard = anyio.Event()
            coordination.learning(route, subscription.latest)

    route.sender.on_receiver(hear)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look_again)
        await follow(subscription, lambda latest: coordination.learning(route, latest))
        tasks.cancel_scope.cancel()
