"""PPO on MuJoCo beside the published results of CleanRL.

    python scripts/bench/mujoco_ppo.py [--preset cleanrl] [--envs Hopper-v4 ...] [--seeds 1 2 3] [--jobs 1]

The learner alone, without services: one environment for each seed, whose steps are acted by the newest weights (lag 0).
Horizon, minibatches, epochs, rates, gamma, lambda, clip range and entropy weight are CleanRL's in both presets:

plain     the defaults of this project for all else, with observations normalized: SiLU, He-normal weights, gradients
          not clipped, rewards not normalized; but samples are clipped to +-1 (`action_limit`), as in CleanRL.
cleanrl   the rest of `ppo_continuous_action.py`, as far as settings allow: tanh, orthogonal weights, gradient norm
          clipped to 0.5, Adam's epsilon 1e-5, rewards normalized, the value loss clipped.

docs/mujoco.md lists what no setting changes. `--set KEY=VALUE` changes a preset further, with the keys
of a configuration (`--set hyperparameters.beta=0.001`). The figure of a seed is the mean return of its last 100
episodes, as in the published table (openrlbenchmark's `metric_last_n_average_window`). Needs `pip install
'sparring[mujoco]'`. Writes a JSON file for each preset, environment and seed, and `curves.png` of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from exact_lag import merged
from gymnasium.spaces import Box, flatdim
from matplotlib.figure import Figure

from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.messages.segments import Episodes, Segments
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.arrays import to_environment
from sparring.pipeline.networks.device import load_arrays
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

HORIZON: Final = 2048
WINDOW: Final = 100
PUBLISHED: Final = {
    "HalfCheetah-v4": (1442.64, 46.03),
    "Hopper-v4": (2382.86, 271.74),
    "Walker2d-v4": (2287.95, 571.78),
}
"""Mean and deviation over 3 seeds of `ppo_continuous_action`: docs.cleanrl.dev/rl-algorithms/ppo, tag pr-424."""

PLAIN: Final[dict[str, Any]] = {
    "hyperparameters": {
        "batch_size": 64,
        "buffer_size": HORIZON,
        "num_epoch": 10,
        "beta": 0.0,
        "beta_schedule": "constant",
        "epsilon_schedule": "constant",
    },
    "network_settings": {"normalize": True, "hidden_units": 64, "action_limit": 1.0},
    "reward_signals": {"extrinsic": {}},
}
CLEANRL: Final[dict[str, Any]] = {
    "hyperparameters": {"max_grad_norm": 0.5, "adam_epsilon": 1e-5, "clip_value_loss": True},
    "network_settings": {"activation": "tanh", "initialization": "orthogonal"},
    "reward_signals": {"extrinsic": {"normalize": True}},
}


class Rollouts:
    """One environment, whose steps become records for a learner.

    Args:
        env_id: name in Gymnasium.
        seed: of the environment and of the actions.
    """

    def __init__(self, env_id: str, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the versions before v5
            self._env = gymnasium.make(env_id, disable_env_checker=True)
        size, actions = map(flatdim, (self._env.observation_space, self._env.action_space))
        self.spec = BehaviorSpec(
            observations=(ObservationSpec(name="state", shape=(size,)),), actions=ActionSpec(continuous=actions)
        )
        bounds = self._env.action_space
        assert isinstance(bounds, Box)
        self._middle, self._half = (bounds.low + bounds.high) / 2, (bounds.high - bounds.low) / 2
        self._source = np.random.default_rng(seed)
        self._observation = self._env.reset(seed=seed)[0].astype(np.float32)
        self._episode = self._records = 0
        self._return, self._length = 0.0, 0

    def collect(self, learner: Learner) -> Segments:
        """Plays `HORIZON` steps with the present weights of a learner."""
        network = Actor(self.spec, learner.settings.network_settings)
        load_arrays(network, learner.weights().arrays)
        actor = network.frozen()
        rows = {
            "observations": np.empty((HORIZON, *self._observation.shape), np.float32),
            "continuous": np.empty((HORIZON, self.spec.actions.continuous), np.float32),
            "log_probs": np.empty(HORIZON, np.float32),
            "rewards": np.empty(HORIZON, np.float32),
        }
        closed: list[tuple[int, np.ndarray, bool, bool]] = []
        returns: list[tuple[float, int]] = []
        for row in range(HORIZON):
            sampled, _, log_prob = actor.act((self._observation[None],), None, self._source)
            action = self._middle + self._half * to_environment(sampled, network.action_limit)[0]
            observation, reward, terminated, truncated, _ = self._env.step(action)
            rows["observations"][row] = self._observation
            rows["continuous"][row], rows["log_probs"][row], rows["rewards"][row] = sampled[0], log_prob[0], reward
            self._observation = observation.astype(np.float32)
            self._return, self._length = self._return + float(reward), self._length + 1
            if terminated or truncated or row + 1 == HORIZON:
                closed.append((row + 1, self._observation, terminated, truncated and not terminated))
            if terminated or truncated:
                returns.append((self._return, self._length))
                self._return, self._length = 0.0, 0
                self._observation = self._env.reset()[0].astype(np.float32)
        return self._record(learner, rows, closed, returns)

    def _record(
        self,
        learner: Learner,
        rows: dict[str, np.ndarray],
        closed: list[tuple[int, np.ndarray, bool, bool]],
        returns: list[tuple[float, int]],
    ) -> Segments:
        """Returns the steps as assembly would send them: a segment for each episode, the last possibly unfinished."""
        ends, following, terminated, interrupted = zip(*closed, strict=True)
        count = len(ends)
        agents = self._episode + np.arange(count, dtype=np.int64)
        self._episode += len(returns)
        self._records += 1
        return Segments(
            behavior=learner.behavior,
            source="stepping-0.1",
            origin="assembly.1",
            reached=self._records * HORIZON,
            flush=0,
            lengths=np.diff(ends, prepend=0).astype(np.int32),
            observations=(rows["observations"],),
            next_observations=(np.stack(following),),
            continuous=rows["continuous"],
            discrete=np.empty((HORIZON, 0), np.int32),
            log_probs=rows["log_probs"],
            masks=None,
            rewards=rows["rewards"],
            group_rewards=np.zeros(HORIZON, np.float32),
            versions=np.full(HORIZON, learner.version, np.int64),
            terminated=np.array(terminated),
            interrupted=np.array(interrupted),
            group_ended=np.zeros(count, np.bool_),
            teams=np.zeros(count, np.int32),
            groups=np.zeros(count, np.int64),
            agents=agents,
            simulators=np.zeros(count, np.int32),
            episodes=Episodes(
                returns=np.array([one for one, _ in returns], np.float32),
                lengths=np.array([length for _, length in returns], np.int32),
                group_returns=np.zeros(len(returns), np.float32),
                teams=np.zeros(len(returns), np.int32),
                outcomes=np.full(len(returns), -1, np.float32),
                shared_returns=np.zeros(len(returns), np.float32),
            ),
        )


def train(env_id: str, plain: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Trains one seed; returns step and return of every episode, the result, and the seconds."""
    torch.set_num_threads(1)
    began, rollouts = time.perf_counter(), Rollouts(env_id, seed)
    settings = TrainerSettings.model_validate({**plain, "max_steps": steps, "time_horizon": HORIZON})
    learner = Learner("MuJoCo", rollouts.spec, settings, seed)
    ended: list[int] = []
    returns: list[float] = []
    while learner.trained + HORIZON <= steps:
        record = rollouts.collect(learner)
        over = record.terminated | record.interrupted
        ended += (learner.trained + np.cumsum(record.lengths)[over]).tolist()
        returns += record.episodes.returns.tolist()
        learner.add(record)
        learner.update()
    seconds = time.perf_counter() - began
    figure = float(np.mean(returns[-WINDOW:]))
    print(f"{env_id} seed {seed}: {figure:.1f} after {learner.trained} steps, {seconds:.0f} s", flush=True)
    return {"env": env_id, "seed": seed, "steps": ended, "returns": returns, "figure": figure, "seconds": seconds}


def setting(text: str) -> dict[str, Any]:
    """Parses `section.key=value` into nested mappings; a value that is not JSON is text."""
    path, value = text.split("=", 1)
    try:
        found: Any = json.loads(value)
    except json.JSONDecodeError:
        found = value
    for key in reversed(path.split(".")):
        found = {key: found}
    return dict(found)


def smoothed(run: dict[str, Any], grid: np.ndarray) -> np.ndarray:
    """Returns the mean return of the last `WINDOW` episodes at each step of a grid; NaN before the first episode."""
    total = np.cumsum([0.0, *run["returns"]])
    until = np.searchsorted(run["steps"], grid, side="right")
    since = np.maximum(until - WINDOW, 0)
    means: np.ndarray = np.full(len(grid), np.nan)
    np.divide(total[until] - total[since], until - since, out=means, where=until > 0)
    return means


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws curves of all presets, a panel for each environment: mean and range of seeds, and the published mean."""
    names = sorted({run["env"] for run in runs})
    figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
    for axes, env_id in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        for preset in sorted({run["preset"] for run in runs if run["env"] == env_id}):
            shown = [run for run in runs if (run["env"], run["preset"]) == (env_id, preset)]
            grid = np.linspace(0, max(run["steps"][-1] for run in shown), 200)[10:]
            curves = np.stack([smoothed(run, grid) for run in shown])
            (line,) = axes.plot(grid, curves.mean(0), label=f"{preset} ({len(shown)})")
            axes.fill_between(grid, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
        if env_id in PUBLISHED:
            axes.axhline(PUBLISHED[env_id][0], color="gray", linestyle="--", linewidth=1, label="CleanRL, published")
        axes.set(title=env_id, xlabel="steps")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=80)


def runs_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Reads all runs whose files are in a folder, in the order of their names."""
    for path in sorted(folder.glob("*.json")):
        yield json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on MuJoCo beside CleanRL's published results.")
    parser.add_argument("--preset", choices=("plain", "cleanrl"), default="plain")
    parser.add_argument("--envs", nargs="+", default=sorted(PUBLISHED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings over those of the preset")
    parser.add_argument("--name", help="of the files and curves; the preset's where it is left out")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--output", type=Path, default=Path("results/mujoco"))
    asked = parser.parse_args()
    plain = PLAIN if asked.preset == "plain" else merged(PLAIN, CLEANRL)
    for text in asked.set:
        plain = merged(plain, setting(text))
    name = asked.name or asked.preset
    asked.output.mkdir(parents=True, exist_ok=True)
    tasks = [(env_id, seed) for env_id in asked.envs for seed in asked.seeds]
    # MuJoCo writes its warnings to a file in the working directory.
    with ProcessPoolExecutor(asked.jobs, initializer=os.chdir, initargs=(asked.output,)) as pool:
        futures = [pool.submit(train, env_id, plain, asked.steps, seed) for env_id, seed in tasks]
        for future in futures:
            run = {"preset": name, "settings": plain, **future.result()}
            (asked.output / f"{name}-{run['env']}-{run['seed']}.json").write_text(json.dumps(run))
    runs = list(runs_of(asked.output))
    for env_id in asked.envs:
        figures = [run["figure"] for run in runs if (run["env"], run["preset"]) == (env_id, name)]
        mean, deviation = PUBLISHED.get(env_id, (float("nan"), float("nan")))
        print(
            f"{env_id}: {np.mean(figures):.1f} +- {np.std(figures):.1f} over {len(figures)} seeds; "
            f"published {mean:.1f} +- {deviation:.1f}"
        )
    draw(runs, asked.output / "curves.png")


if __name__ == "__main__":
    main()
