"""No match of self-play is lost as phases merge, and ratings follow from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.services.page.league import League, lineage
from sparring.services.page.runs import Runs
from tests.page.page_runs import write_run

MATCH = st.tuples(st.sampled_from(["A@1", "A@22", "A@3", "old", "A"]), st.sampled_from([0.0, 0.5, 1.0]))


def line(number: int, opponent: str, score: float) -> str:
    players, scores = {"A?team=0": "A", "A?team=1": opponent}, {"A?team=0": score, "A?team=1": 1 - score}
    return json.dumps({"match": number, "players": players, "scores": scores, "steps": {"A": number}}) + "\n"


@settings(max_examples=30, deadline=None)
@given(matches=st.lists(MATCH, max_size=40).map(lambda few: few * 60), parts=st.integers(1, 5))
def test_table_holds_every_match_with_an_opponent(
    tmp_path_factory: pytest.TempPathFactory, matches: list[tuple[str, float]], parts: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    league, every = League(folder), len(matches) // parts + 1
    for begin in range(0, len(matches) + 1, every):
        with (folder / "matches.jsonl").open("a") as file:
            file.writelines(line(at + begin, *one) for at, one in enumerate(matches[begin : begin + every]))
            file.write('{"players": 3}\n[]\n{"players": {"A?team=0": "A"}, "scores": {"A?team=0": "won"}}\n')
        league.refresh()
    found = league.describe()["learners"]
    played = [one for one in matches if one[0] != "A"]
    if not found:
        assert not matches
        return
    table = found["A"]
    assert len(table["phases"]) <= 24
    assert np.sum(table["matches"]) == len(played)
    assert np.sum(table["points"]) == sum(score for _, score in played)
    by_opponent = dict(zip(table["opponents"], np.sum(table["matches"], 0).tolist() if played else [], strict=True))
    assert by_opponent == {name: sum(one == name for one, _ in played) for name in {one for one, _ in played}}
    assert [phase["begin"] for phase in table["phases"]] == sorted(phase["begin"] for phase in table["phases"])
    assert len(table["ratings"]) == len(table["phases"]) + len(table["opponents"])


def test_every_look_at_many_matches_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr("sparring.services.page.league.time.monotonic", lambda: next(now) / 10)
    (tmp_path / "matches.jsonl").write_text("".join(line(at, "A@1", 1.0) for at in range(25)))
    league, seen = League(tmp_path), []
    for _ in range(4):
        league.refresh()
        seen.append(len(league.recent))
    assert seen == [10, 20, 25, 25]


def test_phase_that_wins_more_is_rated_higher_and_many_opponents_form_groups(tmp_path: Path) -> None:
    scores = [float(at % 4 == 0) for at in range(400)] + [float(at % 4 != 0) for at in range(400)]
    lines = [line(at, f"A@{at % 50}", score) for at, score in enumerate(scores)]
    (tmp_path / "matches.jsonl").write_text("".join(lines))
    league = League(tmp_path)
    league.refresh()
    table = league.describe()["learners"]["A"]
    assert table["opponents"][:2] == ["A@0 to A@2", "A@3 to A@5"]
    assert table["ratings"][len(table["phases"]) - 1] - table["ratings"][0] > 200
    assert all(margin > 0 for margin in table["margins"])


def test_lineage_has_snapshots_and_checkpoints_with_ratings_and_tournaments_follow(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    for name in ("A/snapshots/000000007.safetensors", "A/checkpoint-000000000300/state.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
    (folder / "tournament-1").mkdir()
    (folder / "tournament-1" / "tournament.json").write_text('{"players": [{"player": "x"}]}')
    made = {one["name"]: (one["kind"], one.get("step"), one.get("rating")) for one in lineage(folder, {"A@7": 1210.5})}
    assert made == {"A@7": ("snapshot", None, 1210.5), "checkpoint-000000000300": ("checkpoint", 300, None)}
    assert Runs(tmp_path).league("run")["tournaments"] == [{"name": "tournament-1", "players": [{"player": "x"}]}]
