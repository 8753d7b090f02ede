"""Fair limiter: width, order of callers, and cancelled waits."""

from __future__ import annotations

import asyncio
import random

import pytest

from windlass.server.text.workers.pool import FairLimiter, QueueFullError


def test_callers_take_turns() -> None:
    order: list[str] = []

    async def job(limiter: FairLimiter, caller: str) -> None:
        async with limiter.slot(caller, 1):
            order.append(caller)
            await asyncio.sleep(0)

    async def main() -> None:
        limiter = FairLimiter(1, 1000)
        async with limiter.slot("first", 1):
            jobs = [asyncio.create_task(job(limiter, "many")) for _ in range(100)]
            await asyncio.sleep(0)
            jobs += [asyncio.create_task(job(limiter, "one")), asyncio.create_task(job(limiter, "two"))]
            await asyncio.sleep(0)
        await asyncio.gather(*jobs)

    asyncio.run(main())
    assert len(order) == 102
    assert order[:4] == ["many", "one", "two", "many"]


def test_the_width_is_never_exceeded() -> None:
    async def main() -> int:
        limiter, running, most = FairLimiter(3, 1000), 0, 0

        async def job(number: int) -> None:
            nonlocal running, most
            async with limiter.slot(str(number % 5), 1):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.001)
                running -= 1
                if number % 7 == 0:
                    raise ValueError

        await asyncio.gather(*[job(number) for number in range(60)], return_exceptions=True)
        assert running == 0
        return most

    assert asyncio.run(main()) == 3


def test_a_caller_uses_a_part_of_the_width() -> None:
    async def main() -> None:
        limiter, order, end = FairLimiter(2, 1000, per_caller=1), list[str](), asyncio.Event()

        async def job(caller: str, name: str) -> None:
            async with limiter.slot(caller, 1):
                order.append(name)
                await end.wait()

        jobs = [asyncio.create_task(job("many", f"many {number}")) for number in range(3)]
        jobs.append(asyncio.create_task(job("one", "one")))
        jobs.append(asyncio.create_task(job("two", "two")))
        for _ in range(9):
            await asyncio.sleep(0)
        assert order == ["many 0", "one"]
        jobs[0].cancel()
        for _ in range(9):
            await asyncio.sleep(0)
        assert order == ["many 0", "one", "many 1"]
        end.set()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert sorted(order) == ["many 0", "many 1", "many 2", "one", "two"]

    asyncio.run(main())


def test_the_total_size_of_waiting_jobs_is_limited() -> None:
    async def main() -> None:
        limiter = FairLimiter(1, 20)

        async def wait(size: int, caller: str = "a") -> None:
            async with limiter.slot(caller, size):
                pass

        async with limiter.slot("a", 1_000_000):  # running jobs do not count
            waiting = asyncio.create_task(wait(8))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await wait(3)  # a caller may use half
            more = [asyncio.create_task(wait(2)), asyncio.create_task(wait(9, "b"))]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await wait(2, "c")
        await asyncio.gather(waiting, *more)
        async with limiter.slot("a", 1):  # nothing is waiting now
            last = asyncio.create_task(wait(10))
            await asyncio.sleep(0)
            assert not last.done()
        await last

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["waiting", "before the slot is passed on", "after it was passed on"])
def test_a_cancelled_wait_passes_its_slot_on(moment: str) -> None:
    async def main() -> None:
        limiter = FairLimiter(1, 1000)
        done: list[str] = []

        async def job(caller: str) -> None:
            async with limiter.slot(caller, 1):
                done.append(caller)

        async with limiter.slot("first", 1):
            dropped = [asyncio.create_task(job("dropped")) for _ in range(3)]
            kept = asyncio.create_task(job("kept"))
            await asyncio.sleep(0)
            if moment != "after it was passed on":
                for task in dropped:
                    task.cancel()
            if moment == "waiting":
                await asyncio.sleep(0)
        if moment == "after it was passed on":
            for task in dropped:
                task.cancel()
        await asyncio.wait_for(kept, 1)
        await asyncio.gather(*dropped, return_exceptions=True)
        assert all(task.cancelled() for task in dropped)
        assert done == ["kept"]
        await asyncio.wait_for(job("after"), 1)  # the slot is free again

    asyncio.run(main())


def test_any_order_of_cancelling_and_finishing_keeps_the_width() -> None:
    async def main(seed: int) -> None:
        draw = random.Random(seed)
        limiter, running, most = FairLimiter(2, 1000), 0, 0

        async def job(caller: str) -> None:
            nonlocal running, most
            async with limiter.slot(caller, 1):
                running += 1
                most = max(most, running)
                try:
                    for _ in range(draw.randrange(3)):
                        await asyncio.sleep(0)
                finally:
                    running -= 1

        tasks: list[asyncio.Task[None]] = []
        for _ in range(60):
            tasks.append(asyncio.create_task(job(draw.choice("abc"))))
            if draw.random() < 0.6:
                draw.choice(tasks).cancel()
            if draw.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= 2 and running == 0
        async with limiter.slot("x", 1), limiter.slot("y", 1):  # both slots are free
            pass

    for seed in range(50):
        asyncio.run(asyncio.wait_for(main(seed), 10))
