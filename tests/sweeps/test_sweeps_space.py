"""The file with the space of a sweep, and the checks of its values."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from sparring.services.sweeps.results import short_names
from sparring.services.sweeps.space import Dimension, PopulationSettings, SweepSettings, read_sweep
from tests.sweeps.sweep_fakes import BATCH, CONFIG, LAYERS, RATE, SPACE, problems, read

ROOT = Path(__file__).parent.parent.parent

SELF_PLAY = CONFIG.replace("    max_steps", "    self_play: {save_steps: 500}\n    max_steps")


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ("trails: 3\n" + SPACE, "1: trails: got the unknown key 'trails'; .*did you mean trials?"),
        ("objective: rated\n" + SPACE, "1: objective: got 'rated'; expected 'reward' or 'rating'"),
        ("objective: rating\n" + SPACE, "1: objective: got rating of Goal without self_play"),
        ("behavior: Gaol\n" + SPACE, "1: behavior: got 'Gaol'; expected one of Goal"),
        ("steps: 50\n" + SPACE, "1: steps: got 50 with summary_freq 100"),
        ("trials: 3\nspace: {}", "2: space: got a mapping; expected at least 1 entry"),
        ("space:\n  a.b: {low: 1}", "2: space.a.b.*got neither low and high nor choices"),
        ("space:\n  a.b: {low: 1, high: 1}", "2: space.a.b.*got low 1 with high 1; expected less than high"),
        ("space:\n  a.b: {low: 0, high: 1, log: true}", "2: space.a.b.*got log with step, or with low 0"),
        ("space:\n  a.b: {low: 0, high: 1, step: 1e-300}", ".*got steps of 1e-300; expected at most 100,000"),
        ("space:\n  a.b: {low: -1e308, high: 1e308, step: 1}", ".*got the range from -1e.308 to 1e.308; expected"),
        ("space:\n  a.b: {low: 1, high: 2, step: 0.3}", "2: space.a.b.*got high 2, which steps of 0.3 from low 1 miss"),
        ("space:\n  a.b: {low: 1, choices: [2]}", "2: space.a.b.*got choices with low"),
        ("space:\n  behaviors.Goal[: {choices: [2]}", "2: space.*got no dotted key"),
        ("space:\n  behaviors.Goal.max_steps: {choices: [9]}", "2: behaviors.Goal.max_steps: .*write steps"),
        ("space:\n  behaviors.Gaol.time_horizon: {choices: [9]}", "2: .*got 'Gaol'; expected one of Goal"),
        (f"space:\n  {RATE}x: {{choices: [1]}}", "2: .*got the unknown key 'learning_ratex'"),
        (f"space:\n  {RATE}: {{low: 0.1, high: 3}}", "2: behaviors.*learning_rate: got 3.0; expected at most 1"),
        (f"space:\n\n  {BATCH}: {{choices: [16, x]}}", "3: behaviors.*batch_size: got 'x'; expected a whole number"),
        (f"space:\n  {BATCH}: {{low: 16.5, high: 32}}", "2: behaviors.*batch_size: got 16.5; expected a whole"),
        (f"space:\n  {BATCH}: {{choices: [16, 128]}}", "2: behaviors.*got batch_size 128 with buffer_size 64"),
        (f"sampler: grid\n{SPACE}", "2: behaviors.*got a range without step for a grid"),
        (
            f"sampler: grid\nspace:\n  {RATE}: {{low: 0.1, high: 0.9, step: 1e-5}}",
            "1: .*a grid of 80,001",
        ),
        (f"parallel: 10000000\n{SPACE}", "1: parallel: got 10000000; expected at most 1000"),
        (f"population: {{size: 10000000}}\n{SPACE}", "1: population.size: got 10000000; expected at most 1000"),
        (f"method: population\nspace:\n  {LAYERS}: {{choices: [1, 2]}}", "3: .*a trained policy cannot change"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_line(tmp_path: Path, space: str, expected: str) -> None:
    (found,) = problems(tmp_path, space)
    assert re.match(expected, found), found


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, f"space:\n  {RATE}: {{low: 0.1, high: 3}}\n  {BATCH}: {{choices: [0.5, x]}}")
    assert [line.partition(":")[0] for line in found] == ["2", "3", "3"]


def test_empty_file_is_answered_with_an_example(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "# nothing yet")
    assert "got an empty file; expected a mapping with the key space; write for example `space: {" in found


def test_value_that_only_other_values_of_the_space_allow_is_accepted(tmp_path: Path) -> None:
    """The file's buffer_size 64 has no minibatch of 256; that of the space has."""
    buffer = BATCH.replace("batch_size", "buffer_size")
    sweep = read(tmp_path, f"space: {{{BATCH}: {{choices: [16, 256]}}, {buffer}: {{choices: [64, 256]}}}}")
    assert sweep.own == {BATCH: 16, buffer: 64}


def test_whole_numbers_are_those_of_settings_that_take_no_other(tmp_path: Path) -> None:
    gamma = "behaviors.Goal.reward_signals.extrinsic.gamma"
    areas = "simulators[0].options.actions"
    ranges = {LAYERS: "low: 1, high: 3", gamma: "low: 0, high: 1", areas: "low: 1, high: 3"}
    sweep = read(tmp_path, "\n".join(["space:", *(f"  {key}: {{{one}}}" for key, one in ranges.items())]))
    assert {key: one.whole for key, one in sweep.dimensions.items()} == {LAYERS: True, gamma: False, areas: True}
    assert [type(end) for end in sweep.dimensions[gamma].ends] == [float, float]


def test_base_has_the_length_of_a_trial_and_writes_no_export(tmp_path: Path) -> None:
    sweep = read(tmp_path, "steps: 700\n" + SPACE, assigned=("behaviors.Goal.time_horizon=7",))
    goal = sweep.base.behaviors["Goal"]
    assert (goal.max_steps, goal.time_horizon, sweep.base.pipeline.export) == (700, 7, False)
    assert (sweep.behavior, sweep.objective, sweep.steps, sweep.own) == ("Goal", "reward", 700, {RATE: 5e-3})


def test_initial_weights_are_found_from_the_folder_of_a_sweep(tmp_path: Path) -> None:
    config = CONFIG + "checkpoint_settings: {initialize_from: former, results_dir: kept, resume: true}\n"
    kept = read(tmp_path, SPACE, config).base.checkpoint_settings
    assert (kept.initialize_from, kept.resume) == (str(Path("kept/former").absolute()), False)


def test_self_play_is_compared_by_rating(tmp_path: Path) -> None:
    assert read(tmp_path, SPACE, SELF_PLAY).objective == "rating"
    assert read(tmp_path, "objective: reward\n" + SPACE, SELF_PLAY).objective == "reward"


def test_own_value_outside_the_space_is_none_of_it(tmp_path: Path) -> None:
    assert read(tmp_path, f"space: {{{RATE}: {{choices: [1e-3, 1e-4]}}}}").own == {}


RANGES = [
    Dimension(low=1e-5, high=1e-1, log=True),
    Dimension(low=-1.0, high=1.0),
    Dimension(low=0.5, high=2.0, step=0.25),
    Dimension(low=2, high=9, whole=True),
    Dimension(low=1, high=1000, log=True, whole=True),
    Dimension(choices=("a", "b", "c")),
    Dimension(choices=(True, 1, 2.5)),
]


@pytest.mark.parametrize("one", RANGES)
def test_sampled_and_perturbed_values_are_in_the_space(one: Dimension) -> None:
    random = np.random.default_rng(0)
    values = [one.sample(random) for _ in range(200)]
    assert all(one.has(value) for value in values)
    assert all(one.has(one.perturb(value, (0.8, 1.25), random)) for value in values)
    if one.choices or one.step:
        assert {*map(str, values)} == {*map(str, one.grid)}
    assert not any(one.has(value) for value in ("x", None, 1e9, False))


def test_logarithmic_values_are_as_many_in_each_decade() -> None:
    values = np.array([RANGES[0].sample(np.random.default_rng(seed)) for seed in range(400)])
    assert 60 < (values < 1e-4).sum() < 140


def test_grid_has_both_ends() -> None:
    assert RANGES[2].grid == (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    assert RANGES[3].grid == (2, 3, 4, 5, 6, 7, 8, 9)
    assert RANGES[0].grid == RANGES[1].grid == RANGES[4].grid == ()
    huge = Dimension(low=0, high=2.0**50, whole=True)
    assert huge.grid == ()
    assert huge.has(huge.sample(np.random.default_rng(0)))


def test_perturbed_number_is_multiplied_and_a_choice_moves_to_a_neighbor() -> None:
    random = np.random.default_rng(1)
    assert {round(RANGES[0].perturb(1e-3, (0.5, 2.0), random), 9) for _ in range(20)} == {5e-4, 2e-3}
    assert RANGES[0].perturb(0.09, (2.0,), random) == 0.1
    assert {RANGES[5].perturb("b", (2.0,), random) for _ in range(20)} == {"a", "c"}


def test_keys_are_shortened_where_no_two_end_alike() -> None:
    keys = [RATE, "behaviors.Ball.hyperparameters.beta", "behaviors.Goal.hyperparameters.beta"]
    assert list(short_names(keys).values()) == ["learning_rate", *keys[1:]]


def test_space_of_the_goal_game_can_be_run() -> None:
    sweep = read_sweep(ROOT / "configs/goal.yaml", ROOT / "configs/spaces/goal.yaml")
    assert len(sweep.own) == len(sweep.dimensions)


@pytest.mark.parametrize("model", [SweepSettings, PopulationSettings])
def test_every_key_is_documented_with_its_default(model: type[BaseModel]) -> None:
    text = (ROOT / "docs" / "sweeps.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \| [^|]*\|$", text, re.MULTILINE))
    for key, info in model.model_fields.items():
        if isinstance(info.default, bool | int | float | str):
            assert rows[key] == f"`{info.default}`"
        else:
            assert rows[key]
