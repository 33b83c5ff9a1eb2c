"""Agents with memory in the whole graph under a virtual clock."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from sparring.pipeline.assembly import sequences
from sparring.pipeline.games.goal import Goal
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.losses import UpdateReport
from sparring.pipeline.learning.ppo import PPO
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.layers import Layout
from tests.services.services_graph import begin
from tests.services.services_helpers import balanced

MEMORY = ", memory: {sequence_length: 4, memory_size: 6}"
NETWORKS = {
    "memory": MEMORY,
    "previous action": ", previous_action: true",
    "both": MEMORY + ", previous_action: true, normalize: true",
}


class Replay:
    """Acts on every batch again before training, from the recurrent state at the start of each sequence."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[float] = []
        self.lengths: list[int] = []
        self.versions: set[int] = set()
        self._update = PPO.update
        replay = self

        def update(ppo: PPO, batch: Batch, version: int, trained: int) -> UpdateReport:
            replay.act_again(ppo, batch)
            replay.versions.update((batch.versions - version).tolist())
            return replay._update(ppo, batch, version, trained)

        monkeypatch.setattr(PPO, "update", update)

    @torch.no_grad()
    def act_again(self, ppo: PPO, batch: Batch) -> None:
        networks, actor = ppo.networks, ppo.actor
        assert batch.carried is not None
        inputs = networks.prepare(batch).inputs
        lengths = sequences.divide(batch.lengths, batch.sequence_length)[1]
        assert len(lengths) == len(batch.carried)
        remembered = batch.carried.shape[1] - actor.encoder.previous
        memory = torch.from_numpy(batch.carried[:, :remembered])
        head = actor(inputs, Layout(lengths), memory) if remembered else actor(inputs)
        found = distributions.evaluate(
            actor.actions,
            head,
            actor.log_sigma,
            torch.from_numpy(batch.continuous),
            torch.from_numpy(batch.discrete).long(),
            None,
        )
        self.errors.append(float(np.abs(found.log_prob.numpy() - batch.log_probs).max()))
        self.lengths += batch.lengths.tolist()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("network", "actions"),
    [
        ("memory", {"discrete": True, "actions": 2}),
        ("previous action", {"hybrid": True}),
        ("both", {"discrete": True, "actions": 2}),
        ("both", {}),
    ],
)
async def test_acting_again_on_lockstep_segments_gives_the_stored_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str, actions: dict[str, Any]
) -> None:
    replay = Replay(monkeypatch)
    games = [Goal(areas=3, memory=True, **actions) for _ in range(2)]
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(
            tasks, stack, tmp_path, games, mode="lockstep", network=NETWORKS[network], horizon=10, max_steps=400
        )
        step_counts = await graph.finish()
        tasks.cancel_scope.cancel()
    assert step_counts["trained"] >= 400
    assert balanced(step_counts), step_counts
    assert replay.versions == {0}
    assert len(replay.errors) >= 5
    assert max(replay.errors) < 1e-5
    assert max(replay.lengths) > 4  # several sequences of a segment, and segments that end within one
    assert any(length % 4 for length in replay.lengths)


@pytest.mark.anyio
async def test_lockstep_with_memory_repeats_its_weights(tmp_path: Path) -> None:
    digests = set()
    for attempt, frame_s in enumerate((0.001, 0.03)):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            games = [Goal(areas=2, memory=True) for _ in range(2)]
            graph = await begin(tasks, stack, folder, games, mode="lockstep", network=NETWORKS["both"], max_steps=400)
            graph.frame_s = frame_s
            await graph.finish()
            digests.add(graph.latest("learning-Goal", "state").weights_sha256)
            tasks.cancel_scope.cancel()
    assert len(digests) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["stepping-0", "assembly", "learning-Goal"])
async def test_killed_service_loses_memories_only(tmp_path: Path, part: str) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        games = [Goal(areas=3, memory=True) for _ in range(2)]
        graph = await begin(tasks, stack, tmp_path, games, network=NETWORKS["both"], horizon=10, max_steps=500)
        await graph.until("Goal", lambda state: state.updates >= 2)
        await graph.kill(part)
        step_counts = await graph.finish()
        tasks.cancel_scope.cancel()
    assert step_counts["trained"] >= 500
    assert balanced(step_counts), step_counts
    assert not graph.faults
