"""Self-play continues from its saved state after a crash of every process, or of coordination alone."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import yaml

from sparring.pipeline.messages.state import PolicyWeights, RunState
from tests.games.duel import simulator
from tests.services.self_play_runs import (
    KINDS,
    SELF_PLAY,
    STEPS,
    Play,
    Recorder,
    begin,
    match_table,
    plain_settings,
    run_states,
    saved_rules,
)
from tests.services.services_helpers import Training, balanced, json_lines

pytestmark = pytest.mark.usefixtures("fixed_order")


def snapshots(folder: Path, rules: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the snapshot files of the rules, by player."""
    return {
        f"{name}@{version}": (folder / name / "snapshots" / f"{version:09d}.safetensors").read_bytes()
        for name, side in rules["sides"].items()
        for version in side["window"]
    }


def check_continues_from(state: RunState, rules: Mapping[str, Any]) -> None:
    """The first state of a resumed run is the last saved one."""
    for name, side in rules["sides"].items():
        rated = state.ratings[name]
        assert rated.team == rules["queue"][0]
        assert rated.elo == rules["ratings"]["elo"][name]
        assert [rated.mu, rated.sigma] == rules["ratings"]["skills"][name]
        assert rated.ghost_steps == side["ghost"]
        assert {player: one.matches for player, one in rated.opponents.items()} == {
            player: matches for player, (matches, _) in side["records"].items() if player in rules["ratings"]["elo"]
        }
        assert all(one.elo == rules["ratings"]["elo"][player] for player, one in rated.opponents.items())


def check_lost_nothing(rules: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """No counter of the rules is below that of the earlier rules `before`."""
    assert rules["changes"] >= before["changes"]
    assert rules["ratings"]["matches"] >= before["ratings"]["matches"]
    assert max(map(int, rules["matchups"])) >= max(map(int, before["matchups"]))
    assert rules["assignment"]["serial"] >= before["assignment"]["serial"]
    for name, side in before["sides"].items():
        for key in ("version", "steps", "saved_at", "ghost", "swapped_at", "crossings"):
            assert rules["sides"][name][key] >= side[key], key
        assert rules["sides"][name]["teams"] == side["teams"]


# ---------------------------------------------------------------- crash of every process, in virtual time


async def crash_after(folder: Path, kind: str, weights: int) -> Play:
    """Runs self-play until learners have published so many weights, and then crashes every service."""
    one = KINDS[kind]
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, folder, [one.game(), one.game()], plain_settings(one))
        seen: list[PolicyWeights] = []

        def enough(topic: str, _key: str, record: Any) -> bool:
            if topic.startswith("policy-") and isinstance(record, PolicyWeights):
                seen.append(record)
            return len(seen) >= weights

        await play.recorder.event_at(enough).wait()
        tasks.cancel_scope.cancel()
    return play


async def resumed(folder: Path, kind: str) -> Play:
    """Resumes a run and plays it to its end."""
    one = KINDS[kind]
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        recorder = Recorder(session="b")
        recorder.install(stack.enter_context(pytest.MonkeyPatch.context()))
        plain = plain_settings(one, max_steps=2 * STEPS)
        play = await begin(tasks, stack, folder, [one.game(), one.game()], plain, recorder=recorder, resumed=True)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    return play


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("symmetric", 4),
        pytest.param("asymmetric", 9, marks=pytest.mark.slow),
        pytest.param("symmetric", 9, marks=pytest.mark.slow),
        pytest.param("asymmetric", 6, marks=pytest.mark.slow),
        pytest.param("poca", 3, marks=pytest.mark.slow),
        pytest.param("poca", 7, marks=pytest.mark.slow),
    ],
)
async def test_resumed_run_has_the_saved_snapshots_ratings_team_and_counters(
    tmp_path: Path, kind: str, weights: int
) -> None:
    """Matches are not rated again, and the step counts balance at the end, whichever update was the last."""
    await crash_after(tmp_path, kind, weights)
    before, table = saved_rules(tmp_path), match_table(tmp_path)
    pool = snapshots(tmp_path, before)
    assert pool
    play = await resumed(tmp_path, kind)
    check_continues_from(run_states(play.recorder)[0], before)
    first = play.recorder.assignments[0]
    assert first.serial >= before["assignment"]["serial"]
    check_lost_nothing(play.saved, before)
    assert play.table[: before["ratings"]["matches"]] == table[: before["ratings"]["matches"]]
    keys = [(line["source"], line["match"]) for line in play.table]
    assert len(keys) == len(set(keys)) == play.saved["ratings"]["matches"]
    for name in play.graph.names:
        step_counts = play.graph.step_counts(name)
        assert balanced(step_counts)
        assert step_counts["trained"] >= 2 * STEPS


# ---------------------------------------------------------------- real processes

ENDLESS = 100_000_000


def configuration(folder: Path) -> Path:
    """Writes the configuration of an endless run of short duels; returns its path."""
    plain = plain_settings(
        KINDS["symmetric"],
        self_play=SELF_PLAY | {"save_steps": 1024, "team_change": 3072, "swap_steps": 1024},
        hyperparameters={"batch_size": 128, "buffer_size": 1024, "num_epoch": 1},
        max_steps=ENDLESS,
        time_horizon=32,
        summary_freq=1024,
    )
    plain["pipeline"] = {"mode": "overlap", "recovery_interval": 0.2, "restarts": {"backoff_s": 0.1}}
    plain["simulators"] = [simulator(areas=16) | {"count": 2}]
    file = folder / "duel.yaml"
    file.write_text(yaml.safe_dump(plain))
    return file


class DuelTraining(Training):
    """A run of duels."""

    def steps(self) -> int:
        """Returns the learner steps that the console shows."""
        found = [re.search(r"^Goal\s+step\s+([\d,_]+)", line) for line in list(self.lines)]
        return max((int(re.sub(r"\D", "", one[1])) for one in found if one), default=0)

    def reaches(self, steps: int) -> None:
        """Waits until the learner has made so many steps."""
        self.wait_for(lambda _: self.steps() >= steps)

    def service_log(self, service: str, event: str) -> list[dict[str, Any]]:
        """Returns the lines of a service's log with an event."""
        lines = json_lines(self.directory / "logs" / f"{service}.jsonl")
        return [entry for entry in lines if entry["event"] == event]


def check_ended(training: DuelTraining, status: str) -> dict[str, int]:
    """Checks that a run ended in order and rated no match twice; returns its step counts."""
    assert training.end() == 0, "\n".join(training.lines)
    assert training.summary["status"] == status
    step_counts: dict[str, int] = training.summary["behaviors"]["Goal"]["step_counts"]
    assert step_counts["ghost"] > 0
    table = match_table(training.directory)
    keys = [(line["source"], line["match"]) for line in table]
    assert len(keys) == len(set(keys)) == saved_rules(training.directory)["ratings"]["matches"]
    return step_counts


@pytest.mark.slow
def test_run_whose_processes_were_all_killed_resumes_from_its_saved_state(tmp_path: Path) -> None:
    """No process outlives the supervisor, and `--resume` has the same snapshots, ratings, team and counters."""
    file = configuration(tmp_path)
    training = DuelTraining(tmp_path, str(file), "--seed", "3")
    training.reaches(12_000)
    family = psutil.Process(training.process.pid).children(recursive=True)
    os.kill(training.process.pid, signal.SIGKILL)
    training.process.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    before, table = saved_rules(training.directory), match_table(training.directory)
    assignments = training.service_log("coordination", "opponents_assigned")
    pool = snapshots(training.directory, before)
    assert pool
    assert before["changes"] >= 1
    again = DuelTraining(tmp_path, str(file), "--resume", "--max-steps", str(before["sides"]["Goal"]["trained"] + 8192))
    step_counts = check_ended(again, "completed")
    assert balanced(step_counts), str(step_counts)
    assert step_counts["trained"] >= before["sides"]["Goal"]["trained"]
    check_lost_nothing(saved_rules(again.directory), before)
    assert match_table(again.directory)[: before["ratings"]["matches"]] == table[: before["ratings"]["matches"]]
    since = again.service_log("coordination", "opponents_assigned")[len(assignments) :]
    assert since[0]["serial"] >= before["assignment"]["serial"]
    assert since[0]["changes"] >= before["changes"]
    assert len(again.service_log("coordination", "step_counts_restored")) == 1


@pytest.mark.slow
def test_killed_coordination_continues_by_itself(tmp_path: Path) -> None:
    """No other service restarts, no step is lost, no match is rated twice, and no counter falls."""
    training = DuelTraining(tmp_path, str(configuration(tmp_path)), "--seed", "4")
    training.reaches(8_000)
    training.kill("coordination")
    training.wait_for(lambda lines: any("failed" in line and "coordination" in line for line in lines))
    before = saved_rules(training.directory)
    training.reaches(training.steps() + 10_000)
    training.process.send_signal(signal.SIGINT)
    step_counts = check_ended(training, "stopped")
    assert balanced(step_counts), str(step_counts)
    assert step_counts["lost"] == 0
    assert step_counts["produced"] == training.simulator_steps()
    assert [entry["part"] for entry in training.log() if entry["event"] == "failed"] == ["coordination"]
    assert not training.service_log("learning-Goal", "restored")
    check_lost_nothing(saved_rules(training.directory), before)
    assignments = training.service_log("coordination", "opponents_assigned")
    for key in ("serial", "changes"):
        numbers = [entry[key] for entry in assignments]
        assert numbers == sorted(numbers)
