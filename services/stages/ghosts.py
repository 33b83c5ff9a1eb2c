"""Self-play and tournaments of a run, as its settings ask for them."""

from __future__ import annotations

from sparring.pipeline.coordination.ghosts import Ghosts, load_external
from sparring.pipeline.coordination.opponents import ExternalOpponent, opponents_of
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.tournament import Tournament
from sparring.services.process.runtime import Context

_LEAST_PLACES = 4
_MOST_PLACES = 16


async def open_ghosts(context: Context) -> Ghosts | None:
    """Opens self-play, if any behavior uses it, or the tournament that the run plays."""
    names, settings, playing = context.run.self_play, context.run.settings, context.run.playing
    if not names:
        return None
    topic = await context.transport.publisher("ghosts")
    directory = context.run.directory
    if playing is not None:
        tournament = Tournament(names, playing.players, playing.matches, mirror=playing.mirror)
        players = [ExternalOpponent(label, 1.0) for label in playing.players]
        return Ghosts(tournament, directory, load_external(directory, dict.fromkeys(names, players)), topic)
    behaviors = {name: settings.behaviors[name] for name in names}
    others = opponents_of(directory)
    rules = SelfPlay(
        {name: one.self_play for name, one in behaviors.items() if one.self_play is not None},
        {name: one.max_steps for name, one in behaviors.items()},
        seed=context.run.seed,
        places=min(_MOST_PLACES, max(_LEAST_PLACES, sum(context.run.simulators.values()))),
        lockstep=settings.overlap == 0,
        external=others,
    )
    return Ghosts(rules, directory, load_external(directory, others), topic)
