"""Data sets of Minari, recorded here, are read as our own recordings are."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest

from sparring.pipeline.demonstrations.episodes import RecordingError, encode, read
from sparring.pipeline.demonstrations.library import load, read_any, spec_of
from sparring.pipeline.specs import ActionSpec

minari = pytest.importorskip("minari")
h5py = pytest.importorskip("h5py")
EpisodeBuffer = pytest.importorskip("minari.data_collector").EpisodeBuffer

EPISODES = 3


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that records random episodes, and returns the data set."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))

    def record(env_id: str, name: str):
        environment = gymnasium.make(env_id, max_episode_steps=30)
        environment.action_space.seed(1)
        buffers = []
        for seed in range(EPISODES):
            seen, _ = environment.reset(seed=seed)
            observations, actions, outcomes, over = [seen], [], [], False
            while not over:
                actions.append(environment.action_space.sample())
                seen, *outcome, _ = environment.step(actions[-1])
                observations.append(seen)
                outcomes.append(outcome)
                over = outcome[1] or outcome[2]
            rewards, terminations, truncations = map(np.array, zip(*outcomes, strict=True))
            columns = {"observations": np.stack(observations), "actions": np.stack(actions), "rewards": rewards}
            ends = {"terminations": terminations, "truncations": truncations}
            buffers.append(EpisodeBuffer(id=seed, **columns, **ends))
        made = minari.create_dataset_from_buffers(name, buffers, env=environment, algorithm_name="random")
        environment.close()
        return made

    return record


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_discrete_actions_and_ends_are_those_of_the_episodes(recorded, tmp_path):
    dataset = recorded("CartPole-v1", "cart/random-v0")
    found = read_any(Path("minari:cart/random-v0"))
    assert found.spec.actions == ActionSpec(discrete=(2,)) == spec_of("minari:cart/random-v0").actions
    episodes = [*dataset.iterate_episodes()]
    lengths = [len(one.rewards) for one in episodes]
    assert found.columns["lengths"].tolist() == lengths
    np.testing.assert_array_equal(found.columns["discrete"][:, 0], np.concatenate([one.actions for one in episodes]))
    seen = np.concatenate([one.observations[:-1] for one in episodes])
    np.testing.assert_allclose(found.columns["observation.0"], seen, rtol=1e-6)
    final = np.stack([one.observations[-1] for one in episodes])
    np.testing.assert_allclose(found.columns["final_observation.0"], final, rtol=1e-6)
    assert found.columns["terminated"].tolist() == [bool(one.terminations[-1]) for one in episodes]
    file = tmp_path / "same.episodes.safetensors"
    file.write_bytes(encode(found))
    for name, column in read(file).columns.items():
        np.testing.assert_array_equal(column, found.columns[name])
    assert load("minari:cart/random-v0", "Cart", found.spec).episodes == EPISODES


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_continuous_actions_are_scaled_to_what_simulators_receive(recorded):
    dataset = recorded("Pendulum-v1", "pendulum/random-v0")
    found = read_any(Path("minari:pendulum/random-v0"))
    taken = np.concatenate([one.actions for one in dataset.iterate_episodes()])
    np.testing.assert_allclose(2 * found.columns["continuous"], taken, atol=1e-5)
    assert not found.columns["terminated"].any(), "a limit of time is an interruption"


def test_data_set_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(RecordingError, match=r"minari:cart/none-v0.*minari download cart/none-v0"):
        read_any(Path("minari:cart/none-v0"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_damaged_data_set_is_refused(recorded, monkeypatch, tmp_path):
    recorded("CartPole-v1", "cart/short-v0")
    (path,) = tmp_path.rglob("main_data.hdf5")
    with h5py.File(path, "a") as file:
        rows = file["episode_1/observations"][:-1]
        del file["episode_1/observations"]
        file["episode_1/observations"] = rows
    with pytest.raises(
        RecordingError, match=r"cart/short-v0, whose episode 1 cannot be read \(ValueError: .* rewards,"
    ):
        read_any(Path("minari:cart/short-v0"))
    with h5py.File(path, "a") as file:
        actions = file["episode_0/actions"][:] * 1.5
        del file["episode_0/actions"]
        file["episode_0/actions"] = actions
    with pytest.raises(RecordingError, match="fractional actions of the space Discrete"):
        read_any(Path("minari:cart/short-v0"))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(RecordingError, match=r"cart/short-v0, whose episode 0 cannot be read \(OSError: .*truncated"):
        read_any(Path("minari:cart/short-v0"))

    def load(_):
        raise AssertionError

    monkeypatch.setattr("minari.load_dataset", load)
    with pytest.raises(RecordingError, match="minari:cart/any-v0, which cannot be read"):
        read_any(Path("minari:cart/any-v0"))
