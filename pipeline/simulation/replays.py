"""Records some matches of a game as frames to be drawn; `docs/page.md` describes the format for other simulators.

One match in a hundred is recorded, in the first area, and the files of a folder are thinned to a bounded number that
spans the whole training. A full disk ends the recording, and nothing else.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sparring.pipeline.errors import NOTICE
from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation.game import DrawnGame, ScoredGame
from sparring.pipeline.specs import BehaviorId

FOLDER_VARIABLE: Final = "SPARRING_REPLAYS"
"""Names the folder for replays to the simulator that is to record some."""
EVERY: Final = 100
"""Matches of all areas of which one is recorded."""
MOST_FILES: Final = 24
MOST_BYTES: Final = 2**18
"""Size of the frames of a match beyond which no more are recorded."""


def write_replay(
    folder: Path,
    scene: Mapping[str, Any],
    frames: Sequence[str],
    result: Mapping[str, float],
    time_s: float,
    most: int = MOST_FILES,
) -> None:
    """Writes `replay-MILLISECONDS.jsonl`: the scene, then a line for each frame.

    Where there are too many files, those nearest in time to their neighbors go; the first and the last remain.

    Args:
        folder: of the replays, which is made if necessary.
        scene: as `DrawnGame.scene` returns it.
        frames: positions of all moving shapes, as JSON.
        result: points of each team: 1 won, 0.5 drawn, 0 lost; empty where unknown.
        time_s: end of the match, in seconds since the epoch.
        most: number of files that remain, 2 at least.

    Raises:
        OSError: a file cannot be written or removed.
    """
    head = {"format": "sparring-replay", "version": 1, "time_s": time_s, "result": result, **scene}
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([json.dumps(head), *frames]) + "\n"
    write_atomically(folder / f"replay-{round(time_s * 1000):013d}.jsonl", text.encode(), durable=False)
    paths = sorted(folder.glob(f"replay-{'[0-9]' * 13}.jsonl"))
    while len(paths) > most:
        made = [int(path.stem.rpartition("-")[2]) for path in paths]
        at = min(range(1, len(paths) - 1), key=lambda one: made[one + 1] - made[one - 1])
        paths.pop(at).unlink(missing_ok=True)


class Recorder:
    """A Recorder follows the first area of a game, whose `step` and `on_end` it replaces.

    Args:
        game: that is played.
        folder: of the replays.
        every: matches of which one is recorded.
        clock: gives seconds since the epoch.
    """

    def __init__(
        self, game: DrawnGame, folder: Path, every: int = EVERY, clock: Callable[[], float] = time.time
    ) -> None:
        self._game = game
        self._folder = folder
        self._every = every
        self._clock = clock
        self._due = 0
        self._frames: list[str] | None = None
        self._finished: list[str] = []
        self._size = 0
        self._score = game.score if isinstance(game, ScoredGame) else None
        self._step = game.step
        game.step = self.step  # type: ignore[method-assign]
        game.on_end = self.on_end

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Plays on; records a frame, and the match where it has ended."""
        self._add()
        reports = self._step(actions)
        if self._finished:
            self._write(reports)
        return reports

    def on_end(self, areas: Sequence[int]) -> None:
        """Takes note of areas whose episodes have ended; the next match is recorded where one is due."""
        self._due -= len(areas)
        if 0 in areas:
            self._add()
            self._finished, self._frames, self._size = self._frames or [], None, 0
            if self._due < 0:
                self._frames, self._due = [], self._every

    def _add(self) -> None:
        if self._frames is not None and self._size < MOST_BYTES:
            frame: list[Any] = [[round(number, 3) for number in place] for place in self._game.frame()]
            if self._score is not None:
                frame.append({"score": list(self._score())})
            line = json.dumps(frame)
            self._frames.append(line)
            self._size += len(line)

    def _write(self, reports: Sequence[BehaviorReport]) -> None:
        """Writes the match; the first rows of the ends are those of the first area."""
        ended = [(report.behavior, report.ends.outcomes) for report in reports if report.ends is not None]
        result = {str(BehaviorId.parse(name).team): float(one[0]) for name, one in ended if one is not None}
        try:
            write_replay(self._folder, self._game.scene(), self._finished, result, self._clock())
        except OSError as error:
            sys.stderr.write(f"{NOTICE}no further matches are recorded: {error}\n")
            self._frames, self._due = None, sys.maxsize
        self._finished = []
