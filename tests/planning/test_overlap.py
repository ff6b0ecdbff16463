"""Compares the hidden and exposed times of collectives with a simulation, tick by tick."""

import collections
import random

import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.planning import overlap, roofline
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.roofline import TimedOperation
from tests.hlo.parsing import operations_of_text
from tests.hlo.test_asynchronous import IN_LOOP, SCHEDULED

CHIPS, SLICES = 1, 2


def collective(slices):
    return Collective("all-gather", ("data",), 2, "float32", 8, slices=slices)


def random_schedule(seed):
    """Returns events: ("start", name, ticks, slices), ("compute", name, ticks) or ("end", name)."""
    draw = random.Random(seed)
    events, waiting = [], []
    for number in range(draw.randrange(1, 30)):
        kind = draw.choice(("start", "compute", "compute", "end"))
        if kind == "start":
            slices = draw.choice((CHIPS, CHIPS, SLICES))
            events.append(("start", f"c{number}", draw.randrange(1, 12), slices))
            waiting.append(f"c{number}")
        elif kind == "compute":
            events.append(("compute", f"o{number}", draw.randrange(1, 12)))
        elif waiting:
            events.append(("end", waiting.pop(draw.randrange(len(waiting)))))
    return events


def simulated(events):
    """Returns the ticks of each collective that pass while the device computes or waits for others.

    Collectives that end without a computation in between end in the order of their starts.
    """
    left, links, hidden = {}, {}, collections.Counter()

    def tick(busy):
        for name in left:
            if left[name] and links[name] not in busy:
                busy = {*busy, links[name]}
                left[name] -= 1
                hidden[name] += 1

    ended = set()
    names = [event[1] for event in events if event[0] == "start"]
    for event in [*events, *(("end", name) for name in names), ("compute", "", 0)]:
        if event[0] == "end":
            ended.add(event[1])
            continue
        for name in [name for name in left if name in ended]:
            rest = left.pop(name)
            for _ in range(rest):
                tick({links[name]})
        if event[0] == "start":
            _, name, left[name], links[name] = event
        else:
            for _ in range(event[2]):
                tick(set())
    return hidden


def timed_operations(events, times=1):
    """Returns the operations of a schedule that is executed `times` times."""
    found, in_flight = [], []
    for event in events:
        if event[0] == "end":
            in_flight.remove(event[1])
            continue
        call = collective(event[3]) if event[0] == "start" else None
        flying = tuple(in_flight)
        operation = Operation(
            event[1], "fusion", "", "forward", times, collective=call, in_flight=flying
        )
        seconds = float(event[2]) * times
        found.append(TimedOperation(operation, 0.0, 0.0, seconds, seconds, seconds))
        if call:
            in_flight.append(event[1])
    return found


@pytest.mark.parametrize("times", [1, 4])
def test_hidden_times_are_those_of_a_simulation(times):
    for seed in range(300):
        events = random_schedule(seed)
        timed = timed_operations(events, times)
        found = overlap.hide(timed)
        expected = simulated(events)
        for before, after in zip(timed, found, strict=True):
            name = after.operation.name
            assert after.hidden_seconds == times * expected[name], (seed, name)
            assert after.seconds == before.seconds - after.hidden_seconds
            assert after.seconds_bound == before.seconds_bound


def test_computation_hides_one_collective_of_a_link_at_a_time():
    events = [
        ("start", "a", 6, CHIPS),
        ("start", "b", 6, CHIPS),
        ("start", "c", 6, SLICES),
        ("compute", "o", 8),
        ("end", "a"),
        ("end", "b"),
        ("end", "c"),
    ]
    found = {each.operation.name: each for each in overlap.hide(timed_operations(events))}
    assert [found[name].hidden_seconds for name in "abc"] == [6, 2, 6]
    assert [found[name].seconds for name in "abco"] == [0, 4, 0, 8]


def test_collectives_go_on_while_the_step_waits_for_others():
    events = [
        ("start", "network", 6, SLICES),
        ("start", "first", 2, CHIPS),
        ("end", "first"),
        ("compute", "o", 1),
        ("start", "second", 2, CHIPS),
        ("end", "second"),
        ("end", "network"),
    ]
    found = {each.operation.name: each for each in overlap.hide(timed_operations(events))}
    # The step waits 2 for the first, and at its end 3 for the network, while the second goes on.
    assert [found[name].seconds for name in ("first", "network", "second")] == [2, 3, 0]


def test_a_loop_hides_in_each_iteration_no_more_than_its_computation():
    """A gather of each iteration, and a sum around the loop, on a machine's own times."""
    topology, mesh = topologies.get("v5p:2x2x1"), Mesh.parse("data=2,model=2")
    operations = operations_of_text(SCHEDULED + IN_LOOP, mesh).operations
    timed = roofline.time_operations(operations, topology, mesh)
    alone = {each.operation.name: each.seconds for each in timed}
    found = {each.operation.name: each for each in overlap.hide(timed)}
    assert [found[name].operation.times for name in ("before", "inside", "gather")] == [5, 5, 5]
    hidden_sum = min(alone["sum"], alone["before"] + alone["inside"] + alone["after"])
    free = alone["inside"] - max(0.0, min(alone["sum"] - alone["before"], alone["inside"]))
    assert found["sum"].hidden_seconds == pytest.approx(hidden_sum)
    assert found["gather"].hidden_seconds == pytest.approx(min(alone["gather"], free))
    step = roofline.step_time(list(found.values()))
    hidden = sum(each.hidden_seconds for each in found.values())
    assert step.seconds == pytest.approx(sum(alone.values()) - hidden)
    assert step.seconds_bound == roofline.step_time(timed).seconds_bound <= step.seconds
