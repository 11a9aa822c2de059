"""The team's pace: threads that lack the cores' time are left alone for a while, and tried again."""

import time
from collections.abc import Callable

import pytest

from muster.native.team import Pace

pytestmark = pytest.mark.alone


def keep_going(pace: Pace, region: Callable[[], None], threads: int, seconds: float) -> bool:
    """Runs regions close behind one another on a team; whether it was still used at the end."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if not pace.together(threads):
            return False
        region()
        pace.done()
    return True


def compute() -> None:
    sum(range(2000))


def test_a_team_that_has_its_time_stays() -> None:
    wall, used = time.perf_counter(), time.process_time()
    stayed = keep_going(Pace(), compute, 1, 3 * Pace.WINDOW)
    share = (time.process_time() - used) / (time.perf_counter() - wall)
    assert stayed or share < 0.9, f"it rests though this thread had {share:.0%} of the time"


def test_a_team_that_lacks_a_core_rests() -> None:
    assert not keep_going(Pace(), compute, 2, 10 * Pace.WINDOW), "one thread computed where two were promised"


def test_a_team_is_tried_again_after_its_rest_and_rests_longer_each_time() -> None:
    pace, rests = Pace(), []
    for _ in range(3):
        assert not keep_going(pace, compute, 2, 10 * Pace.WINDOW)
        began = time.perf_counter()
        while not pace.together(2):
            time.sleep(0.005)
        rests.append(time.perf_counter() - began)
        pace.done()
    assert Pace.REST * 0.8 < rests[0] < rests[1] < rests[2]


def test_pauses_between_regions_are_not_held_against_the_team() -> None:
    pace = Pace()
    for _ in range(20):
        assert pace.together(2)
        pace.done()
        time.sleep(4 * Pace.GAP)
