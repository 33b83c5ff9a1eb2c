"""Behaviors that the configuration does not name are bounded and checked as any other."""

from __future__ import annotations

import pytest

from sparring.pipeline.settings import parse_settings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.endpoint.peers import DefaultBehaviors
from tests.security.security_endpoint import endpoint, hello

pytestmark = pytest.mark.anyio


OTHER = BehaviorSpec(observations=(ObservationSpec(name="x", shape=(1,)),), actions=ActionSpec(continuous=1))


def default_behaviors(defaults: str = "") -> DefaultBehaviors:
    """Returns the behaviors of a configuration with `default_settings`."""
    settings = parse_settings(f"default_settings: {{{defaults}}}", "test").settings.unnamed
    return DefaultBehaviors(settings=settings)


async def test_simulators_add_behaviors_up_to_the_limit_and_a_refused_hello_adds_none() -> None:
    """The limit covers all simulators together; a known name counts once."""
    unnamed = default_behaviors()
    async with endpoint(unnamed=unnamed, limits={"unnamed_behaviors": 2}) as server:
        await server.connect().handshake(behaviors={"A?team=0": OTHER, "A?team=1": OTHER, "Goal?team=0": OTHER})
        second = server.connect()
        await second.send(hello(behaviors={"A": OTHER, "B": OTHER, "C": OTHER}))
        fault = await second.receive_fault()
        assert (fault.code, fault.got) == ("too_large", "behavior 'C' beside 2 that the configuration does not name")
        assert fault.remedy.endswith("below `behaviors`, or raise pipeline.limits.unnamed_behaviors")
        assert unnamed.added == {"A"}
        await server.connect().handshake(behaviors={"B": OTHER})
        assert unnamed.added == {"A", "B"}
        assert [*server.stepper.behaviors] == ["A", "Goal", "B"]


@pytest.mark.parametrize("name", ["../up", ".hidden", "a/b", "a#1", " ", "x" * 101, "a\nb", "logs", "run.json"])
async def test_a_behavior_name_that_no_folder_can_have_gets_no_learner(name: str) -> None:
    unnamed = default_behaviors()
    async with endpoint(unnamed=unnamed) as server:
        peer = server.connect()
        await peer.send(hello(behaviors={name: OTHER}))
        fault = await peer.receive_fault()
        assert (fault.code, fault.expected[:42]) == ("specs", "a name that a folder of the run can have: ")
        assert not unnamed.added


async def test_an_added_behavior_with_an_unusable_spec_or_without_its_scripts_is_refused() -> None:
    small = BehaviorSpec(
        observations=(ObservationSpec(name="x", shape=(1, 2, 2), kind="image"),), actions=ActionSpec(continuous=1)
    )
    unnamed = default_behaviors("self_play: {opponents: [{scripted: guard}]}")
    async with endpoint(unnamed=unnamed) as server:
        for spec, scripts, code in ((small, ["guard"], "specs"), (OTHER, [], "scripts")):
            peer = server.connect()
            await peer.send(hello(behaviors={"A": spec}, scripts={"A": scripts}))
            assert (await peer.receive_fault()).code == code
        assert not unnamed.added
        await server.connect().handshake(behaviors={"A": OTHER}, scripts={"A": ["guard"]})
        assert unnamed.added == {"A"}
