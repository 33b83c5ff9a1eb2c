"""Opponents that the simulators play themselves, drawn for each match as any other opponent."""

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
from tests.services.self_play_runs import KINDS, SELF_PLAY, check_all, plain_settings, whole
from tests.services.services_helpers import Training

SCRIPTS = ["simulator/scripted", "simulator/still"]


class Asked:
    """Soccer that notes which script plays each seat of each match.

    Attributes:
        scripts_met: by match and seat, the numbers that were asked for in it.
    """

    def __init__(self, areas: int) -> None:
        self._game = Soccer(areas, every=50)
        self.name = "soccer"
        self.scripts_met: dict[tuple[int, str], set[int]] = {}
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
            asked = actions[report.behavior].scripts
            numbers = np.zeros(len(report.decisions.agents), int) if asked is None else asked
            for match, number in zip(report.decisions.matches.tolist(), numbers.tolist(), strict=True):
                self.scripts_met.setdefault((match, report.behavior), set()).add(number)
        self._last = self._game.step(actions)
        return self._last

    def close(self) -> None:
        """Holds nothing."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def rules(**values: Any) -> dict[str, Any]:
    opponents = [{"scripted": "scripted", "weight": 1.0}, {"scripted": "still", "weight": 0.5}]
    return SELF_PLAY | {"opponents": opponents} | values


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_a_script_plays_whole_matches_of_the_seats_it_is_drawn_for(tmp_path: Path, mode: str) -> None:
    """Each seat of a match has one script or none to its end; the match table names it, and the books balance."""
    games = [Asked(areas=2), Asked(areas=2)]
    play = await whole(tmp_path, games, plain_settings(KINDS["poca"], mode=mode, self_play=rules()))
    check_all(play)
    met = [numbers for game in games for numbers in game.scripts_met.values()]
    assert all(len(numbers) == 1 for numbers in met)
    played = [number for numbers in met for number in numbers]
    named = [player for line in play.table for player in line["players"].values()]
    for number, player in enumerate(SCRIPTS, 1):
        ended, begun = named.count(player), played.count(number)
        assert ended > 3
        assert ended <= begun <= ended + 4  # of each area, one match was under way at the end
    assert {"Soccer", *SCRIPTS} < set(named)
    assert {tuple(sorted(line["players"])) for line in play.table} == {("Soccer?team=0", "Soccer?team=1")}
    elo, records = play.saved["elo"], play.saved["sides"]["Soccer"]["records"]
    for player in SCRIPTS:
        assert records[player][0] == named.count(player)
        assert elo[player] != 1200.0


@pytest.mark.slow
def test_a_simulator_without_the_script_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    """Real processes: what is missing, and what to do."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "behaviors: {Goal: {trainer_type: ppo, self_play: {opponents: [{scripted: keeper}]}}}\n"
        "simulators: [{name: duel}]\n"
    )
    training = Training(tmp_path, str(file))
    assert training.end() == 1
    text = "\n".join(training.lines)
    assert re.search(r"got behavior Goal with scripts \[\]; expected \['keeper'\] too", text.replace("\n", " ")), text
