"""Updates of PPO and MA-POCA with several reward signals."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparring.pipeline.learning.actor_critic import AgentNetworks
from sparring.pipeline.learning.group_networks import GroupNetworks
from sparring.pipeline.learning.settings import ExtrinsicSettings, RewardSignals
from sparring.pipeline.learning.signals import by_series
from tests.learning.group_helpers import batch_of
from tests.learning.learning_helpers import algorithm_of
from tests.learning.random_groups import OWN, specs_of
from tests.learning.signals_algorithms import PLAIN, check, made, share_of, steps_of_batch
from tests.learning.signals_helpers import (
    NAMES,
    SPECS,
    finite,
    moments,
    played,
    signals_of,
    state,
    trainer,
    world,
)

SUBSETS = [
    *(("ppo", names) for count in range(1, 5) for names in combinations(NAMES, count)),
    *(("poca", (name,)) for name in NAMES),
]


# ---------------------------------------------------------------- PPO


def plain_gae(rewards: Any, values: Any, following: Any, lengths: Any, gamma: float, lambd: float) -> list[float]:
    """Returns advantages computed row by row from the end of each segment."""
    found, start = [], 0
    for segment, length in enumerate(lengths):
        later, running, part = float(following[segment]), 0.0, []
        for row in reversed(range(start, start + length)):
            running = float(rewards[row]) + gamma * later - float(values[row]) + gamma * lambd * running
            later = float(values[row])
            part.append(running)
        found += part[::-1]
        start += length
    return found


def beginnings(batch: Any) -> list[int]:
    """Returns the first rows of the agent episodes of a first batch."""
    known, found, row = set(), [], 0
    for episode, length in zip(batch.agent_episodes.tolist(), batch.lengths.tolist(), strict=True):
        if episode not in known:
            known.add(episode)
            found.append(row)
        row += length
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_returns_and_advantages_of_all_signals(demo: Path, shared: bool) -> None:
    """Each signal has a value head, and the end of an episode stops the extrinsic return only.

    Others bootstrap with the mean value of episode starts, GAIL with a fraction of it. Open segments bootstrap with the
    next observation for all signals. The advantage is the mean over signals, normalized over the batch.
    """
    settings = trainer(signals_of(NAMES, demo / "hybrid"), shared_critic=shared)
    ppo = algorithm_of("Test", PLAIN, settings, torch.Generator().manual_seed(0))
    ppo.signals.sources["curiosity"].module.updated.fill_(1)
    batch = played(ppo)
    assert batch.terminated.any()
    prepared = ppo.networks.prepare(batch)
    with torch.no_grad():
        values, following = ppo.networks.value(prepared.inputs).numpy(), ppo.networks.value(prepared.following).numpy()
    assert values.shape[1] == 4
    steps, every = steps_of_batch(PLAIN, batch), []
    gammas = {"extrinsic": 0.9, "gail": 0.8, "curiosity": 0.95, "rnd": 0.85}
    strengths = {"extrinsic": 0.7, "gail": 0.3, "curiosity": 0.2, "rnd": 0.1}
    for head, name in enumerate(NAMES):
        source = ppo.signals.sources.get(name)
        rewards = strengths[name] * (batch.rewards if source is None else source.begin(steps))
        begun = np.mean([values[row, head] for row in beginnings(batch)])
        share = {"extrinsic": 0.0, "gail": share_of(demo / "hybrid", batch.terminated.sum(), batch.steps)}.get(
            name, 1.0
        )
        bootstrap = np.where(batch.terminated, share * begun, following[:, head])
        every.append(plain_gae(rewards, values[:, head], bootstrap, batch.lengths, gammas[name], 0.95))
    estimates = np.array(every).T
    rows = ppo._targets(batch, 0.2).rows
    np.testing.assert_allclose(rows.returns.numpy(), estimates + values, rtol=1e-3, atol=1e-4)
    mean = estimates.mean(1)
    np.testing.assert_allclose(rows.advantage.numpy(), (mean - mean.mean()) / mean.std(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_reward_networks_step_once_per_minibatch_on_its_rows(
    demo: Path, kind: str, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reward networks take one step on the rows of each minibatch of the policy."""
    algorithm, batch = made(kind, "hybrid", demo, NAMES, memory=memory)
    of_policy, of_networks = [], []
    plain_step, plain_learn = algorithm._step, algorithm.signals.learn
    every = batch.log_probs

    def step(targets: Any, part: Any, *others: Any) -> Any:
        of_policy.append(part[0].log_prob.numpy())
        return plain_step(targets, part, *others)

    def learn(at: torch.Tensor) -> None:
        of_networks.append(at.numpy())
        plain_learn(at)

    monkeypatch.setattr(algorithm, "_step", step)
    monkeypatch.setattr(algorithm.signals, "learn", learn)
    report = algorithm.update(batch, 0, 0)  # no row of version 0 is stale, so each keeps its log-probability
    assert report.minibatches == len(of_policy) == len(of_networks) > 2
    for log_probs, at in zip(of_policy, of_networks, strict=True):
        np.testing.assert_array_equal(every[at], log_probs)
    for source in algorithm.signals.sources.values():
        assert source.optimizer.moments["step"].item() == report.minibatches


@pytest.mark.parametrize(("kind", "names"), SUBSETS, ids=[f"{kind}-{'+'.join(names)}" for kind, names in SUBSETS])
def test_every_combination_of_signals(demo: Path, kind: str, names: tuple[str, ...]) -> None:
    """Updates change all weights, which stay finite, and each signal reports its statistics."""
    algorithm, batch = made(kind, "hybrid", demo, names)
    before = state(algorithm.signals.modules)
    check(algorithm, algorithm.update(batch, 1, 0), names)
    after = state(algorithm.signals.modules)
    assert all((after[name] != before[name]) != ("rnd.target." in name) for name in after if "updated" not in name)


VARIANTS = [
    *(("ppo", name, {}) for name in SPECS),
    ("ppo", "hybrid", {"memory": True}),
    ("ppo", "hybrid", {"previous": True, "use_actions": True}),
    ("ppo", "goal", {"normalize": True}),
    ("ppo", "entities", {"use_vail": True, "use_actions": True}),
    ("ppo", "bytes", {"memory": True, "use_vail": True, "normalize": True}),
    ("poca", "discrete", {"use_vail": True, "normalize": True}),
    ("poca", "goal", {"use_actions": True}),
    ("poca", "bytes", {"memory": True}),
    ("poca", "entities", {"memory": True, "previous": True}),
]


@pytest.mark.parametrize(
    ("kind", "name", "how"), VARIANTS, ids=["-".join((kind, name, *how)) for kind, name, how in VARIANTS]
)
def test_all_signals_with_all_kinds_of_observations_and_memories(
    demo: Path, kind: str, name: str, how: dict[str, bool]
) -> None:
    """This covers byte and float images, entities, goals, masks, hybrid actions and recurrent policies."""
    algorithm, batch = made(kind, name, demo, NAMES, **how)
    check(algorithm, algorithm.update(batch, 1, 0), NAMES)


def test_reward_networks_ignore_settings_of_memory(demo: Path) -> None:
    """`network_settings` of a signal may name a memory or the previous action, as a copied configuration does."""
    one = signals_of(NAMES, demo / "hybrid")
    shape = trainer(one, memory=True, previous=True).network_settings
    changed = {
        name: getattr(one, name).model_copy(update={"network_settings": shape}) for name in ("gail", "curiosity", "rnd")
    }
    ppo = algorithm_of("Test", PLAIN, trainer(one.model_copy(update=changed)), torch.Generator().manual_seed(0))
    check(ppo, ppo.update(played(ppo), 1, 0), NAMES)


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_teammates_of_other_behaviors_are_not_seen(demo: Path, kind: str) -> None:
    """Reward networks do not see agents of other behaviors in the groups."""
    if kind == "ppo":
        algorithm, batch = made(kind, "hybrid", demo, NAMES)
        assert len(algorithm._reward_steps(batch)) == batch.steps
        return
    specs = specs_of(PLAIN, teammates=2)
    algorithm = algorithm_of(OWN, PLAIN, trainer(signals_of(NAMES, demo / "hybrid"), kind="poca"), torch.Generator())
    algorithm.register({name: spec for name, spec in specs.items() if name != OWN})
    batch = batch_of(world(algorithm, specs).groups(6), specs)
    assert len(algorithm._reward_steps(batch)) == batch.steps
    check(algorithm, algorithm.update(batch, 1, 0), NAMES)


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_non_finite_batch_does_not_change_reward_networks(demo: Path, kind: str) -> None:
    """Weights, beta, `updated` and optimizers do not change, bit for bit; the next batch is trained on."""
    algorithm, batch = made(kind, "hybrid", demo, NAMES, use_actions=True, use_vail=True, normalize=True)
    algorithm.update(batch, 1, 0)
    columns = batch.observations[0]
    original = columns.copy()
    columns[:] = np.nan
    optimizers = [source.optimizer for source in algorithm.signals.sources.values()]
    before = state(algorithm.signals.modules), list(map(moments, optimizers))
    with np.errstate(invalid="ignore"):
        report = algorithm.update(batch, 2, 0)
    assert report.skipped == report.minibatches
    assert (state(algorithm.signals.modules), list(map(moments, optimizers))) == before
    columns[:] = original
    report = algorithm.update(batch, 3, 0)
    assert report.skipped == 0
    assert (state(algorithm.signals.modules), list(map(moments, optimizers))) != before
    assert finite(algorithm.signals.modules)
    assert all(np.isfinite(value) for name, value in report.statistics.items() if "Reward" not in name)


def test_returns_are_reported_after_a_non_finite_batch(demo: Path) -> None:
    """NaN affects the returns of its own episodes only."""
    ppo, batch = made("ppo", "hybrid", demo, NAMES)
    kept = batch.observations[0].copy()
    batch.observations[0][:] = np.nan
    with np.errstate(invalid="ignore"):
        ppo.update(with_new_episodes(batch, 0), 1, 0)
    batch.observations[0][:] = kept
    found = ppo.update(with_new_episodes(batch, 100, only_ended=True), 2, 0).statistics
    for name in ("Gail", "Curiosity", "Rnd"):
        assert np.isfinite(found[f"Policy/{name} Reward"])


def test_batch_after_a_non_finite_one_is_trained_on(demo: Path) -> None:
    """A skipped batch does not affect the returns of the next one, even if no episode begins there."""
    ppo, _ = made("ppo", "hybrid", demo, NAMES)
    carried: dict[int, Any] = {}
    ppo.update(played(ppo, [(1, 9, False), (2, 9, False)], carried_by_agent=carried), 1, 0)
    spoilt = played(ppo, [(3, 9, False), (4, 9, False)], carried_by_agent=carried)
    spoilt.observations[0][:] = np.nan
    with np.errstate(invalid="ignore"):
        report = ppo.update(spoilt, 2, 0)
    assert report.skipped == report.minibatches
    report = ppo.update(played(ppo, [(1, 9, True), (2, 9, True)], carried_by_agent=carried), 3, 0)
    assert report.skipped == 0
    assert finite(ppo.networks.modules)


def with_new_episodes(batch: Any, more: int, only_ended: bool = False) -> Any:
    """Returns the same segments of other agent episodes."""
    fields = {name: getattr(batch, name) for name in type(batch).__slots__}
    fields["agent_episodes"] = (
        more + np.arange(len(batch.agent_episodes)) if only_ended else batch.agent_episodes + more
    )
    return type(batch)(**fields)


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_learning_rates_of_reward_networks_are_constant(demo: Path, kind: str) -> None:
    """The learning rate of the policy falls over training, those of reward networks are constant."""
    algorithm, batch = made(kind, "hybrid", demo, NAMES)
    report = algorithm.update(batch, 1, 9000)
    assert report.statistics["Policy/Learning Rate"] == pytest.approx(1e-4, rel=1e-3)
    for source in algorithm.signals.sources.values():
        assert source.optimizer.learning_rate == 1e-3


# ---------------------------------------------------------------- MA-POCA


def test_rewards_of_members_are_summed_at_the_time_of_their_decisions(demo: Path) -> None:
    """The group's series of a signal holds each member's reward once, times the strength, at its decision's time.

    Twin of the lambda returns of all signals: `R_T = r_T + gamma V_next`, `R_t = r_t + gamma (lambda R_{t+1} +
    (1 - lambda) V_{t+1})`, in open groups.
    """
    spec = PLAIN
    settings = trainer(signals_of(NAMES, demo / "hybrid"), kind="poca")
    poca = algorithm_of(OWN, spec, settings, torch.Generator().manual_seed(0))
    poca.signals.sources["curiosity"].module.updated.fill_(1)
    specs = specs_of(spec)
    groups = world(poca, specs).groups(4, over=False)
    batch = batch_of(groups, specs)
    steps = poca._reward_steps(batch)
    gammas = {"extrinsic": 0.9, "gail": 0.8, "curiosity": 0.95, "rnd": 0.85}
    strengths = {"extrinsic": 0.7, "gail": 0.3, "curiosity": 0.2, "rnd": 0.1}
    targets = poca._targets(batch, 0.2)
    found, (returns_of, _) = targets.estimates, targets.of_timesteps
    for head, name in enumerate(NAMES):
        earned = None if name == "extrinsic" else poca.signals.sources[name].begin(steps)
        row, timestep = 0, 0
        for group in groups:
            series = [float(one) for one in group.rewards] if earned is None else [0.0] * group.span
            if earned is not None:
                for member in group.of(OWN):
                    for step in member.steps:
                        series[step.time] += float(earned[row])
                        row += 1
            values = found.values[timestep : timestep + group.span + 1, head].tolist()
            later = values[-1]
            for time in reversed(range(group.span)):
                value = strengths[name] * series[time] + gammas[name] * later
                assert returns_of[timestep + time, head].item() == pytest.approx(value, rel=1e-3, abs=1e-4)
                later = 0.95 * value + 0.05 * values[time]
            timestep += group.span + 1


def test_end_of_a_group_stops_the_extrinsic_return_only(demo: Path) -> None:
    """Other signals bootstrap beyond the end of a group."""
    settings = trainer(signals_of(NAMES, demo / "hybrid"), kind="poca")
    poca = algorithm_of(OWN, PLAIN, settings, torch.Generator().manual_seed(0))
    specs = specs_of(PLAIN)
    groups = world(poca, specs).groups(6, over=True)
    for group in groups:
        for member in group.members:
            member.terminated, member.interrupted = member.ended, False
            member.until = min(member.until, group.span)
    batch = batch_of(groups, specs)
    steps = poca._reward_steps(batch)
    targets = poca._targets(batch, 0.2)
    prepared, (returns_of, values_of) = targets.prepared, targets.of_timesteps
    rewards = {"extrinsic": 0.7 * batch.groups.rewards}
    for name, strength in (("gail", 0.3), ("rnd", 0.1)):
        earned = strength * poca.signals.sources[name].begin(steps)
        rewards[name] = by_series(earned, prepared.index.timesteps, prepared.index.in_series)
    last = np.cumsum(batch.groups.spans) - 1
    for name, series in rewards.items():
        returns = returns_of[prepared.index.last - 1, NAMES.index(name)].numpy()
        stops = np.isclose(returns, series[last], rtol=1e-5, atol=1e-6)
        assert stops.all() == (name == "extrinsic"), name
        if name != "extrinsic":  # no member remains, so the return bootstraps with the value of episode starts
            begun = values_of[prepared.index.first, NAMES.index(name)].numpy().mean()
            gamma = {"gail": 0.8, "rnd": 0.85}[name]
            share = {"gail": share_of(demo / "hybrid", len(groups), len(batch.groups.rewards)), "rnd": 1.0}[name]
            np.testing.assert_allclose(returns, series[last] + gamma * share * begun, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- randomness


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_random_numbers_do_not_depend_on_signals_without_networks(kind: str, demo: Path) -> None:
    """The generator initializes actor and critic, and an update samples only the orders of minibatches."""
    settings = trainer(RewardSignals(extrinsic=ExtrinsicSettings()), kind=kind)
    alone, generator = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    if kind == "ppo":
        networks: Any = AgentNetworks(PLAIN, settings, alone)
        algorithm: Any = algorithm_of("Test", PLAIN, settings, generator)
        batch: Any = played(algorithm)
    else:
        networks = GroupNetworks(OWN, PLAIN, settings, alone)
        algorithm = algorithm_of(OWN, PLAIN, settings, generator)
        batch = batch_of(world(algorithm, specs_of(PLAIN)).groups(4), specs_of(PLAIN))
    assert state(algorithm.networks.modules) == state(networks.modules)
    assert torch.equal(generator.get_state(), alone.get_state())
    if kind == "ppo":
        algorithm.update(batch, 1, 0)
        for _ in range(settings.hyperparameters.num_epoch):
            torch.randperm(batch.steps, generator=alone)
        assert torch.equal(generator.get_state(), alone.get_state())


def test_initial_actor_does_not_depend_on_reward_networks(demo: Path) -> None:
    """Reward networks are initialized after the actor, so the initial policy does not depend on them."""
    plain, rich = (
        algorithm_of("Test", PLAIN, trainer(signals_of(names, demo / "hybrid")), torch.Generator().manual_seed(3))
        for names in (["extrinsic"], NAMES)
    )
    assert state(plain.actor) == state(rich.actor)
