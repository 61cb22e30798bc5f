"""The slot allocator against a model of sets."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sconv import PoolExhaustedError, SlotError
from sconv.state.slots import SlotAllocator

SIZE = 5


class AllocatorMachine(RuleBasedStateMachine):
    """Any sequence of calls, good and bad."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(SIZE)
        self.used: set[int] = set()
        self.waiting = list(range(1, SIZE + 1))

    @rule(count=st.integers(-1, SIZE + 1))
    def take(self, count: int) -> None:
        if count < 0:
            with pytest.raises(SlotError):
                self.slots.take(count)
        elif count > len(self.waiting):
            with pytest.raises(PoolExhaustedError):
                self.slots.take(count)
        else:
            expected = [self.waiting.pop(0) for _ in range(count)]
            assert self.slots.take(count) == expected
            self.used |= set(expected)

    @rule(slots=st.lists(st.integers(-2, SIZE + 2), max_size=4))
    def give_back(self, slots: list[int]) -> None:
        if len(set(slots)) == len(slots) and set(slots) <= self.used:
            self.slots.give_back(slots)
            self.used -= set(slots)
            self.waiting += slots
        else:
            with pytest.raises(SlotError):
                self.slots.give_back(slots)

    @invariant()
    def counts(self) -> None:
        assert self.slots.num_free == len(self.waiting) == SIZE - len(self.used)
        assert self.slots.live() == sorted(self.used)


TestAllocator = AllocatorMachine.TestCase


def test_the_oldest_free_slot_goes_first() -> None:
    slots = SlotAllocator(3)
    assert slots.take(2) == [1, 2]
    slots.give_back([2, 1])
    assert slots.take(3) == [3, 2, 1]


def test_a_large_allocator_costs_what_is_in_use() -> None:
    slots = SlotAllocator(2**31 - 1)
    assert slots.take(3) == [1, 2, 3]
    slots.give_back([2])
    assert (slots.live(), slots.num_free) == ([1, 3], 2**31 - 3)
    assert slots.take(1) == [4]


def test_an_exhausted_pool_says_how_many_are_left_and_takes_none() -> None:
    slots = SlotAllocator(3)
    slots.take(2)
    with pytest.raises(PoolExhaustedError, match=r"alloc\(2\): 1 of 3 slots are free"):
        slots.take(2)
    assert slots.num_free == 1
    assert slots.take(0) == []


@pytest.mark.parametrize("count", [-1, True, 1.0, "1", None])
def test_a_count_is_a_number_of_slots(count: object) -> None:
    with pytest.raises(SlotError, match="expected the number of slots, 0 or more"):
        SlotAllocator(3).take(count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([1, 3], "free: slot 3 is not in use; it was freed or never handed out"),
        ([1, 0], r"free: slot 0 is outside 1\.\.3 \(slot 0 is the dummy"),
        ([1, -1], r"free: slot -1 is outside 1\.\.3 .*-1 means no slot"),
        ([1, 4], r"free: slot 4 is outside 1\.\.3$"),
        ([1, 2, 1], r"free: \[1, 2, 1\] names a slot twice"),
    ],
)
def test_one_bad_slot_gives_none_back(slots: list[int], message: str) -> None:
    allocator = SlotAllocator(3)
    allocator.take(2)
    with pytest.raises(SlotError, match=message):
        allocator.give_back(slots)
    assert allocator.live() == [1, 2]
    assert allocator.take(1) == [3]
