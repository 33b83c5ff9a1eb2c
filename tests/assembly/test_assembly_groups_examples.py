"""Examples of groups as scripts of ticks and the segments that assembly makes of them; see `group_script`."""

from __future__ import annotations

import pytest

from tests.assembly.group_script import GroupScript

ENDS = {
    "one ends, the others continue and earn later": (
        ["+a +b +c", "1: a b c", "2: a. b c", "4: b c", "8: b c"],
        ["1 2 4 8: a1 b1 c1 | a2 b2 c2 | b3 c3 | b4 c4 | b5 c5 a."],
    ),
    "one is interrupted, the others continue: it is not present afterwards either": (
        ["+a +b", "1: a~ b", "2: b"],
        ["1 2: a1 b1 | b2 | b3 a~"],
    ),
    "one ends between the decisions of the other": (
        ["+a +b", "1: a.", "2: b"],
        ["1 2: a1 b1 | b1 | b3 a."],
    ),
    "all end in one tick: no member is present afterwards": (
        ["+a +b", "1: a b", "2: a. b."],
        ["1 2: a1 b1 | a2 b2 | over a. b."],
    ),
    "all are interrupted in one tick: they are present once more": (
        ["+a +b", "1: a b", "2: a~ b~"],
        ["1 2: a1 b1 | a2 b2 | a3 b3 over a~ b~"],
    ),
    "of the last members, only interrupted ones are present once more": (
        ["+a +b", "1: a b", "2: a. b~"],
        ["1 2: a1 b1 | a2 b2 | b3 over a. b~"],
    ),
    "interrupted, but not with the last members": (
        ["+a +b", "1: a~", "2: b."],
        ["1 2: a1 b1 | b1 | over a~ b."],
    ),
    "begins again in the tick of its end: another episode in the same group": (
        ["+a +b", "1: a. b", "2: b", "+c 3: b"],
        ["1 2 3: a1 b1 | b2 | b3 | b4 c4 a."],
    ),
    "all end and others begin: the group ends, and another begins": (
        ["+a +b", "1: a. b. +c", "2: c"],
        ["1: a1 b1 | over a. b.", "2: c2 | c3"],
    ),
}
TIMES = {
    "a slow member is present with its last decision, and its rewards count when it reports": (
        ["+a +b", "1: a", "2: a=10", "4: a b=20"],
        ["1 12 24: a1 b1 | a2 b1 | a3 b1 | a4 b4"],
    ),
    "only a member that decides or ends makes a group timestep": (
        ["+a +b +c@2", "2@1: c", "2@2: c", "1: a b", "2@4: c"],
        ["1: a1 b1 | a4 b4", "1 2 4: c1 | c2 | c3 | c5"],
    ),
    "backpressured actions belong to the decisions that wait for them": (
        ["+a +b", "1: a b!", "", "2: a b"],
        ["1 2: a1 b1 | a2 b2 | a4 b4"],
    ),
    "a group mixes behavior names": (
        ["+a +x", "1: a", "2: a x=5", "4: x. a"],
        ["1 7 4: a1 x1 | a2 x1 | a3 x3 | a4"],
    ),
    "an agent without a group is a group of its own": (
        ["+a@0 +b@0", "a=1 b=2", "a=3 b=4"],
        ["1 3: a1 | a2 | a3", "2 4: b1 | b2 | b3"],
    ),
}
LOST = {
    "a lost simulator interrupts at the present decisions": (
        ["+a +b +c@2", "1: a b c", "2: a", "-a -b"],
        ["1 2: a1 b1 | a2 b2 | a3 b2 over a~ b~"],
    ),
    "its reports in the tick of its loss count": (
        ["+a +b", "1: a b", "2: a b -a -b!"],
        ["1 2: a1 b1 | a2 b2 | a3 b3 over a~ b~"],
    ),
    "lost with all behavior names": (
        ["+a +x", "1: a x", "2: a -a -x!"],
        ["1 2: a1 x1 | a2 x2 | a3 x2 over a~"],
    ),
    "another simulator reports in the same tick": (
        ["+a +b@2", "1: a b", "2: a -b"],
        ["0: b1 | b2 over b~"],
    ),
}


@pytest.mark.parametrize(("lines", "expected"), [*ENDS.values(), *TIMES.values()], ids=[*ENDS, *TIMES])
def test_a_flush_reports_members_and_rewards_at_each_time(lines: list[str], expected: list[str]) -> None:
    script = GroupScript().play(*lines)
    assert sorted(script.flush()) == sorted(expected)


@pytest.mark.parametrize(("lines", "expected"), LOST.values(), ids=LOST)
def test_a_lost_agent_is_interrupted_at_its_last_decision(lines: list[str], expected: list[str]) -> None:
    script = GroupScript().play(*lines)
    assert script.rest() == expected
    assert script.assembler.of("A").received == script.produced["A"]


def test_a_decision_under_way_counts_at_the_first_time_of_the_next_segment() -> None:
    """The group's segment closes without waiting for it; the next segment has it from the start."""
    script = GroupScript(horizon=2).play("+a +b", "1: a", "2: a", "4: a", "8: a b")
    assert script.rest() == ["1 2: a1 b1 | a2 b1 | a3 b1", "4 8: a3 b1 | a4 b1 | a5 b5"]
    first, second = script.messages[0].shared, script.messages[0]
    assert first is not None
    assert first.next_times.tolist() == [2, 0, 2, 2]
    assert second.lengths.tolist() == [2, 0, 2, 1]
    assert second.group_rewards.tolist() == [1, 2, 4, 8, 15]


def test_a_segment_closes_for_all_names_at_once() -> None:
    """Each name receives the same times and rewards, and its teammates' observations and actions."""
    script = GroupScript(horizon=2).play("+a +x +y", "1: a x y", "2: a y=3")
    messages = list(script.assembler.rest())
    expected = "1 5: a1 x1 y1 | a2 x2 y2 | a3 x2 y3"
    assert script.summaries([m for m in messages if m.behavior == "A"], "A") == [expected]
    assert script.summaries([m for m in messages if m.behavior == "B"], "B") == [expected]
    assert [len(message.log_probs) for message in messages] == [2, 3]


def test_a_name_without_steps_does_not_receive_the_group_segment() -> None:
    """Its members are present for the other names all the same."""
    script = GroupScript(horizon=1).play("+a +x", "1: a", "2: a x")
    assert script.rest("B") == ["2: a2 x1 | a3 x3"]
    script = GroupScript(horizon=1).play("+a +x", "1: a", "2: a x")
    assert script.rest("A") == ["1: a1 x1 | a2 x1", "2: a2 x1 | a3 x3"]


def test_episodes_of_members_and_of_the_group() -> None:
    """A member's episode ends with it; the group's return is reported once, with its last member."""
    script = GroupScript().play("+a +b", "1: a=3 b", "2: a=4. b", "4: b", "8: b.")
    script.rest()
    episodes = script.messages[0].episodes
    assert episodes.lengths.tolist() == [2, 4]
    assert episodes.returns.tolist() == [7, 0]
    assert episodes.shared_returns.tolist() == [3, 15]
    assert episodes.group_returns.tolist() == [15]
    assert episodes.groups.tolist() == [1, 1]


def test_each_name_of_a_group_receives_its_return() -> None:
    script = GroupScript().play("+a +x", "1: a x.", "2: a", "4: a.")
    script.rest()
    assert {m.behavior: m.episodes.group_returns.tolist() for m in script.messages} == {"A": [7], "B": [7]}


def test_episodes_of_a_group_joined_under_way_are_unreported() -> None:
    """Steps that began before are orphaned, and the group has no return; later steps are used."""
    script = GroupScript().play("?a ?b", "1: a=1", "2: a=2 b=3", "4: a=4. b=5.")
    assert script.assembler.of("A").reached == 2
    assert script.rest() == ["4 13: a2 | a3 b3 | over a. b."]
    episodes = script.messages[0].episodes
    assert (len(episodes.agents), len(episodes.group_returns)) == (0, 0)
    assert sorted(episodes.unreported.tolist()) == sorted(script.agent_episodes.values())


def test_a_group_with_a_member_joined_under_way_has_no_return() -> None:
    script = GroupScript().play("?a", "+b 1: a", "2: a b", "4: a. b.")
    script.rest()
    episodes = script.messages[0].episodes
    assert episodes.agents.tolist() == [script.agent_episodes["b"]]
    assert len(episodes.group_returns) == 0


# ---------------------------------------------------------------- agents that change their group


MOVES = {
    "an agent is in the old group until its decision, and then in the new one": (
        ["+a +b +c@2", "1: a>2 b c", "2: b 2@4: a c"],
        {"1 2: a1 b1 | b2 | b3", "0 4: c1 | a2 c2 | a3 c3"},
    ),
    "the last member leaves: its return is bootstrapped with its present observation": (
        ["+a", "1: a", "2: a>2", "2@4: a"],
        {"1 2: a1 | a2 | a3 over", "4: a3 | a4"},
    ),
    "the last two leave together": (
        ["+a +b", "1: a b", "2: a>2 b>3"],
        {"1 2: a1 b1 | a2 b2 | a3 b3 over"},
    ),
    "the last two leave together, of two behavior names": (
        ["+a +x", "1: a x", "2: a>2 x>3"],
        {"1 2: a1 x1 | a2 x2 | a3 x3 over"},
    ),
    "two members of different groups swap places": (
        ["+a +b@2", "1: 2@10: a b", "2: 2@20: a>2 b>1", "4: 2@40: a b"],
        {"1 2 4: a1 | a2 | b3 | b4", "10 20 40: b1 | b2 | a3 | a4"},
    ),
    "two members of two behavior names swap places": (
        ["+a +x@2", "1: 2@10: a x", "2: 2@20: a>2 x>1", "4: 2@40: a x"],
        {"1 2 4: a1 | a2 | x3 | x4", "10 20 40: x1 | x2 | a3 | a4"},
    ),
    "one member follows the other": (
        ["+a@2 +b@3 +c@4", "a>3 b>4 c", "a b c", "a b c"],
        {"0: a1 | a2 over", "0 0 0: b1 | a2 | a3 | a4", "0 0 0: c1 | b2 c2 | b3 c3 | b4 c4"},
    ),
    "out of no group, and back": (
        ["+a@0 +b", "1: a>1 b", "2: a b", "4: a>0 b", "a=9 8: b"],
        {"0: a1 | a2 over", "1 2 4 8: b1 | a2 b2 | a3 b3 | b4 | b5", "9: a4 | a5"},
    ),
}


@pytest.mark.parametrize(("lines", "expected"), MOVES.values(), ids=MOVES)
def test_agents_change_their_group_with_a_decision(lines: list[str], expected: set[str]) -> None:
    script = GroupScript().play(*lines)
    assert set(script.flush()) == expected
    assert script.assembler.of("A").open_steps == 0


def test_a_segment_has_the_key_of_its_group() -> None:
    """The key stays although the member continues in another group."""
    script = GroupScript().play("+a +b", "1: a>2 b", "2: b a")
    script.flush()
    (message,) = script.messages
    assert message.shared is not None
    agents = {agent: letter for letter, agent in script.agent_episodes.items()}
    keys = sorted((agents[a], g) for a, g in zip(message.agents.tolist(), message.groups.tolist(), strict=True))
    assert keys == [("a", 1), ("a", 2), ("b", 1)]


def test_a_group_that_an_agent_moves_to_has_a_return() -> None:
    """All its rewards are known, wherever its members were before."""
    script = GroupScript().play("+a@2 +b", "a 1: b", "2: a>1 b", "4: a b", "8: a. b.")
    script.rest()
    assert script.messages[0].episodes.group_returns.tolist() == [15]


# ---------------------------------------------------------------- group rewards count once


def test_rewards_that_cancel_out_are_counted() -> None:
    """A report without group rewards means a sum of 0, so the group lost what it had got."""
    script = GroupScript().play("+a +b", "1: a", "-1: b")
    assert script.flush() == ["1 -1: a1 b1 | a2 b1 | a2 b3"]


def test_rewards_before_a_member_joined_count_with_the_next_report() -> None:
    """Of several reports, that of the earliest decision covers the longest time."""
    script = GroupScript().play("+a", "5: +b", "2: b", "a b")
    assert sum(float(reward) for reward in script.flush()[0].partition(":")[0].split()) == 7
