"""Taking turns: how many run at once, who is next, what a cancelled wait leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from windlass.server.text.lanes import Lane, LaneFullError


def test_callers_take_turns_whatever_they_queued() -> None:
    order: list[str] = []

    async def job(lane: Lane, caller: str) -> None:
        async with lane.turn(caller, 1):
            order.append(caller)
            await asyncio.sleep(0)

    async def main() -> None:
        lane = Lane(1, 1000)
        async with lane.turn("first", 1):
            jobs = [asyncio.create_task(job(lane, "many")) for _ in range(100)]
            await asyncio.sleep(0)
            jobs += [asyncio.create_task(job(lane, "one")), asyncio.create_task(job(lane, "two"))]
            await asyncio.sleep(0)
        await asyncio.gather(*jobs)

    asyncio.run(main())
    assert len(order) == 102
    assert order[:4] == ["many", "one", "two", "many"]


def test_no_more_run_at_once_than_its_width() -> None:
    async def main() -> int:
        lane, running, most = Lane(3, 1000), 0, 0

        async def job(number: int) -> None:
            nonlocal running, most
            async with lane.turn(str(number % 5), 1):
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


def test_what_waits_is_bounded_by_its_size() -> None:
    async def main() -> None:
        lane = Lane(1, 10)

        async def wait(size: int) -> None:
            async with lane.turn("a", size):
                pass

        async with lane.turn("a", 1_000_000):  # what runs does not wait
            waiting = asyncio.create_task(wait(8))
            await asyncio.sleep(0)
            with pytest.raises(LaneFullError):
                await wait(3)
            more = asyncio.create_task(wait(2))
            await asyncio.sleep(0)
        await asyncio.gather(waiting, more)
        async with lane.turn("a", 1):  # nothing is counted as waiting any more
            last = asyncio.create_task(wait(10))
            await asyncio.sleep(0)
            assert not last.done()
        await last

    asyncio.run(main())


def test_a_cancelled_wait_leaves_the_place_to_others() -> None:
    async def main() -> None:
        lane = Lane(1, 1000)
        done: list[str] = []

        async def job(caller: str) -> None:
            async with lane.turn(caller, 1):
                done.append(caller)

        for moment in ("waiting", "granted"):
            async with lane.turn("first", 1):
                dropped = asyncio.create_task(job("dropped"))
                kept = asyncio.create_task(job("kept"))
                await asyncio.sleep(0)
                if moment == "waiting":
                    dropped.cancel()
                    await asyncio.sleep(0)
            if moment == "granted":
                dropped.cancel()  # in the very moment in which it was given the place
            await asyncio.wait_for(kept, 1)
            assert dropped.cancelled() or (await asyncio.gather(dropped, return_exceptions=True))
        assert done.count("kept") == 2
        await asyncio.wait_for(job("after"), 1)

    asyncio.run(main())
