"""The learner service: published versions and saved checkpoints, whenever it crashes."""

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
from structlog.testing import capture_logs

from sparring.pipeline.demonstrations.episodes import SUFFIX
from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.messages.channels import EPISODES, POLICY_WEIGHTS, RUN, segments_queue
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from sparring.pipeline.messages.state import LearnerState, PolicyWeights, RunState
from sparring.pipeline.monitoring.metrics import LAG_BOUNDS
from sparring.pipeline.networks.settings import Unsupported
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.pipeline.settings import parse_settings
from sparring.services.process.runtime import Context, Run
from sparring.services.stages import learning
from sparring.services.stages.learning import Learning
from sparring.services.stages.playing import LearnerLinks
from tests.learning.learning_helpers import HYBRID, segments
from tests.learning.signals_helpers import recorded, write
from tests.services import inline

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


def run_in(folder, resumed=False) -> Run:
    return Run(
        id="test",
        directory=folder,
        settings=parse_settings(CONFIG, "test").settings,
        seed=1,
        addresses={"stepping-0": "unix:///nowhere"},
        simulators={"stepping-0": 1},
        resumed=resumed,
    )


def context_of(folder, start: int, transport: Any = None, *, resumed=False, **changes) -> Context:
    """Returns the context of an incarnation of the learner; the first has number 1."""
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
async def test_unavailable_device_ends_a_learner_before_it_publishes(tmp_path) -> None:
    context = context_of(tmp_path, 1)  # without a transport to publish on
    settings = parse_settings(f"{CONFIG}torch_settings: {{device: cuda:77}}\n", "test").settings
    with pytest.raises(Unsupported, match="cuda:77"):
        await learning.run(replace(context, run=replace(context.run, settings=settings)))


class CrashError(Exception):
    """A simulated crash of the process."""


class FakeTopic:
    """A topic that keeps all publications but the returns of episodes.

    Attributes:
        crashes: "before" or "after" the next publication; "" for never.
    """

    def __init__(self) -> None:
        self.published: list[Any] = []
        self.crashes = ""

    def publish(self, topic: Any, record: Any) -> None:
        if topic is EPISODES:
            return
        if self.crashes == "before":
            raise CrashError
        self.published.append(record)
        if self.crashes == "after":
            raise CrashError

    @property
    def versions(self) -> list[int]:
        return [record.version for record in self.published]


class FakeQueue:
    """A queue of `count` records with a full buffer each, and a subscription with given latest records."""

    def __init__(self, count: int, latest: dict[str, Any] | None = None) -> None:
        self._records = {} if latest is None else latest
        self._left = iter(range(1, count + 1))

    def latest(self, topic: Any) -> Any:
        return self._records.get(topic.key)

    async def get(self) -> Any:
        for sequence in self._left:
            return replace(segments([BUFFER]), reached=sequence * BUFFER)
        raise QueueClosed("the end")


def learning_of(
    context: Context,
    policies: FakeTopic,
    state: FakeTopic,
    messages: int = 0,
    latest: dict[str, Any] | None = None,
    *,
    stale: bool = False,
) -> Learning:
    learner = Learner("Test", HYBRID, context.run.settings.behaviors["Test"], seed=1)
    context.registry.histogram("lag/Test", LAG_BOUNDS)
    queue = StaleQueue(messages) if stale else FakeQueue(messages)
    return Learning(context, learner, LearnerLinks("Test", state, policies, queue, FakeQueue(0, latest)))  # type: ignore[arg-type]


# ---------------------------------------------------------------- versions only rise


@pytest.mark.anyio
async def test_stepping_accepts_weights_of_a_learner_that_crashed_before_its_state_was_read(tmp_path):
    """A reader that accepts only newer versions accepts the first weights of the next incarnation."""
    hub = MemoryHub()
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        others = await stack.enter_async_context(MemoryTransport(hub, start="others.1"))
        coordination = await others.publisher("coordination")
        known = {"specs": {"Test": HYBRID}, "versions": {"Test": 0}}  # coordination publishes it once
        empty = {key: {} for key in ("step_counts", "losses", "unaccounted", "reward_mean_last100", "episodes")}
        coordination.publish(RUN, RunState(start="coordination.1", finished=False, **known, **empty))
        updates, reader = await others.sender(segments_queue("Test")), await others.subscribe("policy-Test")

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
                weights = reader.latest(POLICY_WEIGHTS)
                if isinstance(weights, PolicyWeights) and weights.version >= at_least:
                    return weights.version

        first = anyio.CancelScope()
        tasks.start_soon(serve, 1, first)
        for sequence in (1, 2, 3):
            await updates.put(replace(segments([BUFFER]), reached=sequence * BUFFER), BUFFER)
        with anyio.fail_after(60):
            received = await newest(4)
            await updates.drain()  # so that the next incarnation publishes once
            first.cancel()
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(serve, 2, anyio.CancelScope())
            assert await newest(received + 1) == received + 1, "the next version, so that lags stay correct"
        tasks.cancel_scope.cancel()


def crash_at(policies: FakeTopic, crash_point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the learner crash at `crash_point` of its next update."""
    if crash_point == "before the note":

        def killed(*_: object) -> None:
            raise CrashError

        monkeypatch.setattr(CheckpointFolder, "note_version", killed)
    else:
        policies.crashes = {"after the note": "before", "after the weights": "after"}[crash_point]


@pytest.mark.anyio
@pytest.mark.parametrize("crash_point", ["before the note", "after the note", "after the weights"])
async def test_no_version_is_published_twice_wherever_the_learner_crashes(tmp_path, monkeypatch, crash_point):
    """Three incarnations crash at the same point before coordination reads their state, and versions still rise."""
    received: list[int] = []
    for start in (1, 2, 3):
        policies = FakeTopic()
        service = learning_of(context_of(tmp_path, start), policies, FakeTopic(), messages=1)
        await service.begin(versions_seen=0)
        with monkeypatch.context() as patch:
            crash_at(policies, crash_point, patch)
            with pytest.raises(CrashError):
                await service.loop()
        received += policies.versions
    assert len(received) == (6 if crash_point == "after the weights" else 3)
    assert all(later > earlier for earlier, later in itertools.pairwise(received)), received


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("noted", "seen", "saved", "expected"),
    [
        ("7", 5, 4, 8),  # coordination had not read the last two
        (None, 9, 4, 10),  # a loss of power took the note; coordination's allowances name version 9
        ("", 3, 6, 7),  # the note is empty; only the checkpoint remains
        (None, 0, 4, 5),
        ("7", 0, None, 8),  # no checkpoint yet
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
async def test_new_incarnation_continues_above_all_known_versions(tmp_path, noted, seen, saved, expected, resumed):
    """It is one more than the highest of checkpoint, note and coordination, after a crash and with `--resume`."""
    context = context_of(tmp_path, 1 if resumed else 2, resumed=resumed)
    policies = FakeTopic()
    service = learning_of(context, policies, FakeTopic())
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
async def test_new_run_begins_with_version_1(tmp_path):
    """No version was published before."""
    policies = FakeTopic()
    await learning_of(context_of(tmp_path, 1), policies, FakeTopic()).begin(0)
    assert policies.versions == [1]


@pytest.mark.anyio
async def test_log_names_each_demonstration_file_once(tmp_path):
    """GAIL and cloning may use the same files."""
    for name, lengths in (("a", [4, 3]), ("b", [2])):
        write(tmp_path, HYBRID, recorded(HYBRID, lengths), name)
    wanted = f"{{demo_path: {tmp_path}}}"
    text = CONFIG.replace(
        "max_steps", f"reward_signals: {{gail: {wanted}}}\n    behavioral_cloning: {wanted}\n    max_steps"
    )
    context = context_of(tmp_path, 1)
    context = replace(context, run=replace(context.run, settings=parse_settings(text, "test").settings))
    with capture_logs() as lines:
        await learning_of(context, FakeTopic(), FakeTopic()).begin(0)
    found = [line for line in lines if line["event"] == "demonstrations_loaded"]
    assert [(Path(line["path"]).name, line["episodes"], line["steps"], line["pairing"]) for line in found] == [
        (f"a{SUFFIX}", 2, 7, None),
        (f"b{SUFFIX}", 1, 2, None),
    ]


# ---------------------------------------------------------------- recovery checkpoints


class StaleQueue(FakeQueue):
    """A queue of steps that the current policy would hardly take: one of 64 has a considerable weight."""

    async def get(self) -> Any:
        unlikely = np.full(BUFFER, 50.0, np.float32)
        unlikely[7] = -50.0
        return replace(await super().get(), log_probs=unlikely)


@pytest.mark.anyio
async def test_data_too_stale_for_the_correction_are_logged_once_and_trained(tmp_path):
    service = learning_of(context_of(tmp_path, 1), FakeTopic(), FakeTopic(), messages=3, stale=True)
    await service.begin(versions_seen=0)
    service._learner.version = 2  # all of them were acted by version 1
    with capture_logs() as lines:
        await service.loop()
    (event,) = (line for line in lines if line["event"] == "stale_correction_weak")
    assert (event["effective_sample_size"], event["lag"]) == (round(1 / BUFFER, 3), 1)
    assert service._learner.trained == 3 * BUFFER
    assert service._context.registry.snapshot(0.0).counters["correction.weak/Test"] == 3


@pytest.mark.anyio
async def test_recovery_checkpoint_is_never_older_than_interval_update_and_save(tmp_path):
    """A learner that crashes at any time loses no more than it has trained since then."""
    now = [0.0]

    async def compute(work: Any) -> Any:
        now[0] += UPDATE_S  # of an update; a save takes as long
        return work()

    folder = CheckpointFolder(tmp_path, "Test")
    made, ages = {1: 0.0}, []

    class RecordingTopic(FakeTopic):
        def publish(self, topic: Any, record: Any) -> None:
            super().publish(topic, record)
            if not isinstance(record, LearnerState):
                return
            made.setdefault(record.version, now[0])
            found = folder.newest_first()
            saved = int(found[0].name.rpartition("-")[2]) if found else 1
            ages.append(now[0] - made[saved])

    context = context_of(tmp_path, 1, clock=lambda: now[0], compute=compute)
    service = learning_of(context, FakeTopic(), RecordingTopic(), messages=40)
    await service.begin(0)
    await service.loop()
    assert len(ages) > 40
    assert max(ages) <= INTERVAL_S + 2 * UPDATE_S + 1e-9


@pytest.mark.anyio
async def test_change_of_the_learning_team_saves_a_recovery_checkpoint(tmp_path):
    """The weights of a team are saved at the end of its turn, whatever the time since the last checkpoint."""
    latest: dict[str, Any] = {}
    folder = CheckpointFolder(tmp_path, "Test")
    found: list[list[str]] = []

    class TurnTopic(FakeTopic):
        """After the fourth version team 1 learns."""

        def publish(self, topic: Any, record: Any) -> None:
            super().publish(topic, record)
            if not isinstance(record, LearnerState):
                return
            team = int(record.version > 4)
            latest["assignment"] = MatchupAssignment(
                serial=1 + team, matchups=(Matchup(number=1, team=team, ghosts={}),)
            )
            found.append([path.name for path in folder.newest_first()])

    service = learning_of(
        context_of(tmp_path, 1, clock=lambda: 0.0), FakeTopic(), TurnTopic(), messages=8, latest=latest
    )
    await service.begin(0)
    await service.loop()
    first = next(names for names in found if names)
    assert first == [f"recovery-{4 * BUFFER:012d}-0005"]
    assert all(names in ([], first) or "checkpoint" in names[0] for names in found)
