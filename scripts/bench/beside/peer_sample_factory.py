"""Sample Factory's APPO on a game: `python -m beside.peer_sample_factory GAME SEED FOLDER`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import run_rl

from beside.environments import MAKERS
from beside.settings import GAMES


def make(game: str, _name: str, _cfg: Any, _env_config: Any, render_mode: str | None = None) -> Any:
    return MAKERS[game]()


def main() -> int:
    game, seed, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    settings = GAMES[game]
    register_env(game, partial(make, game))
    workers = 2
    options = {
        "env": game,
        "experiment": f"{game}-{seed}",
        "train_dir": folder,
        "seed": seed,
        "device": "cpu",
        "train_for_env_steps": settings.steps,
        "num_workers": workers,
        "num_envs_per_worker": settings.environments // workers,
        "worker_num_splits": 2,
        "rollout": settings.horizon // 4,
        "recurrence": settings.horizon // 4,
        "use_rnn": False,
        "batch_size": settings.batch,
        "num_batches_per_epoch": settings.environments * settings.horizon // settings.batch,
        "num_epochs": settings.epochs,
        "learning_rate": settings.rate,
        "gamma": settings.discount,
        "gae_lambda": settings.trace,
        "exploration_loss_coeff": settings.entropy,
        "normalize_input": not settings.images,
        "normalize_returns": True,
        "save_every_sec": 100_000,
        "nonlinearity": "tanh",
    }
    if settings.images:
        options["obs_scale"] = 255.0
    else:
        options["encoder_mlp_layers"] = f"{settings.units} {settings.units}"
    words = []
    for name, value in options.items():
        words += [f"--{name}", *(str(value).split() if name == "encoder_mlp_layers" else [str(value)])]
    parser, _ = parse_sf_args(argv=words)
    return int(run_rl(parse_full_cfg(parser, argv=words)))


if __name__ == "__main__":
    sys.exit(main())
