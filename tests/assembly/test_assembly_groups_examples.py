"""Groups by hand: what happened in each tick, and who is told to have been there when. See `group_story`."""

from __future__ import annotations

import pytest

from tests.assembly.group_story import Story

ENDS = {
    "one ends, the others go on and earn later": (
        ["+a +b +c", "1: a b c", "2: a. b c", "4: b c", "8: b c"],
        ["1 2 4 8: a1 b1 c1 | a2 b2 c2 | b3 c3 | b4 c4 | b5 c5 a."],
    ),
    "one is cut, the others go on: it is not seen afterwards either": (
        ["+a +b", "1: a~ b", "2: b"],
        ["1 2: a1 b1 | b2 | b3 a~"],
    ),
    "one ends between the decisions of the other": (
        ["+a +b", "1: a.", "2: b"],
        ["1 2: a1 b1 | b1 | b3 a."],
    ),
    "all end in one tick: nobody is there afterwards": (
        ["+a +b", "1: a b", "2: a. b."],
        ["1 2: a1 b1 | a2 b2 | over a. b."],
    ),
    "all are cut in one tick: they are seen once more": (
        ["+a +b", "1: a b", "2: a~ b~"],
        ["1 2: a1 b1 | a2 b2 | a3 b3 over a~ b~"],
    ),
    "of the last, only those that were cut are seen once more": (
        ["+a +b", "1: a b", "2: a. b~"],
        ["1 2: a1 b1 | a2 b2 | b3 over a. b~"],
    ),
    "cut, but not with the last": (
        ["+a +b", "1: a~", "2: b."],
        ["1 2: a1 b1 | b1 | over a~ b."],
    ),
    "begins again in the tick of its end: another life, the same group": (
        ["+a +b", "1: a. b", "2: b", "+c 3: b"],
        ["1 2 3: a1 b1 | b2 | b3 | b4 c4 a."],
    ),
    "all end and others begin: the group's life is over, and there is another": (
        ["+a +b", "1: a. b. +c", "2: c"],
        ["1: a1 b1 | over a. b.", "2: c2 | c3"],
    ),
}
TIMES = {
    "a slow member: seen with what it decided last, what it got counts when it tells": (
        ["+a +b", "1: a", "2: a=10", "4: a b=20"],
        ["1 12 24: a1 b1 | a2 b1 | a3 b1 | a4 b4"],
    ),
    "nobody's time: only who decides or ends makes a group time": (
        ["+a +b +c@2", "2@1: c", "2@2: c", "1: a b", "2@4: c"],
        ["1: a1 b1 | a4 b4", "1 2 4: c1 | c2 | c3 | c5"],
    ),
    "actions that are withheld come to the decisions that wait for them": (
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
    "a simulator is lost: cut at the present decisions": (
        ["+a +b +c@2", "1: a b c", "2: a", "-a -b"],
        ["1 2: a1 b1 | a2 b2 | a3 b2 over a~ b~"],
    ),
    "what it told in the tick of its loss counts": (
        ["+a +b", "1: a b", "2: a b -a -b!"],
        ["1 2: a1 b1 | a2 b2 | a3 b3 over a~ b~"],
    ),
    "lost with all behavior names": (
        ["+a +x", "1: a x", "2: a -a -x!"],
        ["1 2: a1 x1 | a2 x2 | a3 x2 over a~"],
    ),
    "another is heard of in the same tick": (
        ["+a +b@2", "1: a b", "2: a -b"],
        ["0: b1 | b2 over b~"],
    ),
}


@pytest.mark.parametrize(("lines", "told"), [*ENDS.values(), *TIMES.values()], ids=[*ENDS, *TIMES])
def test_a_cut_tells_who_was_there_when_and_what_they_earned(lines: list[str], told: list[str]) -> None:
    story = Story().tell(*lines)
    assert sorted(story.flush()) == sorted(told)


@pytest.mark.parametrize(("lines", "told"), LOST.values(), ids=LOST)
def test_who_went_away_is_cut_at_its_last_decision(lines: list[str], told: list[str]) -> None:
    story = Story().tell(*lines)
    assert story.rest() == told
    assert story.assembler.of("A").received == story.produced["A"]


def test_a_decision_under_way_counts_at_the_first_time_of_the_next_segment() -> None:
    """The group's segment closes without waiting for it; in the next one it is there from the start."""
    story = Story(horizon=2).tell("+a +b", "1: a", "2: a", "4: a", "8: a b")
    assert story.rest() == ["1 2: a1 b1 | a2 b1 | a3 b1", "4 8: a3 b1 | a4 b1 | a5 b5"]
    first, second = story.messages[0].shared, story.messages[0]
    assert first is not None
    assert first.next_times.tolist() == [2, 0, 2, 2]
    assert second.lengths.tolist() == [2, 0, 2, 1]
    assert second.group_rewards.tolist() == [1, 2, 4, 8, 15]


def test_a_segment_closes_for_all_names_at_once() -> None:
    """Each name is told the same times and rewards, of its mates what a critic is shown."""
    story = Story(horizon=2).tell("+a +x +y", "1: a x y", "2: a y=3")
    messages = list(story.assembler.rest())
    expected = "1 5: a1 x1 y1 | a2 x2 y2 | a3 x2 y3"
    assert story.told([m for m in messages if m.behavior == "A"], "A") == [expected]
    assert story.told([m for m in messages if m.behavior == "B"], "B") == [expected]
    assert [len(message.log_probs) for message in messages] == [2, 3]


def test_a_name_without_steps_in_a_group_segment_is_not_told_of_it() -> None:
    """Its members are shown to the others all the same."""
    story = Story(horizon=1).tell("+a +x", "1: a", "2: a x")
    assert story.rest("B") == ["2: a2 x1 | a3 x3"]
    story = Story(horizon=1).tell("+a +x", "1: a", "2: a x")
    assert story.rest("A") == ["1: a1 x1 | a2 x1", "2: a2 x1 | a3 x3"]


def test_episodes_of_members_and_of_the_group() -> None:
    """A member's when it ends; the group's once, with its last, also what it earned after others had ended."""
    story = Story().tell("+a +b", "1: a=3 b", "2: a=4. b", "4: b", "8: b.")
    story.rest()
    told = story.messages[0].episodes
    assert told.lengths.tolist() == [2, 4]
    assert told.returns.tolist() == [7, 0]
    assert told.shared_returns.tolist() == [3, 15]
    assert told.group_returns.tolist() == [15]
    assert told.groups.tolist() == [1, 1]


def test_a_group_of_several_names_returns_to_each_of_them() -> None:
    story = Story().tell("+a +x", "1: a x.", "2: a", "4: a.")
    story.rest()
    assert {m.behavior: m.episodes.group_returns.tolist() for m in story.messages} == {"A": [7], "B": [7]}


def test_of_what_was_joined_under_way_nothing_is_told() -> None:
    """Steps that began before are orphaned, episodes and the group's return untold; the rest is learned from."""
    story = Story().tell("?a ?b", "1: a=1", "2: a=2 b=3", "4: a=4. b=5.")
    assert story.assembler.of("A").orphaned == 2
    assert story.rest() == ["4 13: a2 | a3 b3 | over a. b."]
    told = story.messages[0].episodes
    assert (len(told.agents), len(told.group_returns)) == (0, 0)
    assert sorted(told.unreported.tolist()) == sorted(story.agent_episodes.values())


def test_one_that_joined_under_way_keeps_its_group_untold() -> None:
    story = Story().tell("?a", "+b 1: a", "2: a b", "4: a. b.")
    story.rest()
    told = story.messages[0].episodes
    assert told.agents.tolist() == [story.agent_episodes["b"]]
    assert len(told.group_returns) == 0


# ---------------------------------------------------------------- agents that change their group


MOVES = {
    "it is in the old group until then, and in the new one from then on": (
        ["+a +b +c@2", "1: a>2 b c", "2: b 2@4: a c"],
        {"1 2: a1 b1 | b2 | b3", "0 4: c1 | a2 c2 | a3 c3"},
    ),
    "the last one leaves: its return is bootstrapped with what it sees now": (
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
    "two change places: nobody is left nowhere": (
        ["+a +b@2", "1: 2@10: a b", "2: 2@20: a>2 b>1", "4: 2@40: a b"],
        {"1 2 4: a1 | a2 | b3 | b4", "10 20 40: b1 | b2 | a3 | a4"},
    ),
    "two of two behavior names change places": (
        ["+a +x@2", "1: 2@10: a x", "2: 2@20: a>2 x>1", "4: 2@40: a x"],
        {"1 2 4: a1 | a2 | x3 | x4", "10 20 40: x1 | x2 | a3 | a4"},
    ),
    "one follows the other": (
        ["+a@2 +b@3 +c@4", "a>3 b>4 c", "a b c", "a b c"],
        {"0: a1 | a2 over", "0 0 0: b1 | a2 | a3 | a4", "0 0 0: c1 | b2 c2 | b3 c3 | b4 c4"},
    ),
    "out of no group, and back": (
        ["+a@0 +b", "1: a>1 b", "2: a b", "4: a>0 b", "a=9 8: b"],
        {"0: a1 | a2 over", "1 2 4 8: b1 | a2 b2 | a3 b3 | b4 | b5", "9: a4 | a5"},
    ),
}


@pytest.mark.parametrize(("lines", "told"), MOVES.values(), ids=MOVES)
def test_agents_that_change_their_group(lines: list[str], told: set[str]) -> None:
    story = Story().tell(*lines)
    assert set(story.flush()) == told
    assert story.assembler.of("A").open_steps == 0


def test_a_segment_has_the_key_of_the_group_that_it_belongs_to() -> None:
    """Also where its member goes on in another group."""
    story = Story().tell("+a +b", "1: a>2 b", "2: b a")
    story.flush()
    (message,) = story.messages
    assert message.shared is not None
    agents = {agent: letter for letter, agent in story.agent_episodes.items()}
    keys = sorted((agents[a], g) for a, g in zip(message.agents.tolist(), message.groups.tolist(), strict=True))
    assert keys == [("a", 1), ("a", 2), ("b", 1)]


def test_a_group_that_somebody_came_to_returns_what_it_earned() -> None:
    """All of its life was seen, wherever its members were before."""
    story = Story().tell("+a@2 +b", "a 1: b", "2: a>1 b", "4: a b", "8: a. b.")
    story.rest()
    assert story.messages[0].episodes.group_returns.tolist() == [15]


# ---------------------------------------------------------------- what the group earns, counted once


def test_what_cancels_out_is_counted_too() -> None:
    """A report without group rewards says that there were none: the group lost what it had got."""
    story = Story().tell("+a +b", "1: a", "-1: b")
    assert story.flush() == ["1 -1: a1 b1 | a2 b1 | a2 b3"]


def test_what_came_before_a_member_is_counted_when_another_tells() -> None:
    """Of several that tell, who decided first tells of the longest time."""
    story = Story().tell("+a", "5: +b", "2: b", "a b")
    assert sum(float(reward) for reward in story.flush()[0].partition(":")[0].split()) == 7
