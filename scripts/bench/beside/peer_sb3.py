"""Stable-Baselines3's PPO on a game: `python -m beside.peer_sb3 GAME SEED`."""

from __future__ import annotations

import sys

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from beside.environments import MAKERS
from beside.settings import GAMES


def main() -> None:
    game, seed = sys.argv[1], int(sys.argv[2])
    settings = GAMES[game]
    network: dict[str, object] = {"net_arch": [] if settings.images else [settings.units, settings.units]}
    if settings.images:
        network["features_extractor_kwargs"] = {"features_dim": settings.units}
    model = PPO(
        "CnnPolicy" if settings.images else "MlpPolicy",
        DummyVecEnv([MAKERS[game]] * settings.environments),
        learning_rate=settings.rate,
        n_steps=settings.horizon,
        batch_size=settings.batch,
        n_epochs=settings.epochs,
        gamma=settings.discount,
        gae_lambda=settings.trace,
        ent_coef=settings.entropy,
        policy_kwargs=network,
        seed=seed,
        device="cpu",
    )
    model.learn(settings.steps)


if __name__ == "__main__":
    main()
