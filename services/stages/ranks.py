"""Divides the updates of one learner among processes of this machine (`pipeline.ranks`).

Rank 0 is the learner that other services know. It starts the others, and sends them through their standard input what
they need to do the same: its state before the first update, then its segments and updates. They end with this pipe.

    python -m sparring.services.stages.ranks    # a rank above 0
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import msgpack

from sparring.pipeline.learning.checkpoints import packed, unpacked
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.losses import UpdateReport
from sparring.pipeline.learning.ranks import RankLost, device_of, join
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.networks.device import Device, configure_torch, torch_configuration, usable
from sparring.pipeline.queues.endpoints import private_folder
from sparring.pipeline.specs import BehaviorSpec, read_spec
from sparring.services.process.hosting import PYTHON
from sparring.services.process.lifeline import ending_at_hangup
from sparring.services.process.runtime import MEETING

_Process: TypeAlias = "subprocess.Popen[bytes]"

_POLL_S: Final = 0.02
_DYING_S: Final = 2.0
"""Seconds for a process that is ending, whose connections the system closes before it can be waited for."""


@dataclass(eq=False)
class LeadingLearner(Learner):
    """A LeadingLearner is rank 0 of a learner of several processes.

    Attributes:
        processes: the other ranks, which have joined.
    """

    processes: list[_Process] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._unsent: list[tuple[object, ...]] = []
        self._has_begun = False

    def register(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Registers other behavior names, as `Learner.register`."""
        super().register(specs)
        self._unsent.append(("register", {name: asdict(spec) for name, spec in specs.items()}))

    def add(self, record: Segments) -> None:
        """Adds finished segments, as `Learner.add`."""
        super().add(record)
        self._unsent.append(("add", record))

    def drop_stale(self, max_lag: int) -> int:
        """Drops old segments, as `Learner.drop_stale`."""
        dropped = super().drop_stale(max_lag)
        if dropped:
            self._unsent.append(("drop_stale", max_lag))
        return dropped

    def update(self, everything: bool = False) -> UpdateReport:
        """Trains together with the other ranks, as `Learner.update`.

        Raises:
            RankLost: another rank has ended.
        """
        try:
            if self.ranks.count > 1:
                self._send(everything)
            return super().update(everything)
        except RankLost as lost:
            deadline = time.monotonic() + _DYING_S
            while not (statuses := self._statuses()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            raise RankLost(f"a rank of the learner of {self.behavior} is lost: {statuses or lost}") from lost

    def end(self) -> None:
        """Ends the other ranks."""
        self.ranks.leave()
        for process in self.processes:
            process.kill()
            process.communicate()

    def _statuses(self) -> str:
        """Returns by which status each other rank has ended, of those that have."""
        ended = [(rank, process.poll()) for rank, process in enumerate(self.processes, start=1)]
        return ", ".join(f"rank {rank} ended by status {status}" for rank, status in ended if status is not None)

    def _send(self, everything: bool) -> None:
        """Tells the other ranks all that has happened since the last update."""
        unsent, self._unsent = self._unsent, []
        if not self._has_begun:
            unsent.insert(0, ("restore", packed(self.checkpoint())))
            self._has_begun = True
        for kind, what in [*unsent, ("update", everything)]:
            plain = encode(what) if isinstance(what, Segments) else what
            message = msgpack.packb((kind, plain))
            for process in self.processes:
                assert process.stdin is not None
                try:
                    process.stdin.write(message)
                    process.stdin.flush()
                except OSError as error:
                    raise RankLost(str(error)) from error


def lead(
    behavior: str,
    spec: BehaviorSpec,
    settings: TrainerSettings,
    seed: int,
    *,
    count: int,
    timeout_s: float,
    device: Device,
) -> LeadingLearner:
    """Starts the other ranks of a learner, and waits until they have joined.

    Args:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        settings: the learner's settings.
        seed: seed of the run.
        count: number of ranks.
        timeout_s: seconds that a rank waits for another.
        device: device of the networks; `cuda` is a GPU for each rank.

    Raises:
        Unsupported: the machine has fewer GPUs.
        RankLost: not all of them have joined in time.
    """
    usable(str(device_of(device, count - 1, count)), "torch_settings.device of the last rank")
    shared = {
        "behavior": behavior,
        "spec": asdict(spec),
        "settings": settings.model_dump(mode="json", exclude_unset=True, include=set(TrainerSettings.model_fields)),
        "seed": seed,
        "count": count,
        "timeout_s": timeout_s,
        "device": str(device),
        "torch": torch_configuration(),
    }
    own, processes = device_of(device, 0, count), list[_Process]()
    try:
        with private_folder(MEETING, shutil.rmtree) as folder:
            meeting = Path(folder, "ranks")
            for rank in range(1, count):
                processes.append(_start(shared | {"rank": rank, "meeting": str(meeting)}))
            _wait_for(processes, meeting, timeout_s)
            ranks = join(0, count, meeting, own, timeout_s)
    except RankLost as lost:
        for process in processes:
            process.kill()
            process.communicate()
        raise RankLost(f"the ranks of the learner of {behavior} have not met: {lost}") from lost
    return LeadingLearner(behavior, spec, settings, seed, device=own, ranks=ranks, processes=processes)


def _ready(meeting: Path, rank: int) -> Path:
    """Returns the file with which a rank says that it will join now: one that died before would be waited for."""
    return meeting.with_name(f"ready-{rank}")


def _wait_for(processes: Sequence[_Process], meeting: Path, timeout_s: float) -> None:
    """Waits until all ranks are about to join.

    Raises:
        RankLost: one has ended, or is not ready in time.
    """
    limit_s = time.monotonic() + timeout_s
    for rank, process in enumerate(processes, start=1):
        while not _ready(meeting, rank).exists():
            if (status := process.poll()) is not None:
                raise RankLost(f"rank {rank} ended by status {status}")
            if time.monotonic() > limit_s:
                raise RankLost(f"rank {rank} was not ready within {timeout_s:g} s")
            time.sleep(_POLL_S)


def _start(begun: Mapping[str, object]) -> _Process:
    # In the learner's process group, which the supervisor ends with the learner.
    process = subprocess.Popen([*PYTHON, __name__], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which whoever waits for it sees
        process.stdin.write(msgpack.packb(json.dumps(begun)))
        process.stdin.flush()
    return process


def follow() -> None:
    """Does what rank 0 does, until its pipe is closed.

    Raises:
        RankLost: another rank has ended.
    """
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stream:  # a buffered file would wait for a full buffer
        messages = msgpack.Unpacker(stream, max_buffer_size=0, use_list=False, strict_map_key=False)
        begun = json.loads(next(messages))
        configure_torch(*begun["torch"])
        rank, count, device = begun["rank"], begun["count"], Device(begun["device"])
        device = device_of(device, rank, count)
        meeting = Path(begun["meeting"])
        _ready(meeting, rank).touch()
        with ending_at_hangup(stream.fileno()):  # the wait for the others takes minutes where they do not come
            ranks = join(rank, count, meeting, device, begun["timeout_s"])
        settings = TrainerSettings.model_validate_json(json.dumps(begun["settings"]))
        identity = begun["behavior"], read_spec(begun["spec"]), settings, begun["seed"]
        learner = Learner(*identity, device=device, ranks=ranks)
        for kind, what in messages:
            if kind == "restore":
                learner.restore(unpacked(what, Path("rank 0")))
            elif kind == "register":
                learner.register({name: read_spec(plain) for name, plain in what.items()})
            elif kind == "add":
                learner.add(decode(what))
            elif kind == "drop_stale":
                learner.drop_stale(what)
            else:
                learner.update(what)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the learner decides when to end
        signal.signal(number, signal.SIG_IGN)
    status = 0
    try:
        follow()
    except RankLost:  # the learner says so
        status = 1
    os._exit(status)  # threads of torch.distributed may abort an end in order
