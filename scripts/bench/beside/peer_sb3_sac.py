"""Stable-Baselines3's SAC on an environment: `python -m beside.peer_sb3_sac SETTINGS SEED FOLDER`.

`SETTINGS` is JSON, see `sac_beside_sb3.py`. It leaves `evaluation.json` in the folder: the returns of episodes that the
trained policy plays with its most likely actions, and the seconds of CPU time that it took to train.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import gymnasium
from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv

from beside.environments import recorded


def main() -> None:
    settings, seed, folder = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    count = settings["environments"]
    model = SAC(
        "MlpPolicy",
        DummyVecEnv([recorded] * count),
        learning_rate=settings["rate"],
        buffer_size=settings["replay"],
        learning_starts=settings["first"],
        batch_size=settings["batch"],
        tau=settings["tau"],
        gamma=settings["discount"],
        train_freq=max(1, settings["steps_per_update"] // count),
        gradient_steps=max(1, count // settings["steps_per_update"]),
        policy_kwargs={"net_arch": [settings["units"]] * 2},
        seed=seed,
        device="cpu",
    )
    model.learn(settings["steps"])
    seconds = time.process_time()
    played = DummyVecEnv([lambda: gymnasium.make(settings["env_id"])])
    played.seed(settings["evaluation_seed"])
    returns, _ = evaluate_policy(model, played, settings["episodes"], return_episode_rewards=True, warn=False)
    (folder / "evaluation.json").write_text(json.dumps({"returns": returns, "CPU s": seconds}))


if __name__ == "__main__":
    main()
