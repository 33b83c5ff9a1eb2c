"""What of each source a learner has received, and what was lost on the way to it."""

from collections.abc import Mapping

from sparring.pipeline.files import Json
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import EARLIER


class Intake:
    """Counts the steps of each source up to which a learner has received segments, and the gaps before them.

    Assembly says in each message how far it has come with the source. What is missing between that and the last message
    was lost: with the learner's predecessor, if it is missing before the first message of a source that a restarted
    learner receives, else with an incarnation of assembly.

    Args:
        restarted: the learner has predecessors.

    Attributes:
        reached: steps received or lost, by incarnation of stepping, in the order of their first segments.
        lost: steps lost, by the stage that lost them.
    """

    def __init__(self, *, restarted: bool) -> None:
        self.reached: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        self._restarted = restarted
        self._received: set[str] = set()  # sources of which this learner has received segments

    def add(self, segments: Segments) -> None:
        """Counts segments that have arrived."""
        source, first = segments.source, segments.source not in self._received
        missing = segments.reached - len(segments.log_probs) - self.reached.get(source, 0)
        self._lose("learning" if self._restarted and first else "assembly", missing)
        self.reached[source] = segments.reached
        self._received.add(source)

    def to_plain(self) -> dict[str, Json]:
        """Returns the counts as plain JSON values, for a checkpoint."""
        return {"reached": dict(self.reached), "lost": dict(self.lost)}

    def restore(self, plain: Mapping[str, Json], resolved: int) -> None:
        """Continues from what `to_plain` returned.

        Args:
            plain: counts of a checkpoint, which may have none.
            resolved: steps that the checkpoint holds as trained, stale or played. What it had received beyond them was
                in a buffer, and is lost; what it holds beyond those that it had received was produced by others.
        """
        self.reached, self.lost = dict(plain.get("reached", {})), dict(plain.get("lost", {}))
        beyond = sum(self.reached.values()) - sum(self.lost.values()) - resolved
        self._lose("learning", max(0, beyond))
        if beyond < 0:
            self.reached[EARLIER] = self.reached.get(EARLIER, 0) - beyond

    def _lose(self, stage: str, steps: int) -> None:
        if steps:
            self.lost[stage] = self.lost.get(stage, 0) + steps
