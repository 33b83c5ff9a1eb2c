"""Python imports this at its start from the path that chaos runs set: a learner then writes which decisions it trains.

Each line of `$CHAOS_AUDIT` is one event, in order: an update with its version and the numbers of its decisions, or the
version of the checkpoint that a restarted learner continues from. An update is written before a checkpoint can hold it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.world.world_game import read


def _write(**event: Any) -> None:
    with Path(os.environ["CHAOS_AUDIT"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def _audit() -> None:
    from sparring.pipeline.learning.buffer import SegmentBuffer
    from sparring.pipeline.learning.learner import Learner

    take, update, restore, begin = SegmentBuffer.take, Learner.update, Learner.restore, Learner.__post_init__
    taken: list[Any] = []

    def taking(self: Any, *args: Any) -> Any:
        taken[:] = [take(self, *args)]
        return taken[0]

    def updating(self: Any, *args: Any, **named: Any) -> Any:
        report = update(self, *args, **named)
        _write(event="update", version=self.version, numbers=read(taken[0].observations[0])[0].tolist())
        return report

    def restoring(self: Any, checkpoint: Any) -> None:
        restore(self, checkpoint)
        _write(event="restore", version=checkpoint.version)

    def beginning(self: Any) -> None:
        begin(self)
        _write(event="start")

    SegmentBuffer.take, Learner.update, Learner.restore = taking, updating, restoring  # type: ignore[method-assign,assignment]
    Learner.__post_init__ = beginning  # type: ignore[method-assign]


# Services are forked from the server, where this module is imported; a learner may also be a process of its own.
if any(word.startswith("learning-") or word.endswith(".forking") for word in sys.orig_argv):
    _audit()
