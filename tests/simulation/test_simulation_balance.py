"""Balance has the physics of a scalar twin, and policies last as long as expected."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from sparring.pipeline.games.balance import MAX_STEPS, MAX_TILT, RADIUS, TILT_PER_STEP, Balance
from tests.simulation.simulation_helpers import actions_for, check_report

ID = "Balance?team=0"
Policy = Callable[[np.ndarray], np.ndarray]


def twin(state: list[float], action: list[float]) -> list[float]:
    """Returns the next state of one plate, axis by axis, from the description of the game."""
    tilt, position, velocity = state[0:2], [state[2], state[4]], [state[5], state[7]]
    height = 0.0
    for axis in (0, 1):
        tilt[axis] += 0.1 * min(max(action[axis], -1.0), 1.0)
        tilt[axis] = min(max(tilt[axis], -0.4), 0.4)
        velocity[axis] -= 5 / 7 * 9.81 * math.sin(tilt[axis]) * 0.05
        position[axis] += 0.05 * velocity[axis]
        height += math.sin(tilt[axis]) * position[axis]
    climb = (height - state[3]) / 0.05
    return [*tilt, position[0], height, position[1], velocity[0], climb, velocity[1]]


def test_every_step_equals_that_of_the_twin() -> None:
    """Observations, rewards, falls and interruptions are equal, also for random actions out of bounds."""
    game, random = Balance(4), np.random.default_rng(0)
    (report,) = game.reset({}, 3)
    falls = 0
    for _ in range(300):
        act = actions_for(report, game.behaviors()[ID])
        act.continuous[:] = random.normal(size=(4, 2))
        before = report.decisions.observations[0]
        (report,) = game.step({ID: act})
        check_report(report, dict(game.behaviors()))
        after = [twin(row.tolist(), move.tolist()) for row, move in zip(before, act.continuous, strict=True)]
        over = [math.hypot(row[2], row[4]) > RADIUS for row in after]
        ended = report.ends.agents.tolist() if report.ends else []
        assert ended == [area for area, fell in enumerate(over) if fell]
        for row, area in enumerate(ended):
            np.testing.assert_allclose(report.ends.observations[0][row], after[area], atol=2e-4)
            assert (report.ends.rewards[row], report.ends.interrupted[row]) == (-1.0, False)
        going_on = [area for area, fell in enumerate(over) if not fell]
        now = report.decisions.observations[0][going_on]
        np.testing.assert_allclose(now, np.array(after)[going_on].reshape(-1, 8), atol=2e-4)
        wanted = np.where(over, 0, 0.1).astype(np.float32)
        np.testing.assert_array_equal(report.decisions.rewards, wanted)
        falls += len(ended)
    assert falls > 10


def lengths(policy: Policy, areas: int, steps: int) -> tuple[list[int], list[bool]]:
    """Returns lengths and interruptions of all episodes that end within `steps`."""
    game, ages = Balance(areas), np.zeros(areas, int)
    (report,) = game.reset({}, 1)
    lasted: list[int] = []
    interrupted: list[bool] = []
    for _ in range(steps):
        act = actions_for(report, game.behaviors()[ID])
        act.continuous[:] = policy(report.decisions.observations[0])
        (report,) = game.step({ID: act})
        ages += 1
        if report.ends is not None:
            lasted += ages[report.ends.agents].tolist()
            interrupted += report.ends.interrupted.tolist()
            assert (report.ends.rewards == np.where(report.ends.interrupted, 0.1, -1).astype(np.float32)).all()
            ages[report.ends.agents] = 0
    return lasted, interrupted


def test_a_proportional_derivative_controller_reaches_the_time_limit() -> None:
    """Every start can be held for 1000 decisions, after which the episode is interrupted."""

    def controller(observed: np.ndarray) -> np.ndarray:
        wanted = np.clip(0.15 * observed[:, [2, 4]] + 0.2 * observed[:, [5, 7]], -MAX_TILT, MAX_TILT)
        return np.asarray((wanted - observed[:, :2]) / TILT_PER_STEP)

    lasted, interrupted = lengths(controller, 32, MAX_STEPS)
    assert lasted == [MAX_STEPS] * 32
    assert all(interrupted)


def test_an_untrained_policy_falls_soon() -> None:
    """Samples of a unit Gaussian, which the trainer sends at the start, last 20 to 60 decisions on average."""
    random = np.random.default_rng(2)
    lasted, interrupted = lengths(lambda observed: np.clip(random.normal(size=(len(observed), 2)), -3, 3) / 3, 32, 400)
    assert 20 < np.mean(lasted) < 60
    assert not any(interrupted)


def test_the_seed_decides_everything() -> None:
    """The same seed and actions give identical reports; a reset without seed continues with the random source."""

    def play(seed: int) -> list[bytes]:
        game, random = Balance(5), np.random.default_rng(4)
        (report,) = game.reset({}, seed)
        observed = []
        for _ in range(100):
            (report,) = game.step({ID: actions_for(report, game.behaviors()[ID], random)})
            observed.append(report.decisions.observations[0].tobytes())
        (report,) = game.reset({}, None)
        return [*observed, report.decisions.observations[0].tobytes()]

    assert play(1) == play(1)
    assert play(1)[-1] not in (play(2)[-1], Balance(5).reset({}, 1)[0].decisions.observations[0].tobytes())


def test_later_steps_do_not_change_earlier_reports() -> None:
    game = Balance(3)
    (first,) = game.reset({}, 0)
    copy = first.decisions.observations[0].copy()
    game.step({ID: actions_for(first, game.behaviors()[ID])})
    np.testing.assert_array_equal(first.decisions.observations[0], copy)


@pytest.mark.parametrize("areas", [1, 2])
def test_the_height_of_the_ball_is_that_of_the_plate_below(areas: int) -> None:
    """This includes the start."""
    (report,) = Balance(areas).reset({}, 0)
    observed = report.decisions.observations[0].astype(np.float64)
    expected = np.sin(observed[:, 0]) * observed[:, 2] + np.sin(observed[:, 1]) * observed[:, 4]
    np.testing.assert_allclose(observed[:, 3], expected, atol=1e-6)
