"""Guarantees, checked from outside: records of clients, resources at the end, and limits during steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.client import Record

from windlass.engine.client.replicated_client import ReplicatedClient

if TYPE_CHECKING:
    from simulation.world import World

    from windlass.engine.scheduling.scheduler import Scheduler

WRITE_SECONDS = 15.0
SLACK = 0.5  # seconds that the server grants the engine after a deadline
FAREWELL = 5.0  # and a client that does not read, for its error event
DOWN = ("engine_unavailable",)
DEADLY = (
    "step crashes",
    "step has no memory",
    "engine is killed",
    "engine stands still",
    "engine is stopped",
    "engine computes for ever",
)
TEXT_FAULTS = (
    "text process dies",
    "text process is slow",
    "text process has no memory",
    "no process can be started",
)


def check_bounds(world: World, scheduler: Scheduler) -> None:
    """Check limits during a step."""
    plan, seqs = world.plan, world.plan.scheduling
    never_ran = sum(seq.first_scheduled_time is None for seq in scheduler._queues.waiting)
    for what, count, most in (
        ("requests are in flight", world.state.in_flight, plan.max_in_flight),
        ("connections are held", len(world.server.registry), plan.max_connections),
        ("sequences run at once", scheduler.num_running, seqs.max_num_seqs),
        ("requests wait that never ran", never_ran, seqs.max_waiting),
    ):
        if count > most:
            world.violation(f"{count} {what}, {most} may")


def check_books(world: World) -> None:
    """Check that an idle server holds no resources."""
    state = world.state
    if state.in_flight:
        world.violation(f"{state.in_flight} exchanges are left")
    left = [one for engine in world.engines for one in (*engine._router._streams, *engine._router._aborting)]
    if left:
        world.violation(f"the router has requests left: {left}")
    if isinstance(world.engine, ReplicatedClient):
        charged = [replica.in_flight for replica in world.engine._replicas]
        if any(charged) or world.engine._replica_of:
            world.violation(f"replicas are still charged: {charged}, {world.engine._replica_of}")
    if state.callers._in_flight:
        world.violation(f"callers are still charged: {dict(state.callers._in_flight)}")
    lanes = state.text._pool
    for lane in (lanes._short, lanes._large, lanes.templates, lanes.grammars, lanes.slow_grammars):
        if lane._queues:
            world.violation("text jobs are left in a lane")
    for engine in world.engines:
        if engine.state == "ready":
            core = world.processes[engine.pid].core
            assert core is not None
            for found in core.check_books():
                world.violation(found)
        elif not world.faults.happened("disk fails at a load"):
            world.violation(f"an engine is {engine.state}: {engine.failure}")
    causes = sum(kind in DEADLY for _, kind, _ in world.faults.log)
    if len(world.deaths) > causes:
        world.violation(f"{len(world.deaths)} engines died, {causes} had a reason")
    children = [engine._child for engine in world.engines]
    spares = [engine._spawner.standby for engine in world.engines]
    for process in world.processes.values():
        if not process.ended and process not in (*children, *spares):
            world.violation(f"the engine process {process.pid} is left")
        if process.ended and not process.forgotten and process not in children:
            world.violation(f"what the engine process {process.pid} left is still held")


def check_records(world: World) -> None:
    """Check that every request ended once, with the right outcome."""
    for record in world.records:
        for found in _wrong(world, record):
            world.violations.append(f"request {record.ask.request_id}: {found}")
        end = record.end
        if end is None:
            continue
        most = world.plan.high_water + 2 * end.other.largest_write
        if end.other.most_buffered > most:
            world.violations.append(f"{end.other.most_buffered} bytes waited for one client, {most} may")


def _wrong(world: World, record: Record) -> list[str]:
    ask, found = record.ask, list(record.notes)
    if not record.ended_at:
        return [*found, "it never ended"]
    if ask.choices is not None:
        found += _wrong_text(record)
    found += _late(world, record)
    if record.left:
        return found
    if record.broken:
        return found if _may_break(world, record) else [*found, f"its answer was lost: {record.broken}"]
    if record.status is None:
        return [*found, "it got no answer"]
    if ask.stream and record.status == 200 and (not record.done or record.after_done):
        found.append("its stream does not end with [DONE]")
    if len(record.errors) > 1:
        found.append(f"it got {len(record.errors)} errors")
    if record.errors:
        return found + _wrong_error(world, record)
    if record.status != ask.status and not (ask.path == "/health" and record.status == 503):
        found.append(f"it was answered {record.status}, not {ask.status}")
    if ask.choices is not None and record.status == 200:
        found += _unfinished(record)
    return found


def _wrong_text(record: Record) -> list[str]:
    """The received text must be a prefix of the expected text."""
    found = []
    for index, text in record.texts.items():
        expected = record.ask.choices[index] if record.ask.choices and index < len(record.ask.choices) else None
        if expected is None:
            found.append(f"choice {index} was never asked for")
        elif not expected.text.startswith(text):
            found.append(f"choice {index} says {text!r}, not {expected.text!r}")
    for index, finishes in record.finishes.items():
        if len(finishes) > 1:
            found.append(f"choice {index} ended {len(finishes)} times")
    return found


def _unfinished(record: Record) -> list[str]:
    """An answer without an error must have complete choices with the right finish reasons and token counts."""
    found, ask = [], record.ask
    assert ask.choices is not None
    for index, expected in enumerate(ask.choices):
        text, finish = record.texts.get(index, ""), record.finishes.get(index, ["none"])[0]
        if text != expected.text:
            found.append(f"choice {index} ends at {text!r}, not at {expected.text!r}")
        if finish != expected.finish:
            found.append(f"choice {index} ends by {finish}, not by {expected.finish}")
    if record.usage is not None:
        counted = record.usage["prompt_tokens"], record.usage["completion_tokens"]
        if counted != (ask.prompt_tokens, ask.completion_tokens):
            found.append(f"usage says {counted}, it was {(ask.prompt_tokens, ask.completion_tokens)}")
    elif not ask.stream:
        found.append("it has no usage")
    return found


def _may_break(world: World, record: Record) -> bool:
    """Whether a connection had a reason to end before its answer."""
    begin, end = record.sent_at - 1.0, record.ended_at
    ask = record.ask
    reset = ask.request_id in world.faults.between(begin, end, "connection is reset")
    slow = ask.reader in ("slow", "stops") or ask.sender != "quick"
    lagged = any(seconds >= 1.0 for at, seconds in world.stood_still if begin - seconds <= at <= end)
    # With a small window and many late pieces, no byte may arrive within the write timeout.
    late = sum(kind == "piece is late" and begin <= at <= end for at, kind, _ in world.faults.log)
    long = late >= 5 and world.plan.window < 65536 and end - begin >= WRITE_SECONDS
    return long or reset or slow or lagged or world.plan.max_connections < 10 or not ask.fresh


def _wrong_error(world: World, record: Record) -> list[str]:
    """An error must have a reason."""
    ask, faults, (code,) = record.ask, world.faults, record.codes[:1]
    begin, end = record.sent_at, record.ended_at
    match code:
        case "engine_unavailable":
            good = _was_down(world, begin, end) or bool(world.engine.failure)
            if world.replicas > 1:
                good = _had_to_fail(world, record) or bool(world.engine.failure)
        case "deadline_exceeded":
            good = ask.timeout is not None and end - begin >= ask.timeout
        case "queue_full":
            good = world.plan.scheduling.max_waiting < 100
        case "too_many_requests":
            good = world.plan.max_in_flight < 100
        case "too_many_connections":
            good = world.plan.max_connections < 100
        case "rate_limit_exceeded":
            good = world.plan.concurrency.get(ask.key or "") is not None
        case "body_timeout" | "header_timeout":
            good = ask.sender != "quick" or faults.happened("process stands still")
        case "internal" | "None":
            what = ("logits are not finite", "request has no memory", *TEXT_FAULTS)
            good = bool(faults.between(begin, end, *what))
        case "invalid_adapter":
            good = bool(faults.between(begin, end, "disk fails at an adapter"))
        case "too_many_adapters":
            good = ask.path == "/v1/load_lora_adapter"
        case "model_not_found":  # it could not be loaded
            good = ask.path == "/v1/unload_lora_adapter"
        case _ if record.status == 400 and ask.status == 400:
            good = True
        case _:
            good = bool(faults.between(begin, end, *TEXT_FAULTS))
    return [] if good else [f"it got {record.status} {record.errors[0]}, for which there is no reason"]


def _had_to_fail(world: World, record: Record) -> bool:
    """Whether an engine died that had started the request, or no other engine could compute it."""
    begin, end = record.sent_at, record.ended_at
    full = record.ask.request_id in world.turned_away  # the other engine's queue was full
    if record.ask.path == "/v1/load_lora_adapter":
        # The request is sent to all engines that are ready, and to none that starts later.
        asked = sum(at <= begin for at in world.ready) - sum(at <= begin for at in world.deaths)
        if sum(begin <= at <= end for at in world.deaths) >= asked:
            return True
    tried = [death for death in world.cut_off if begin <= death.at <= end and record.ask.request_id in death.given]
    if len(tried) >= world.replicas:
        return True  # each engine is tried once
    for death in world.cut_off:
        again = min((at for at in world.ready if at > death.at), default=end)
        if death.others == 0 and death.at <= end and again + 1.0 >= begin:
            return True
        if begin <= death.at <= end and (full or record.ask.request_id in death.begun):
            return True
    return False


def _was_down(world: World, begin: float, end: float) -> bool:
    """Whether no engine was ready at some time of an interval, or its parent was not notified yet."""
    for death in world.deaths:
        again = min((at for at in world.ready if at > death), default=end)
        still = sum(seconds for at, seconds in world.stood_still if again <= at <= begin + seconds)
        if death <= end and again + 1.0 + still >= begin:
            return True
    return False


def _late(world: World, record: Record) -> list[str]:
    """No request may outlive its deadline in the server by more than the time that its error needs."""
    ask = record.ask
    times = world.exchanges.get(ask.request_id)
    if ask.timeout is None or times is None:
        return []
    begin, end = times
    if end is None:
        return ["its exchange never ended"]
    still = sum(seconds for at, seconds in world.stood_still if begin - seconds <= at <= end)
    farewell = 0.0 if ask.reader == "quick" and world.plan.window >= 65536 else FAREWELL
    allowed = ask.timeout + SLACK + farewell + still + 0.1
    return (
        [f"it was served for {end - begin:.2f} s with a timeout of {ask.timeout:g} s"] if end - begin > allowed else []
    )
