"""Learning, proven by learning: `python scripts/bench/learning.py [cartpole] [balance] [goal] ... [--seeds 3]`.

Runs the whole pipeline on each task, once for each seed, and prints the curve and the figure that its
bar is about. Exit status 1 if a bar is missed.

cartpole  Gymnasium CartPole-v1: mean return of the last 100 episodes >= 475 within 150,000 steps.
cartpole-sac   the same with SAC: mean of the last three intervals > 450 within 30,000.
balance   3DBall's hyperparameters, 12 agents: episodes last more than 10 x as long as untrained, within 200,000.
goal      the 1-D goal game, discrete and continuous, one agent, lockstep: mean reward > 0.9 within 3,000.
minigrid-empty   MiniGrid-Empty-8x8-v0 from pixels: mean return of the last 100 episodes > 0.9 within 100,000 (so more
          than 90 % reach the goal). Only where named; needs `pip install minigrid`.
minigrid-memory  MiniGrid-MemoryS7-v0 with an LSTM: > 0.7 within 1,000,000. Without memory it is 0.49, as half
          of the choices are right. Only where named, as above.
spread    PettingZoo mpe2 simple_spread_v3: mean return above -22 within 300,000; untrained it is -27.
spread-groups, spread-ppo   the same in lockstep for 1,000,000 steps, with MA-POCA from the mean reward of the three as
          their group's, and with PPO from each one's own, same settings: mean over the last three intervals. MA-POCA
          above -17, PPO, a control, below it. Only where named.
rooms     one member has to end itself before the others can earn: mean return of the group in the last interval,
          MA-POCA above 0.87 (90 % of the best possible 0.964) within 100,000 steps.
rooms-ppo the same with PPO, a control: below 0.43, which is less than half.
goals, goals-discrete   the goal game for groups of two, lockstep: above 0.9 within 3,000.
goals-mixed   the same with a behavior for each member: above 0.9 within 3,000 for each.
crowd     20 members that come and go: mean return of the group above 12; a random policy has 2.9.
soccer-scripted   a team of two against a scripted side: mean return of the group above -0.5 within 2,000,000; a random
          policy has -0.98. Only where named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Task:
    """A configuration, changes to it, and the bar.

    Attributes:
        config: file in configs/.
        change: edits the configuration.
        figure: of a finished run, from its intervals and its summary.
        bar: the figure has to be above it.
        below: it has to be below it instead: a control.
    """

    config: str
    change: Callable[[dict[str, Any]], None]
    figure: Callable[[list[dict[str, Any]], dict[str, Any]], float]
    bar: float
    below: bool = False

    def misses(self, figure: float) -> bool:
        """Whether the result misses the bar."""
        return figure >= self.bar if self.below else figure <= self.bar


def last_of_groups(intervals: list[dict[str, Any]], _summary: dict[str, Any]) -> float:
    """Returns the lowest mean return over behaviors in the last interval."""
    last = {one["behavior"]: one["group_reward"] for one in intervals if one["group_reward"] is not None}
    return float(min(last.values()))


def last_100(_intervals: list[dict[str, Any]], summary: dict[str, Any]) -> float:
    """Returns the mean return of the last 100 episodes."""
    return float(summary["reward_mean_last100"])


def times_longer(intervals: list[dict[str, Any]], _summary: dict[str, Any]) -> float:
    """Returns the longest mean episode of an interval over that of the first, which no trained weights acted."""
    lengths = [one["episode_length"] for one in intervals if one["episode_length"]]
    return float(max(lengths) / lengths[0])


def nothing(_plain: dict[str, Any]) -> None:
    """Runs the configuration as it is."""


def twelve(plain: dict[str, Any]) -> None:
    """Sets one simulator with 12 areas, and 200,000 steps."""
    plain["behaviors"]["Balance"]["max_steps"] = 200_000
    plain["simulators"] = [{"name": "balance", "areas": 12}]


def goal(plain: dict[str, Any]) -> None:
    """Sets `max_steps` so that the run ends within 3,000 steps: the last update may exceed it by less than a buffer."""
    plain["behaviors"]["Goal"]["max_steps"] = 3_000 - 64


def goal_discrete(plain: dict[str, Any]) -> None:
    """Changes the actions to a discrete branch."""
    goal(plain)
    plain["simulators"] = [{"name": "goal", "options": {"discrete": True}}]


def last_three(kind: str) -> Callable[[list[dict[str, Any]], dict[str, Any]], float]:
    """Returns the mean of the last three intervals."""
    return lambda intervals, _: sum(one[kind] for one in intervals[-3:]) / 3


def own_rewards(plain: dict[str, Any]) -> None:
    """Trains with PPO, from each agent's own reward."""
    plain["behaviors"]["simple_spread"]["trainer_type"] = "ppo"
    for option in ("groups", "shared_reward"):
        del plain["simulators"][0]["options"][option]


def goals(plain: dict[str, Any]) -> None:
    """Changes the configuration of mixed groups to one behavior for both members."""
    plain["behaviors"] = {"Goals": {}}
    plain["default_settings"]["max_steps"] = 3_000 - 64
    plain["simulators"] = [{"name": "goals"}]


def goals_discrete(plain: dict[str, Any]) -> None:
    """Changes the actions to a discrete branch."""
    goals(plain)
    plain["simulators"] = [{"name": "goals", "options": {"discrete": True}}]


def alone(plain: dict[str, Any]) -> None:
    """Trains with PPO, which adds the group's reward to each member's own."""
    plain["behaviors"]["Rooms"]["trainer_type"] = "ppo"


TASKS = {
    "cartpole": Task("cartpole.yaml", nothing, last_100, 475.0),
    "cartpole-sac": Task("cartpole-sac.yaml", nothing, last_three("reward"), 450.0),
    "balance": Task("balance.yaml", twelve, times_longer, 10.0),
    "goal": Task("goal.yaml", goal, last_100, 0.9),
    "goal-discrete": Task("goal.yaml", goal_discrete, last_100, 0.9),
    "spread": Task("spread.yaml", nothing, last_100, -22.0),
    "rooms": Task("rooms.yaml", nothing, last_of_groups, 0.87),
    "rooms-ppo": Task("rooms.yaml", alone, last_of_groups, 0.43, below=True),
    "goals": Task("goals-mixed.yaml", goals, last_of_groups, 0.9),
    "goals-discrete": Task("goals-mixed.yaml", goals_discrete, last_of_groups, 0.9),
    "goals-mixed": Task("goals-mixed.yaml", nothing, last_of_groups, 0.9),
    "crowd": Task("crowd.yaml", nothing, last_of_groups, 12.0),
}
NAMED = {
    "spread-groups": Task("spread-groups.yaml", nothing, last_three("group_reward"), -17.0),
    "spread-ppo": Task("spread-groups.yaml", own_rewards, last_three("reward"), -17.0, below=True),
    "soccer-scripted": Task("soccer-scripted.yaml", nothing, last_of_groups, -0.5),
    "minigrid-empty": Task("minigrid-empty.yaml", nothing, last_100, 0.9),
    "minigrid-memory": Task("minigrid-memory.yaml", nothing, last_100, 0.7),
}


def train(task: Task, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Trains one run; returns its intervals and the summary of its behavior."""
    plain = yaml.safe_load((ROOT / "configs" / task.config).read_text())
    task.change(plain)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / task.config
        config.write_text(yaml.safe_dump(plain))
        command = [sys.executable, "-m", "sparring", "train", str(config), "--results-dir", folder, "--run-id", "run"]
        subprocess.run([*command, "--seed", str(seed)], stdout=subprocess.DEVNULL, check=True)
        run = Path(folder) / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        figures, *_ = json.loads((run / "summary.json").read_text())["behaviors"].values()
    return [line for line in lines if line["type"] == "interval"], figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tasks", nargs="*", help=f"of {', '.join(TASKS | NAMED)} (default: all but MiniGrid and soccer)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    missed = 0
    for name in args.tasks or TASKS:
        task = (TASKS | NAMED)[name]
        for seed in range(1, args.seeds + 1):
            intervals, summary = train(task, seed)
            figure = task.figure(intervals, summary)
            missed += task.misses(figure)
            kind = "group_reward" if any(one["group_reward"] is not None for one in intervals) else "reward"
            curve = " ".join(f"{one[kind]:.4g}" for one in intervals if one[kind] is not None)
            side = "below" if task.below else "above"
            print(
                f"{name} seed {seed}: {figure:.4g} ({side} {task.bar:g}) after {summary['steps']:,} steps at "
                f"{summary['steps_per_s']:,.0f}/s; {kind} {curve}",
                flush=True,
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
