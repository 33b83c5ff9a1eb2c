"""A game reads environment parameters, alone and in a conversation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.games.balance import Balance
from sparring.pipeline.games.goal import Goal
from sparring.pipeline.messages.simulator import Bye, Fault, Reset, Sampler, Step
from sparring.pipeline.simulation import BehaviorReport, Parameters, run
from tests.simulation.simulation_helpers import Trainer, act_for

UNIFORM = Sampler(kind="uniform", values=(0.0, 1.0), seed=4)
FIRST = list(itertools.islice(UNIFORM.samples(), 9))


def parameters(numbers: Mapping[str, float], **samplers: Sampler) -> Parameters:
    made = Parameters()
    made.replace(numbers, samplers)
    return made


def test_a_number_is_constant_and_a_sampler_begins_with_the_sent_value() -> None:
    made = parameters({"mass": 2.0, "wind": FIRST[0]}, wind=UNIFORM)
    assert [made["mass"], made["mass"]] == [2.0, 2.0]
    assert [made["wind"] for _ in range(4)] == FIRST[:4]


def test_parameters_are_a_mapping_that_samples_only_when_a_value_is_read() -> None:
    made = parameters({"mass": 2.0, "wind": FIRST[0]}, wind=UNIFORM)
    assert "wind" in made
    assert "rain" not in made
    assert list(made) == ["mass", "wind"]
    assert len(made) == 2
    assert "uniform" in repr(made)
    assert made.get("rain", 7.0) == 7.0
    with pytest.raises(KeyError):
        made["rain"]
    assert dict(made) == {"mass": 2.0, "wind": FIRST[0]}, "a copy has the first samples"
    assert made["wind"] == FIRST[1]


def test_a_change_appears_in_the_same_object_and_raises_the_revision() -> None:
    made = parameters({"mass": 2.0, "wind": FIRST[0]}, wind=UNIFORM)
    before = made.revision
    made.update({}, {})
    assert made.revision == before
    made.update({"mass": 3.0}, {})
    assert made["mass"] == 3.0
    assert made.revision == before + 1
    made.update({"wind": 0.5}, {})
    assert [made["wind"], made["wind"]] == [0.5, 0.5]
    assert made.samplers == {}
    made.update({"mass": 0.25}, {"mass": replace(UNIFORM, seed=9)})
    assert made.samplers.keys() == {"mass"}
    assert made.revision == before + 3


def test_an_unchanged_sampler_continues_its_sequence() -> None:
    """A lesson of another parameter may reset the game, or the simulator may reconnect."""
    made = parameters({"mass": 2.0, "wind": FIRST[0]}, wind=UNIFORM)
    first_two = [made["wind"], made["wind"]]
    before = made.revision
    made.replace({"mass": 2.0, "wind": FIRST[0]}, {"wind": replace(UNIFORM)})
    assert made.revision == before
    made.replace({"wind": FIRST[0]}, {"wind": replace(UNIFORM)})
    assert made.revision == before + 1
    assert [*first_two, made["wind"]] == FIRST[:3]
    assert "mass" not in made
    made.replace({"wind": 0.1}, {"wind": replace(UNIFORM, seed=5)})
    assert made["wind"] == next(replace(UNIFORM, seed=5).samples())


class ReadsParameters(Goal):
    """A game that reads its parameters in each frame."""

    def __init__(self) -> None:
        super().__init__(areas=1)
        self.values: list[tuple[float, ...]] = []
        self.mappings: list[Mapping[str, float]] = []

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> tuple[BehaviorReport]:
        self.mappings.append(parameters)
        self.values.append(tuple(parameters[name] for name in ("mass", "wind")))
        return super().reset(parameters, seed)

    def step(self, actions: Mapping[str, Any]) -> tuple[BehaviorReport]:
        self.values.append(tuple(self.mappings[0][name] for name in ("mass", "wind")))
        return super().step(actions)


def test_a_lesson_reaches_a_game_that_keeps_its_parameters_without_a_reset(trainer: Trainer) -> None:
    """One object serves the whole conversation, also across a Reset in place of an Act."""
    numbers = {"mass": 2.0, "wind": FIRST[0]}

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        hello = peer.greet(Reset(parameters=numbers, samplers={"wind": UNIFORM}, seed=1))
        peer.send(act_for(peer.receive(Step), hello))
        peer.send(replace(act_for(peer.receive(Step), hello), parameters={"mass": 3.0}))
        peer.send(replace(act_for(peer.receive(Step), hello), parameters={"wind": 0.5}))
        peer.receive(Step)
        peer.send(Reset(parameters={"mass": 4.0, "wind": 0.5}))
        peer.receive(Step)
        peer.send(Bye())

    game = ReadsParameters()
    run(game, trainer.play(script))
    trainer.result()
    assert game.values == [(2.0, FIRST[0]), (2.0, FIRST[1]), (3.0, FIRST[2]), (3.0, 0.5), (4.0, 0.5)]
    assert game.mappings[0] is game.mappings[1]


INVALID = {
    "no values": {"wind": replace(UNIFORM, values=())},
    "half a range": {"wind": Sampler(kind="multirangeuniform", values=(1.0, 2.0, 3.0))},
    "two ranges": {"wind": replace(UNIFORM, values=(1.0, 2.0, 3.0, 4.0))},
    "no number": {"rain": UNIFORM},
}


@pytest.mark.parametrize("samplers", INVALID.values(), ids=INVALID.keys())
@pytest.mark.parametrize("with_act", [False, True])
def test_an_invalid_sampler_is_refused(trainer: Trainer, samplers: dict[str, Sampler], with_act: bool) -> None:
    def script(trainer: Trainer) -> Any:
        peer = trainer.accept()
        fields = {"parameters": {"mass": 1.0, "wind": 1.0}, "samplers": samplers}
        hello = peer.greet(Reset(parameters={"mass": 1.0, "wind": 1.0}) if with_act else Reset(**fields))
        if with_act:
            peer.send(replace(act_for(peer.receive(Step), hello), **fields))
        return peer.receive(Fault)

    with pytest.raises(RemoteProtocolError, match="sampler"):
        run(ReadsParameters(), trainer.play(script))
    assert trainer.result().code == "malformed"


# ---------------------------------------------------------------- balance


def falls(gravity: Any, episodes: int = 40) -> list[int]:
    """Returns the lengths of episodes in which the plate is not tilted."""
    game, ages, lasted = Balance(areas=8), [0] * 8, list[int]()
    (report,) = game.reset(gravity, 5)
    spec = game.behaviors()[report.behavior]
    while len(lasted) < episodes:
        ages = [age + 1 for age in ages]
        (report,) = game.step({report.behavior: _still(report, spec)})
        for area in [] if report.ends is None else report.ends.agents.tolist():
            lasted.append(ages[area])
            ages[area] = 0
    return lasted


def _still(report: BehaviorReport, spec: Any) -> Any:
    from tests.simulation.simulation_helpers import actions_for

    return actions_for(report, spec)


def test_the_ball_falls_later_under_less_gravity() -> None:
    def mean(values: Sequence[int]) -> float:
        return sum(values) / len(values)

    assert falls({}) == falls({"gravity": 9.81})
    assert mean(falls({"gravity": 1.62})) > 1.3 * mean(falls({}))


def test_each_episode_has_its_own_gravity() -> None:
    sampled = parameters({"gravity": 5.0}, gravity=Sampler(kind="uniform", values=(1.0, 20.0), seed=1))
    game = Balance(areas=6)
    game.reset(sampled, 1)
    assert len(set(game._pull.tolist())) == 6
