"""The service around a learner: what it has given out, and what it keeps, whenever it dies."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import structlog
import torch
from structlog.testing import capture_logs
from trio.testing import MockClock

from sparring.pipeline.demonstrations.episodes import SUFFIX
from sparring.pipeline.errors import Closed
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from sparring.pipeline.messages.state import LearnerState, PolicyWeights, RunState
from sparring.pipeline.monitoring.metrics import LAG_BOUNDS
from sparring.pipeline.networks.limits import Unsupported
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.pipeline.settings import parse_settings
from sparring.services.process.runtime import Context, Run, inline
from sparring.services.stages import learning
from sparring.services.stages.learning import Learning
from tests.learning.learning_helpers import HYBRID, segments
from tests.learning.signals_helpers import recorded, write

BUFFER = 64
INTERVAL_S = 1.0
UPDATE_S = 0.3

CONFIG = f"""
behaviors:
  Test:
    hyperparameters: {{batch_size: 32, buffer_size: {BUFFER}, num_epoch: 1}}
    network_settings: {{hidden_units: 8, num_layers: 1}}
    max_steps: 100000
    checkpoint_interval: 100000
pipeline: {{recovery_interval: {INTERVAL_S}}}
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_in(folder, resumed=False) -> Run:
    return Run(
        id="test",
        directory=folder,
        settings=parse_settings(CONFIG, "test").settings,
        seed=1,
        capacities={"updates:Test": Capacity(messages=16, steps=16 * BUFFER)},
        addresses={"stepping-0": "unix:///nowhere"},
        simulators={"stepping-0": 1},
        resumed=resumed,
    )


def context_of(folder, start: int, transport: Any = None, *, resumed=False, **changes) -> Context:
    """Of one start of the learner; the first has the number 1."""
    return Context(
        run=run_in(folder, resumed),
        service="learning-Test",
        start=f"learning-Test.{start}",
        first=start == 1,
        transport=transport,
        stop=anyio.Event(),
        log=structlog.get_logger(),
        **{"compute": inline, **changes},
    )


@pytest.mark.anyio
async def test_a_device_that_is_not_there_ends_a_learner_before_it_says_anything(tmp_path) -> None:
    context = context_of(tmp_path, 1)  # with no transport to say anything on
    settings = parse_settings(f"{CONFIG}torch_settings: {{device: cuda:77}}\n", "test").settings
    with pytest.raises(Unsupported, match="cuda:77"):
        await learning.run(replace(context, run=replace(context.run, settings=settings)))


class Killed(Exception):
    """The process ends here."""


class FakeBoard:
    """Keeps what was published.

    Attributes:
        dies: "before" or "after" the next publication; "" for never.
    """

    def __init__(self) -> None:
        self.published: list[Any] = []
        self.dies = ""

    def publish(self, _key: str, record: Any) -> None:
        if self.dies == "before":
            raise Killed
        self.published.append(record)
        if self.dies == "after":
            raise Killed

    @property
    def versions(self) -> list[int]:
        return [record.version for record in self.published]


class FakeQueue:
    """A buffer of steps in each message, `count` of them; and a board that says nothing, or what it is given."""

    def __init__(self, count: int, latest: dict[str, Any] | None = None) -> None:
        self.latest = {} if latest is None else latest
        self._left = iter(range(1, count + 1))

    async def get(self) -> Any:
        for sequence in self._left:
            return segments([BUFFER], sequence=sequence)
        raise Closed("the end")


def learning_of(
    context: Context, policies: FakeBoard, state: FakeBoard, messages: int = 0, said: dict[str, Any] | None = None
) -> Learning:
    learner = Learner("Test", HYBRID, context.run.settings.behaviors["Test"], seed=1)
    context.registry.histogram("lag/Test", LAG_BOUNDS)
    return Learning(context, learner, state, policies, FakeQueue(messages), FakeQueue(0, said))  # type: ignore[arg-type]


# ---------------------------------------------------------------- versions only rise


@pytest.mark.anyio
async def test_stepping_takes_the_weights_of_a_learner_that_died_before_coordination_heard_of_its_last(tmp_path):
    """A reader that takes only newer versions takes the first weights of the next start."""
    hub = MemoryHub()
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        others = await stack.enter_async_context(MemoryTransport(hub, start="others.1"))
        coordination = await others.topic("coordination")
        known = {"specs": {"Test": HYBRID}, "versions": {"Test": 0}}  # coordination says it once, and never again
        empty = {"step_counts": {}, "routed": {}, "reward_mean_last100": {}, "episodes": {}}
        coordination.publish("run", RunState(start="coordination.1", finished=False, **known, **empty))
        updates, reader = await others.sender("updates:Test"), await others.subscribe("policy-Test")

        async def serve(start: int, scope: anyio.CancelScope) -> None:
            with scope:
                async with MemoryTransport(hub, start=f"learning-Test.{start}") as transport:
                    try:
                        await learning.run(context_of(tmp_path, start, transport))
                    except anyio.get_cancelled_exc_class():
                        transport.abandon()
                        raise

        async def newest(at_least: int) -> int:
            while True:
                await reader.changed()
                weights = reader.latest.get("weights")
                if isinstance(weights, PolicyWeights) and weights.version >= at_least:
                    return weights.version

        first = anyio.CancelScope()
        tasks.start_soon(serve, 1, first)
        for sequence in (1, 2, 3):
            await updates.put(segments([BUFFER], sequence=sequence), BUFFER)
        with anyio.fail_after(60):
            taken = await newest(4)
            await updates.drain()  # the next start gets nothing again: what it publishes first stays
            first.cancel()
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(serve, 2, anyio.CancelScope())
            assert await newest(taken + 1) == taken + 1, "the next version, so that lags stay true"
        tasks.cancel_scope.cancel()


def die(policies: FakeBoard, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the learner die at `moment` of its next update."""
    if moment == "before the note":

        def killed(*_: object) -> None:
            raise Killed

        monkeypatch.setattr(CheckpointFolder, "note_version", killed)
    else:
        policies.dies = {"after the note": "before", "after the weights": "after"}[moment]


@pytest.mark.anyio
@pytest.mark.parametrize("moment", ["before the note", "after the note", "after the weights"])
async def test_no_version_is_given_out_twice_wherever_the_learner_dies(tmp_path, monkeypatch, moment):
    """Three starts die at the same place, coordination hears of none: what readers got still rises strictly."""
    taken: list[int] = []
    for start in (1, 2, 3):
        policies = FakeBoard()
        service = learning_of(context_of(tmp_path, start), policies, FakeBoard(), messages=1)
        await service.begin(versions_seen=0)
        with monkeypatch.context() as patch:
            die(policies, moment, patch)
            with pytest.raises(Killed):
                await service.loop()
        taken += policies.versions
    assert len(taken) == (6 if moment == "after the weights" else 3)
    assert all(later > earlier for earlier, later in itertools.pairwise(taken)), taken


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("noted", "seen", "saved", "expected"),
    [
        ("7", 5, 4, 8),  # coordination had not heard of the last two
        (None, 9, 4, 10),  # a loss of power took the note; coordination's permits name version 9
        ("", 3, 6, 7),  # it left the note empty; the checkpoint is what is left
        (None, 0, 4, 5),
        ("7", 0, None, 8),  # no checkpoint yet
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
async def test_a_later_start_goes_on_above_all_that_is_known(tmp_path, noted, seen, saved, expected, resumed):
    """Checkpoint, note and coordination: one more than the highest, after a crash and with `--resume`."""
    context = context_of(tmp_path, 1 if resumed else 2, resumed=resumed)
    policies = FakeBoard()
    service = learning_of(context, policies, FakeBoard())
    folder = CheckpointFolder(tmp_path, "Test")
    folder.note_version(1)
    (folder.path / "version").unlink()
    if noted is not None:
        (folder.path / "version").write_text(noted)
    if saved is not None:
        former = Learner("Test", HYBRID, context.run.settings.behaviors["Test"], seed=2)
        former.version = saved
        folder.save_recovery(former.checkpoint())
    await service.begin(seen)
    assert policies.versions == [expected]
    assert folder.noted_version() == expected


@pytest.mark.anyio
async def test_a_new_run_begins_with_version_1(tmp_path):
    """Nothing was ever given out."""
    policies = FakeBoard()
    await learning_of(context_of(tmp_path, 1), policies, FakeBoard()).begin(0)
    assert policies.versions == [1]


@pytest.mark.anyio
async def test_the_log_names_each_file_of_demonstrations_once(tmp_path):
    """GAIL and cloning may learn from the same files."""
    for name, lengths in (("a", [4, 3]), ("b", [2])):
        write(tmp_path, HYBRID, recorded(HYBRID, lengths), name)
    wanted = f"{{demo_path: {tmp_path}}}"
    text = CONFIG.replace(
        "max_steps", f"reward_signals: {{gail: {wanted}}}\n    behavioral_cloning: {wanted}\n    max_steps"
    )
    context = context_of(tmp_path, 1)
    context = replace(context, run=replace(context.run, settings=parse_settings(text, "test").settings))
    with capture_logs() as lines:
        await learning_of(context, FakeBoard(), FakeBoard()).begin(0)
    found = [line for line in lines if line["event"] == "demonstrations_loaded"]
    assert [(Path(line["path"]).name, line["episodes"], line["steps"], line["pairing"]) for line in found] == [
        (f"a{SUFFIX}", 2, 7, None),
        (f"b{SUFFIX}", 1, 2, None),
    ]


# ---------------------------------------------------------------- what a crash rolls back


class FarQueue(FakeQueue):
    """Steps of which the present policy would hardly have done any: one of 64 has a weight to speak of."""

    async def get(self) -> Any:
        unlikely = np.full(BUFFER, 50.0, np.float32)
        unlikely[7] = -50.0
        return replace(await super().get(), log_probs=unlikely)


@pytest.mark.anyio
async def test_data_beyond_the_reach_of_the_correction_are_logged_once_counted_and_trained(tmp_path):
    service = learning_of(context_of(tmp_path, 1), FakeBoard(), FakeBoard())
    service._receiver = FarQueue(3)  # type: ignore[assignment]
    await service.begin(versions_seen=0)
    service._learner.version = 2  # all of them were acted by version 1
    with capture_logs() as lines:
        await service.loop()
    (said,) = (line for line in lines if line["event"] == "stale_correction_weak")
    assert (said["effective_sample_size"], said["lag"]) == (round(1 / BUFFER, 3), 1)
    assert service._learner.trained == 3 * BUFFER
    assert service._context.registry.snapshot(0.0).counters["correction.weak/Test"] == 3


@pytest.mark.anyio
async def test_a_recovery_checkpoint_is_never_older_than_its_interval_an_update_and_a_save(tmp_path):
    """A learner that dies at any moment loses no more than it has trained in that time."""
    now = [0.0]

    async def compute(work: Any) -> Any:
        now[0] += UPDATE_S  # of an update, and as much for a save
        return work()

    folder = CheckpointFolder(tmp_path, "Test")
    made, ages = {1: 0.0}, []

    class Watching(FakeBoard):
        def publish(self, key: str, record: LearnerState) -> None:
            super().publish(key, record)
            made.setdefault(record.version, now[0])
            found = folder.newest_first()
            saved = int(found[0].name.rpartition("-")[2]) if found else 1
            ages.append(now[0] - made[saved])

    context = context_of(tmp_path, 1, clock=lambda: now[0], compute=compute)
    service = learning_of(context, FakeBoard(), Watching(), messages=40)
    await service.begin(0)
    await service.loop()
    assert len(ages) > 40
    assert max(ages) <= INTERVAL_S + 2 * UPDATE_S + 1e-9


@pytest.mark.anyio
async def test_a_change_of_the_learning_team_is_followed_by_a_recovery_checkpoint(tmp_path):
    """What the team has learned is kept at the end of its turn, however lately it was before."""
    said: dict[str, Any] = {}
    folder = CheckpointFolder(tmp_path, "Test")
    found: list[list[str]] = []

    class Turning(FakeBoard):
        """After the fourth version team 1 learns."""

        def publish(self, key: str, record: LearnerState) -> None:
            super().publish(key, record)
            team = int(record.version > 4)
            said["assignment"] = MatchupAssignment(serial=1 + team, matchups=(Matchup(number=1, team=team, ghosts={}),))
            found.append([path.name for path in folder.newest_first()])

    service = learning_of(context_of(tmp_path, 1, clock=lambda: 0.0), FakeBoard(), Turning(), messages=8, said=said)
    await service.begin(0)
    await service.loop()
    first = next(names for names in found if names)
    assert first == [f"recovery-{4 * BUFFER:012d}-0005"]
    assert all(names in ([], first) or "checkpoint" in names[0] for names in found)
