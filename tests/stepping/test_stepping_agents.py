"""Slots and rosters behave as dictionaries do."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.stepping.agents import Roster, SlotTable


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.sampled_from([1, 5, 16, 17, 40, 300]))
def test_slots_are_the_lowest_free_ones_and_never_shared(seed: int, limit: int) -> None:
    """`take` gives the lowest free slots up to the limit; each slot has one owner, each episode its own number."""
    rng = random.Random(seed)
    table, taken, episodes = SlotTable(limit), set[int](), set[int]()
    for _ in range(40):
        n = rng.randrange(0, 25)
        if len(taken) + n > limit:
            with pytest.raises(OverflowError):
                table.take(n)
        else:
            slots = table.take(n)
            assert slots.tolist() == [slot for slot in range(limit + n) if slot not in taken][:n]
            taken.update(slots.tolist())
            table.begin(slots, np.zeros(n, np.int64), 0, 0)
            new = table.agents[slots].tolist()
            assert not episodes & set(new)
            episodes.update(new)
            assert len(episodes) == table.agents.max(initial=0)
        gone = rng.sample(sorted(taken), rng.randrange(len(taken) + 1))
        table.give_back(np.array(gone, np.int32))
        taken -= set(gone)
        assert table.taken == len(taken)
        assert set(np.flatnonzero(table.live).tolist()) == taken


def test_the_table_grows_only_to_the_peak_of_live_agents() -> None:
    """A thousand episodes in turn need no more slots than one."""
    table = SlotTable(1000)
    for _ in range(1000):
        slots = table.take(1)
        table.begin(slots, np.zeros(1, np.int64), 0, 0)
        table.give_back(slots)
    assert len(table.live) == 16


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_roster_finds_what_a_dictionary_finds(seed: int) -> None:
    """`find`, `add` and `remove` keep ids and slots together in any order of ids."""
    rng = random.Random(seed)
    roster, twin = Roster(), dict[int, int]()
    for slot in range(0, 400, 10):
        new = [i for i in rng.sample(range(-50, 10**12, 10**10), 4) if i not in twin]
        slots = [slot + k for k in range(len(new))]
        roster.add(np.array(new, np.int64), np.array(slots, np.int32))
        twin.update(zip(new, slots, strict=True))
        gone = rng.sample(sorted(twin), rng.randrange(len(twin) + 1) // 2)
        roster.remove(np.array([twin.pop(i) for i in gone], np.int32))
        asked = rng.sample(range(-50, 10**12, 10**10), 20) + list(twin)
        assert roster.find(np.array(asked, np.int64)).tolist() == [twin.get(i, -1) for i in asked]
        assert sorted(roster.slots.tolist()) == sorted(twin.values())


def test_a_removal_clears_the_ids_that_a_roster_remembers() -> None:
    """The shortcut for a frame with the ids of the last one is invalid after a removal."""
    roster = Roster()
    ids, slots = np.array([7, 3], np.int64), np.array([0, 1], np.int32)
    roster.add(ids, slots)
    roster.remember(ids, slots)
    last = roster.last(np.array([7, 3]))
    assert last is not None
    assert last.tolist() == [0, 1]
    assert roster.last(np.array([3, 7])) is None
    roster.remove(slots[:1])
    assert roster.last(np.array([7, 3])) is None
