"""Trains in an environment of Gymnasium, follows the run, and plays with what was learned: `python from_python.py`."""

import sys

import gymnasium

import sparring

CONFIG = {
    "behaviors": {
        "Cart": {
            "hyperparameters": {"batch_size": 64, "buffer_size": 1024, "learning_rate": 1e-3, "num_epoch": 6},
            "network_settings": {"hidden_units": 64, "num_layers": 2},
            "reward_signals": {"extrinsic": {"gamma": 0.98}},
            "max_steps": 40_000,
            "summary_freq": 4_000,
        }
    },
    "simulators": [{"name": "gymnasium", "areas": 8, "options": {"env_id": "CartPole-v1", "behavior": "Cart"}}],
}


def main(results_dir: str = "results") -> float:
    """Returns the mean length of five episodes with the trained policy."""
    run = sparring.start(CONFIG, {"pipeline.export": False}, results_dir=results_dir, seed=1)
    for event in run:
        if event.kind == "interval" and event.values["reward"] is not None:  # None where no episode has ended
            print(f"{event.values['step']:>8,} steps  reward {event.values['reward']:.0f}")
            if event.values["reward"] > 400:
                run.stop()
    result = run.wait()

    env = gymnasium.make("CartPole-v1")
    policy = sparring.load(result.folder, env=env)
    lengths = []
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        length, over = 0, False
        while not over:
            action, _ = policy.act(observation, deterministic=True)
            observation, _, terminated, truncated, _ = env.step(action)
            length, over = length + 1, terminated or truncated
        lengths.append(length)
    env.close()
    print(f"the pole stands for {sum(lengths) / len(lengths):.0f} of 500 steps")
    return sum(lengths) / len(lengths)


if __name__ == "__main__":
    main(*sys.argv[1:])
