"""Scripted opponents, which the simulators play, are sampled for each match like other opponents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.games.soccer import Soccer
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import BehaviorSpec
from tests.services.self_play_checks import check_all
from tests.services.self_play_runs import KINDS, SELF_PLAY, plain_settings, run_to_end
from tests.services.services_helpers import Training

SCRIPTS = ["simulator/scripted", "simulator/still"]


class ScriptRecorder:
    """Soccer that records which scripts play in each match.

    Attributes:
        script_numbers: numbers of the scripts, by match and behavior id.
    """

    def __init__(self, areas: int) -> None:
        self._game = Soccer(areas, every=50)
        self.name = "soccer"
        self.script_numbers: dict[tuple[int, str], set[int]] = {}
        self._last: Sequence[BehaviorReport] = ()

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        return self._game.behaviors()

    def scripts(self) -> Mapping[str, Sequence[str]]:
        return self._game.scripts()

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        self._last = self._game.reset(parameters, seed)
        return self._last

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        for report in self._last:
            assert report.decisions is not None
            assert report.decisions.matches is not None
            scripts = actions[report.behavior].scripts
            numbers = np.zeros(len(report.decisions.agents), int) if scripts is None else scripts
            for match, number in zip(report.decisions.matches.tolist(), numbers.tolist(), strict=True):
                self.script_numbers.setdefault((match, report.behavior), set()).add(number)
        self._last = self._game.step(actions)
        return self._last

    def close(self) -> None:
        """Holds nothing."""


def rules(**values: Any) -> dict[str, Any]:
    opponents = [{"scripted": "scripted", "weight": 1.0}, {"scripted": "still", "weight": 0.5}]
    return SELF_PLAY | {"opponents": opponents} | values


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_script_plays_whole_matches_that_it_is_sampled_for(tmp_path: Path, mode: str) -> None:
    """A behavior id has one script or none for a whole match, and the match table names it."""
    games = [ScriptRecorder(areas=2), ScriptRecorder(areas=2)]
    play = await run_to_end(tmp_path, games, plain_settings(KINDS["poca"], mode=mode, self_play=rules()))
    check_all(play)
    numbers_of_matches = [numbers for game in games for numbers in game.script_numbers.values()]
    assert all(len(numbers) == 1 for numbers in numbers_of_matches)
    played = [number for numbers in numbers_of_matches for number in numbers]
    named = [player for line in play.table for player in line["players"].values()]
    for number, player in enumerate(SCRIPTS, 1):
        ended, begun = named.count(player), played.count(number)
        assert ended > 3
        assert ended <= begun <= ended + 4  # each of four areas had an unfinished match
    assert {"Soccer", *SCRIPTS} < set(named)
    assert {tuple(sorted(line["players"])) for line in play.table} == {("Soccer?team=0", "Soccer?team=1")}
    elo, records = play.saved["ratings"]["elo"], play.saved["sides"]["Soccer"]["records"]
    for player in SCRIPTS:
        assert records[player][0] == named.count(player)
        assert elo[player] != 1200.0


@pytest.mark.slow
def test_simulator_without_the_script_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    """The error of a real run names the missing script."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "behaviors: {Goal: {trainer_type: ppo, self_play: {opponents: [{scripted: keeper}]}}}\n"
        "simulators: [{name: goal}]\n"
    )
    training = Training(tmp_path, str(file))
    assert training.end() == 1
    text = "\n".join(training.lines)
    assert re.search(r"got behavior Goal with scripts \[\]; expected \['keeper'\] too", text.replace("\n", " ")), text
