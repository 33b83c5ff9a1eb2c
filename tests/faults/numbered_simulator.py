"""A simulator whose decisions have numbers that no other process of the run uses: `python -m ... FOLDER PAUSE_S`."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation import run
from tests.world.world_game import NumberedGame, Rules

EACH = 2**19
"""Most numbers of one process: those of 32 processes stay below 2**24, up to which float32 is exact."""


class SlowGame(NumberedGame):
    """A numbered game that takes its time for each step."""

    pause_s = 0.0

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        time.sleep(self.pause_s)
        return super().step(actions)


def numbers(folder: Path) -> Iterator[int]:
    """Yields the numbers of a range that this process claims with a file."""
    for place in itertools.count():
        try:
            (folder / f"numbers-{place}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return iter(range(place * EACH + 1, (place + 1) * EACH))
    raise AssertionError


def main() -> None:
    folder, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    rules = Rules(behavior_ids=("Chaos",), areas=8, members=1, groups="", contests=False, ends=0.02)
    game = SlowGame(rules, random.Random(folder.name), numbers(folder).__next__)
    game.pause_s = pause_s
    result = run(game, connect_timeout_s=300.0)
    sys.stderr.write(json.dumps({"steps": dict(result.steps)}) + "\n")


if __name__ == "__main__":
    main()
