"""The compliance test passes a correct simulator and finds each fault by the rule that it violates."""

from __future__ import annotations

import pytest

from sparring.pipeline.bridges.gymnasium import make_gymnasium
from sparring.pipeline.compliance.peer import TrialConnection
from sparring.pipeline.compliance.rules import RULES
from sparring.pipeline.compliance.steps import STEP_RULES
from sparring.pipeline.messages.codec import to_bytes
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.simulation import run as run_game
from tests.simulation.compliance_simulator import LONG_S, SHORT_S, Simulator, verdicts_of


def test_a_game_of_the_client_library_passes_every_rule() -> None:
    def simulator(address: str) -> None:
        run_game(make_gymnasium("CartPole-v1", 2), address, connect_timeout_s=1.0)

    verdicts = verdicts_of(simulator)
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}
    assert set(verdicts) == RULES.keys() | STEP_RULES.keys() | {"decoding", "order"}


@pytest.mark.parametrize("quirk", ["", "late behavior"])
def test_a_correct_simulator_passes_every_rule(quirk: str) -> None:
    verdicts = verdicts_of(Simulator(quirk))
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}


class Chatterer:
    """A socket on which something always arrives."""

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def recv(self, _size: int) -> bytes:
        return to_bytes(Ping())

    def sendall(self, _data: bytes) -> None:
        """Takes what is sent."""


def test_what_always_arrives_stops_no_deadline() -> None:
    assert not TrialConnection(Chatterer(), 0.05).closes()  # type: ignore[arg-type]


QUIRKS = {
    "absent": {"connects": "FAIL"},
    "silent handshake": {"hello": "FAIL"},
    "garbage": {"decoding": "FAIL"},
    "step first": {"order": "FAIL"},
    "version": {"hello": "FAIL"},
    "bad id": {"specs": "FAIL"},
    "two specs": {"specs": "FAIL"},
    "deaf": {"ping_waiting": "FAIL", "ping_deciding": "FAIL"},
    "wrong pong": {"ping_waiting": "FAIL", "ping_deciding": "FAIL"},
    "mute": {"heartbeat": "FAIL"},
    "endless": {"plays": "WARN"},
    "gives up": {"plays": "FAIL"},
    "settled": {"parameters": "FAIL"},
    "nan": {"finite": "FAIL"},
    "blind": {"observations": "FAIL"},
    "ragged": {"columns": "FAIL"},
    "shrinks": {"reset_in_place": "WARN", "seed": "WARN"},
    "unseeded": {"seed": "WARN"},
    "stays": {"bye": "FAIL"},
    "crashes": {"bye": "FAIL"},
    "leaves": {"reconnects": "WARN"},
    "miscounts": {"counts": "FAIL"},
    "stubborn": {"fault": "FAIL"},
}


WAITED_FOR = {"absent", "silent handshake", "deaf", "mute", "leaves", "stays", "stubborn"}


@pytest.mark.parametrize(("quirk", "expected"), QUIRKS.items(), ids=QUIRKS.keys())
def test_each_quirk_violates_its_rule_and_is_explained_in_three_parts(quirk: str, expected: dict[str, str]) -> None:
    episodes = 30 if quirk == "gives up" else 2
    verdicts = verdicts_of(Simulator(quirk), episodes=episodes, timeout_s=SHORT_S if quirk in WAITED_FOR else LONG_S)
    found = {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status in ("FAIL", "WARN")}
    assert found == expected
    for rule in expected:
        assert verdicts[rule].got
        assert verdicts[rule].expected
        assert verdicts[rule].remedy
    assert all(verdict.got for verdict in verdicts.values() if verdict.status == "SKIP")


def test_a_simulator_may_leave_its_count_out() -> None:
    assert verdicts_of(Simulator("does not count"))["counts"].status == "SKIP"


def test_every_rule_of_conduct_has_a_quirk_that_violates_it() -> None:
    """`reset` fails with anything that prevents the first Step, as `plays` does."""
    violated = {rule for expected in QUIRKS.values() for rule in expected} | {"reset"}
    assert violated >= RULES.keys() | {"decoding", "order"}
