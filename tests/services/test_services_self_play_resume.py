"""Self-play that goes on where it stood: after everything died at once, and after coordination alone did."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import torch
import yaml
from trio.testing import MockClock

from sparring.pipeline.messages.state import PolicyWeights, RunState
from tests.services.self_play_runs import (
    KINDS,
    SELF_PLAY,
    STEPS,
    Play,
    Witness,
    begin,
    match_table,
    plain_settings,
    run_states,
    same_order,
    saved_rules,
)
from tests.services.services_helpers import Training, balanced, json_lines


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


@pytest.fixture(autouse=True)
def one_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    same_order(monkeypatch, 0)
    yield
    torch.set_num_threads(before)


def snapshots(folder: Path, rules: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the pool."""
    return {
        f"{name}@{version}": (folder / name / "snapshots" / f"{version:09d}.safetensors").read_bytes()
        for name, side in rules["sides"].items()
        for version in side["window"]
    }


def check_goes_on_from(state: RunState, rules: Mapping[str, Any]) -> None:
    """The first state of a run that goes on is the last one that was saved."""
    for name, side in rules["sides"].items():
        rated = state.ratings[name]
        assert rated.team == rules["queue"][0]
        assert rated.elo == rules["elo"][name]
        assert [rated.mu, rated.sigma] == rules["skills"][name]
        assert rated.ghost_steps == side["ghost"]
        assert {player: one.matches for player, one in rated.opponents.items()} == {
            player: matches for player, (matches, _) in side["records"].items() if player in rules["elo"]
        }
        assert all(one.elo == rules["elo"][player] for player, one in rated.opponents.items())


def check_lost_nothing(rules: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Counters of a later state are not below those of an earlier one."""
    for key in ("changes", "numbers", "matches"):
        assert rules[key] >= before[key], key
    assert rules["assignment"]["serial"] >= before["assignment"]["serial"]
    for name, side in before["sides"].items():
        for key in ("version", "steps", "saved_at", "ghost", "swapped_at", "crossings"):
            assert rules["sides"][name][key] >= side[key], key
        assert rules["sides"][name]["teams"] == side["teams"]


# ---------------------------------------------------------------- everything dies at once, in virtual time


async def until_dead(folder: Path, kind: str, weights: int) -> Play:
    """A run of which everything dies when the last learner has published so many weights."""
    one = KINDS[kind]
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, folder, [one.game(), one.game()], plain_settings(one))
        seen: list[PolicyWeights] = []

        def enough(topic: str, _key: str, record: Any) -> bool:
            if topic.startswith("policy-") and isinstance(record, PolicyWeights):
                seen.append(record)
            return len(seen) >= weights

        await play.witness.trap(enough).wait()
        tasks.cancel_scope.cancel()
    return play


async def resumed(folder: Path, kind: str) -> Play:
    """The same run, gone on with, to its end."""
    one = KINDS[kind]
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        witness = Witness(session="b")
        witness.install(stack.enter_context(pytest.MonkeyPatch.context()))
        plain = plain_settings(one, max_steps=2 * STEPS)
        play = await begin(tasks, stack, folder, [one.game(), one.game()], plain, witness=witness, resumed=True)
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
async def test_a_run_goes_on_with_the_pool_ratings_team_and_counters_that_it_had_saved(
    tmp_path: Path, kind: str, weights: int
) -> None:
    """At whatever update it died; matches are not rated again, and the books balance at the end."""
    await until_dead(tmp_path, kind, weights)
    before, table = saved_rules(tmp_path), match_table(tmp_path)
    pool = snapshots(tmp_path, before)
    assert pool
    play = await resumed(tmp_path, kind)
    check_goes_on_from(run_states(play.witness)[0], before)
    first = play.witness.assignments[0]
    assert first.serial >= before["assignment"]["serial"]
    check_lost_nothing(play.saved, before)
    assert play.table[: before["matches"]] == table[: before["matches"]]
    keys = [(line["source"], line["match"]) for line in play.table]
    assert len(keys) == len(set(keys)) == play.saved["matches"]
    for name in play.graph.names:
        step_counts = play.graph.step_counts(name)
        assert balanced(step_counts)
        assert step_counts["trained"] >= 2 * STEPS


# ---------------------------------------------------------------- real processes

ENDLESS = 100_000_000


def configuration(folder: Path) -> Path:
    """A duel of short matches that never ends by itself."""
    plain = plain_settings(
        KINDS["symmetric"],
        self_play=SELF_PLAY | {"save_steps": 1024, "team_change": 3072, "swap_steps": 1024},
        hyperparameters={"batch_size": 128, "buffer_size": 1024, "num_epoch": 1},
        max_steps=ENDLESS,
        time_horizon=32,
        summary_freq=1024,
    )
    plain["pipeline"] = {"mode": "overlap", "recovery_interval": 0.2, "restarts": {"backoff_s": 0.1}}
    plain["simulators"] = [{"name": "duel", "count": 2, "areas": 16}]
    file = folder / "duel.yaml"
    file.write_text(yaml.safe_dump(plain))
    return file


class Duels(Training):
    """A run of duels."""

    def steps(self) -> int:
        """Learner steps, as the console says."""
        found = [re.search(r"^Goal\s+step\s+([\d,_]+)", line) for line in list(self.lines)]
        return max((int(re.sub(r"\D", "", one[1])) for one in found if one), default=0)

    def reaches(self, steps: int) -> None:
        """Returns when the learner has made so many steps."""
        self.wait_for(lambda _: self.steps() >= steps)

    def service_log(self, service: str, event: str) -> list[dict[str, Any]]:
        """Lines of a service's log that tell of an event."""
        lines = json_lines(self.directory / "logs" / f"{service}.jsonl")
        return [entry for entry in lines if entry["event"] == event]


def check_ended(training: Duels, status: str) -> dict[str, int]:
    """It ended in order, and no match is rated twice; returns the books."""
    assert training.end() == 0, "\n".join(training.lines)
    assert training.summary["status"] == status
    step_counts: dict[str, int] = training.summary["behaviors"]["Goal"]["step_counts"]
    assert step_counts["ghost"] > 0
    table = match_table(training.directory)
    keys = [(line["source"], line["match"]) for line in table]
    assert len(keys) == len(set(keys)) == saved_rules(training.directory)["matches"]
    return step_counts


@pytest.mark.slow
def test_a_run_whose_processes_were_all_killed_goes_on_from_its_saved_state(tmp_path: Path) -> None:
    """Nothing outlives the supervisor; `--resume` has the same pool, ratings, team and counters."""
    file = configuration(tmp_path)
    training = Duels(tmp_path, str(file), "--seed", "3")
    training.reaches(12_000)
    family = psutil.Process(training.process.pid).children(recursive=True)
    os.kill(training.process.pid, signal.SIGKILL)
    training.process.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    before, table = saved_rules(training.directory), match_table(training.directory)
    told = training.service_log("coordination", "assigned")
    pool = snapshots(training.directory, before)
    assert pool
    assert before["changes"] >= 1
    again = Duels(tmp_path, str(file), "--resume", "--max-steps", str(before["sides"]["Goal"]["trained"] + 8192))
    step_counts = check_ended(again, "completed")
    assert balanced(step_counts), str(step_counts)
    assert step_counts["trained"] >= before["sides"]["Goal"]["trained"]
    check_lost_nothing(saved_rules(again.directory), before)
    assert match_table(again.directory)[: before["matches"]] == table[: before["matches"]]
    since = again.service_log("coordination", "assigned")[len(told) :]
    assert since[0]["serial"] >= before["assignment"]["serial"]
    assert since[0]["changes"] >= before["changes"]
    assert len(again.service_log("coordination", "books_restored")) == 1


@pytest.mark.slow
def test_coordination_that_was_killed_goes_on_by_itself(tmp_path: Path) -> None:
    """No other service ends for it, nothing is lost, no match is rated twice, no number falls, the books balance."""
    training = Duels(tmp_path, str(configuration(tmp_path)), "--seed", "4")
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
    told = training.service_log("coordination", "assigned")
    for key in ("serial", "changes"):
        numbers = [entry[key] for entry in told]
        assert numbers == sorted(numbers)
