"""Self-play and tournaments of a run, as its settings ask for them."""

from collections.abc import Iterable

from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.opponents import ExternalOpponent, opponents_of
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.tournament import Tournament
from sparring.services.process.runtime import Context, Run

_LEAST_PLACES = 4
_MOST_PLACES = 16


async def open_ghosts(context: Context) -> Ghosts | None:
    """Opens self-play without behaviors, if any uses it or may do so, or the tournament that the run plays."""
    run, playing = context.run, context.run.playing
    unnamed = run.settings.unnamed if run.grows else None
    if not run.self_play and (unnamed is None or unnamed.self_play is None):
        return None
    topic = await context.transport.publisher("ghosts")
    if playing is not None:
        tournament = Tournament(run.self_play, playing.players, playing.matches, mirror=playing.mirror)
        ghosts = Ghosts(tournament, run.directory, topic)
        for name in run.self_play:
            ghosts.load_external(name, [ExternalOpponent(label, 1.0) for label in playing.players])
        return ghosts
    rules = SelfPlay(
        seed=run.seed,
        places=min(_MOST_PLACES, max(_LEAST_PLACES, sum(run.simulators.values()))),
        lockstep=run.settings.overlap == 0,
    )
    return Ghosts(rules, run.directory, topic)


def add_sides(ghosts: Ghosts, run: Run, names: Iterable[str]) -> None:
    """Adds behaviors to self-play, those of `names` that use it."""
    opponents = opponents_of(run.directory)
    for name in names:
        behavior, external = run.behavior(name), opponents.get(name, ())
        if behavior.self_play is not None and isinstance(ghosts.rules, SelfPlay):
            ghosts.rules.add(name, behavior.self_play, behavior.max_steps, external)
            ghosts.load_external(name, external)
