# tests: wings/planning/largest_batch.py
"""The search for the largest batch, compared with a linear search over invented peaks."""

import json

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from lingvo_gshard.wings.planning import largest_batch
from lingvo_gshard.wings.planning.generation import GenerationPlan
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.roofline import Budget
from tests.planning.example_plan import as_plan, example_plan

STEP = as_plan(example_plan())
CAPACITY = 10_000_000
BUDGET = Budget(1e6, 1.0, None, None, None, ())


def step(peak: int, batch: int) -> Plan:
    memory = msgspec.structs.replace(STEP.bytes_per_device, peak=peak, capacity=CAPACITY)
    return msgspec.structs.replace(
        STEP, bytes_per_device=memory, fits=peak <= CAPACITY, tokens_per_second=10.0 * batch
    )


def plan_of(batch: int, peak: int, cache: int) -> GenerationPlan:
    planned = step(peak, batch)
    return GenerationPlan(
        batch=batch, length=8, prompt=4, steps=1, fits=planned.fits, cache_bytes=cache,
        cache_bytes_per_text=1, loading_bytes=1, step=planned, bounded_by="memory bandwidth",
        prefill=None, generated=BUDGET, prompted=None,
    )  # fmt: skip


def by_hand(peak_of, granule: int, most: int) -> int:
    """Returns the largest batch that fits, tried one by one."""
    best = 1 if peak_of(1) <= CAPACITY else 0
    for batch in range(granule, most, granule):
        if peak_of(batch) > CAPACITY:
            break
        best = batch
    return best


@hypothesis.given(
    fixed=st.integers(0, 11_000_000),
    per_text=st.integers(3_000, 4_000_000),
    share_of_cache=st.floats(0.05, 1.0),
    granule=st.sampled_from([1, 2, 8]),
    step_bytes=st.sampled_from([1, 512, 2**20]),
)
def test_result_is_that_of_a_linear_search(fixed, per_text, share_of_cache, granule, step_bytes):
    """Peaks grow with the batch, in steps, and faster than keys and values alone."""

    def peak_of(batch: int) -> int:
        return fixed + -(-per_text * batch // step_bytes) * step_bytes

    tried = []

    def compiled(batch: int) -> GenerationPlan:
        tried.append(batch)
        return plan_of(batch, peak_of(batch), max(int(share_of_cache * per_text * batch), 1))

    found = largest_batch.find(compiled, granule)
    assert found.batch == by_hand(peak_of, granule, CAPACITY // 3_000 + 2 * granule)
    assert found.batch in tried or not found.batch
    assert found.next_batch in tried and peak_of(found.next_batch) > CAPACITY
    # One text alone is no granule of several: the next batch is the first granule.
    is_below_a_granule = found.batch == 1 and granule > 1
    assert found.next_batch == (granule if is_below_a_granule else found.batch + granule) or (
        found.batch == 0 and found.next_batch == 1
    )
    assert [trial.batch for trial in found.trials] == tried and len(set(tried)) == len(tried)
    assert len(tried) <= 5 + 2 * CAPACITY.bit_length()


def test_affine_peaks_take_four_compilations():
    tried = []

    def compiled(batch: int) -> GenerationPlan:
        tried.append(batch)
        return plan_of(batch, 2_000_000 + 1_500 * batch, 1_000 * batch)

    found = largest_batch.find(compiled, 8)
    assert found.batch == 5328 and found.next_batch == 5336
    assert len(tried) == 4


def test_search_ends_where_memory_does_not_grow(monkeypatch):
    monkeypatch.setattr(largest_batch, "MOST_TEXTS", 64)
    found = largest_batch.find(lambda batch: plan_of(batch, 5, 0), 4)
    assert (found.batch, found.next_batch) == (64, None)


@pytest.mark.parametrize(("one", "batch"), [(CAPACITY, 1), (CAPACITY + 1, 0)])
def test_one_text_where_a_granule_is_too_much(one, batch):
    found = largest_batch.find(lambda n: plan_of(n, one if n == 1 else 2 * CAPACITY, n), 4)
    assert found.batch == batch and found.next_batch == (4 if batch else 1)
    assert found.plan.batch == 1
    assert json.loads(found.to_json())["trials"][0]["batch"] == 4
