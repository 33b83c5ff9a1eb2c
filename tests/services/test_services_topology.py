"""What a configuration becomes: services, queues, cores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SettingsError
from pipeline.settings import Settings
from pipeline.settings.load import parse_settings
from services.topology import build, cores_of_learners

TWO = """
behaviors:
  Striker: {}
  Goalie: {}
pipeline:
  pin_learners: PINNED
  torch_threads: {learning: THREADS}
"""


def settings_of(threads: int = 1, pinned: bool = True) -> Settings:
    text = TWO.replace("THREADS", str(threads)).replace("PINNED", str(pinned).lower())
    return parse_settings(text, "test.yaml").settings


@given(threads=st.integers(1, 8), usable=st.sets(st.integers(0, 127), max_size=40))
def test_each_learner_has_its_cores_for_itself_and_the_others_have_one_at_least(threads: int, usable: set[int]) -> None:
    """Cores are handed out once, as many as the learner has threads; where none would be left, it is refused."""
    settings = settings_of(threads)
    if len(usable) <= 2 * threads:
        with pytest.raises(SettingsError, match=f"at least {2 * threads + 1}"):
            cores_of_learners(settings, sorted(usable))
        return
    found = cores_of_learners(settings, sorted(usable))
    taken = [core for cores in found.values() for core in cores]
    assert set(found) == {"learning-Striker", "learning-Goalie"}
    assert [len(cores) for cores in found.values()] == [threads, threads]
    assert len(set(taken)) == len(taken)
    assert set(taken) < usable


def test_without_the_setting_all_share_all_cores(tmp_path: Path) -> None:
    """Pinning is for who asks for it: two runs on one machine must not sit on the same core."""
    topology = build(settings_of(pinned=False), run_id="r", directory=tmp_path, seed=1)
    assert topology.cores == {}


def test_who_waits_for_nobody_lets_the_others_go_first(tmp_path: Path) -> None:
    """Simulators, stepping and learners run at the normal priority, the services behind them below it."""
    topology = build(settings_of(pinned=False), run_id="r", directory=tmp_path, seed=1)
    niceness = {plan.name: plan.niceness for plan in topology.services}
    assert {name for name, value in niceness.items() if value == 0} == {
        "stepping-0",
        "learning-Striker",
        "learning-Goalie",
    }
    assert min(niceness.values()) == 0, "raising the priority needs rights"
