"""Matches are recorded from their first frame to their last, now and then, in few and small files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sparring.pipeline.games.soccer import Soccer
from sparring.pipeline.games.tag import Tag
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.settings.load import parse_settings
from sparring.pipeline.simulation.replays import FOLDER_VARIABLE, MOST_BYTES, Recorder, write_replay
from sparring.services.page.runs import Runs
from sparring.services.supervision.topology import simulator_plans
from tests.page.page_runs import interval, write_run


def play(game: Any, steps: int) -> list[tuple[BehaviorReport, ...]]:
    """Plays at random; returns all reports."""
    random, reports = np.random.default_rng(1), [game.reset({}, 1)]
    for _ in range(steps):
        actions = {}
        for report in reports[-1]:
            rows, spec = len(report.decisions.agents), game.behaviors()[report.behavior].actions
            actions[report.behavior] = BehaviorActions(
                behavior=report.behavior,
                agents=report.decisions.agents,
                continuous=random.uniform(-1, 1, (rows, spec.continuous)).astype(np.float32),
                discrete=random.integers(0, [*spec.discrete] or 1, (rows, len(spec.discrete))).astype(np.int32),
            )
        reports.append(game.step(actions))
    return reports


def read(folder: Path) -> list[tuple[dict[str, Any], list[Any]]]:
    found = []
    for path in sorted(folder.glob("replay-*.jsonl")):
        head, *frames = map(json.loads, path.read_text().splitlines())
        found.append((head, frames))
    return found


@pytest.mark.parametrize("make", [lambda: Soccer(3, every=10), lambda: Tag(3)], ids=["soccer", "tag"])
def test_recorded_match_is_that_of_the_first_area_and_changes_nothing(tmp_path: Path, make: Any) -> None:
    game, now = make(), iter(range(10**6))
    Recorder(game, tmp_path, every=1, clock=lambda: float(next(now)))
    places, step = [], game.step

    def watch(actions: Any) -> Any:
        places.append([[round(value, 3) for value in place] for place in game.frame()])
        return step(actions)

    game.step = watch
    reports = play(game, 150)
    plain = play(make(), 150)
    for one, other in zip(reports, plain, strict=True):
        assert str(one) == str(other)
    (head, lines), *_ = read(tmp_path)
    frames = [[place for place in line if isinstance(place, list)] for line in lines]
    assert len(head["moving"]) == len(frames[0])
    assert frames[:-1] == places[: len(frames) - 1]
    ended = next(at for at, seen in enumerate(reports) if any(one.ends and 0 in one.ends.agents for one in seen))
    assert len(frames) == ended + 1
    outcomes = {str(team): float(one.ends.outcomes[0]) for team, one in enumerate(reports[ended])}  # type: ignore[union-attr,index]
    assert head["result"] == outcomes
    scores = [line[-1]["score"] for line in lines if isinstance(line[-1], dict)]
    assert all(score == [0, 0] for score in scores[:-1])
    if isinstance(game, Soccer):
        assert scores[-1] == [float(outcomes[team] == 1) for team in ("0", "1")]
    left, bottom, right, top = head["field"]
    for x, y, _ in (place for frame in frames for place in frame):
        assert left <= x <= right
        assert bottom <= y <= top


def test_one_match_in_many_is_recorded(tmp_path: Path) -> None:
    game, now = Soccer(8, every=10), iter(range(10**6))
    Recorder(game, tmp_path, every=40, clock=lambda: float(next(now)))
    reports = play(game, 600)
    matches = sum(len(one.ends.matches) // 2 for seen in reports for one in seen if one.ends is not None) // 2  # type: ignore[arg-type]
    assert 1 < len(read(tmp_path)) <= 1 + matches / 40


def test_files_are_thinned_evenly_and_keep_first_and_last(tmp_path: Path) -> None:
    for time_s in range(1, 400):
        write_replay(tmp_path, {}, [], {}, float(time_s), most=9)
    made = [head["time_s"] for head, _ in read(tmp_path)]
    assert (len(made), made[0], made[-1]) == (9, 1, 399)
    assert max(np.diff(made)) < 4 * 399 / 8


def test_long_match_is_recorded_in_part_and_a_full_disk_ends_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    game = Tag(1)
    recorder = Recorder(game, tmp_path / "file", every=1)
    game.on_end(np.array([0]))
    for _ in range(20_000):
        recorder._add()
    assert recorder._size < MOST_BYTES + 200
    (tmp_path / "file").write_text("in the way")
    game.on_end(np.array([0]))
    play(game, 300)
    assert capsys.readouterr().err.count("no further matches are recorded") == 1


def test_only_the_first_simulator_of_a_run_with_a_folder_records() -> None:
    text = "behaviors: {A: {}}\nsimulators: [{name: tag, count: 2}]"
    settings = parse_settings(text, "test.yaml").settings
    for folder, expected in ((Path("/run"), ["/run/replays", ""]), (Path(), ["", ""])):
        plans = simulator_plans(settings, 1, {"stepping-0": "unix:///s"}, folder)
        assert [plan.environment[FOLDER_VARIABLE] for plan in plans] == expected


def test_page_lists_replays_with_their_step_and_sends_no_other_file(tmp_path: Path) -> None:
    from tests.page.test_page_server import Client

    folder = write_run(tmp_path / "results" / "run", [interval(step) for step in (100, 200, 300)])
    write_replay(folder / "replays", {"game": "tag"}, ["[]"], {}, 1e9 + 2.5)
    write_replay(folder / "evaluation-1" / "replays", {}, [], {}, 1e9 + 3)
    (folder / "evaluation-1" / "run.json").write_text('{"playing": {"checkpoints": {"Walk": "/x/checkpoint-7"}}}')
    (folder / "replays" / "secret.jsonl").symlink_to(folder.parent.parent / "secret")
    (tmp_path / "secret").write_text("secret")
    found = Runs(tmp_path / "results").replays("run")
    assert [(one["of"], one.get("step")) for one in found] == [("", 250.0), ("checkpoint-7", None)]
    page = Client(tmp_path / "results")

    def get(name: str) -> httpx.Response:
        return page.get("/api/replay", params={"run": "run", "name": name})

    assert get(found[0]["name"]).text.splitlines()[1] == "[]"
    for name in ("run.json", "replays/secret.jsonl", "../secret", "replays/../run.json", ""):
        assert get(name).status_code == 404, name
