# SPDX-License-Identifier: Apache-2.0
"""The schedule alone: whatever comes and however it ends, conflicting jobs keep their order and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semkv.consumers.rank.schedule import ConflictSchedule, Job

JOBS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 5), max_size=4), st.booleans()), min_size=1, max_size=30
)


def conflict(a: Job[int], b: Job[int]) -> bool:
    return a.tenant == b.tenant and bool(set(a.keys) & set(b.keys)) and not (a.reads_only and b.reads_only)


@given(JOBS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_order_bounds_and_completeness(plan: list[tuple[str, list[int], bool]], slots: int, rng: object) -> None:
    running: list[Job[int]] = []
    began: list[int] = []
    ended: set[int] = set()
    settled: set[int] = set()
    jobs: list[Job[int]] = []

    def run(job: Job[int]) -> None:
        assert len(running) < slots
        for other in jobs[: job.work]:
            if conflict(other, job):
                assert other.work in ended or other.work in settled
                assert other not in running
        assert not any(conflict(other, job) for other in running)
        running.append(job)
        began.append(job.work)

    schedule: ConflictSchedule[int] = ConflictSchedule(run, slots)
    choose = rng.random  # type: ignore[attr-defined]

    def end_one() -> None:
        job = running.pop(int(choose() * len(running)))
        ended.add(job.work)
        schedule.done(job)

    for number, (tenant, keys, reads) in enumerate(plan):
        job = Job(number, tenant, tuple(keys), reads_only=reads)
        jobs.append(job)
        schedule.add(job)
        if running and choose() < 0.4:
            end_one()
        waiting = [j for j in jobs if j in schedule.jobs and not j.running and not j.settled]
        if waiting and choose() < 0.3:
            victim = waiting[int(choose() * len(waiting))]
            settled.add(victim.work)
            schedule.settle(victim)
    while running:
        end_one()
    assert ended | settled == set(range(len(plan)))
    assert not ended & settled
    assert not schedule.jobs
    assert sorted(began) == sorted(ended)


def test_a_slot_is_used_by_whoever_can_run() -> None:
    started: list[str] = []
    schedule: ConflictSchedule[str] = ConflictSchedule(lambda job: started.append(job.work), 2)
    jobs = {name: Job(name, "t", keys) for name, keys in {"a": (1,), "b": (1,), "c": (2,)}.items()}
    for job in jobs.values():
        schedule.add(job)
    assert started == ["a", "c"]
    schedule.done(jobs["c"])
    assert started == ["a", "c"]
    schedule.done(jobs["a"])
    assert started == ["a", "c", "b"]
