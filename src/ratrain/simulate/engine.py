"""The event engine: when does each action start and end? Compiled; imported at the first simulation.

Rules, the executor's own. Each queue (a stream of a lane) runs its actions in list order; one starts once
what it needs has finished. A transfer or collective begins when all members have come to it, and they finish
together. When a compute queue would wait, the first floating action further down in the same step whose needs
are met runs instead, to its end. At one instant everything else moves first and floats are chosen last.

Running things are jobs: job q < Q is the local action that queue q runs, job Q+i the meeting in slot i. The
heap holds each job's end at present rates; a changed rate moves it. A flat node is step * N + node.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ratrain.simulate.tables import Floats, Ints

Longs = NDArray[np.int64]

SAME_INSTANT = 1e-12
"""Relative distance below which two ends are one instant: sums of the same durations differ by rounding."""

COMPUTE = 0
"""Number of the `compute` stream."""


@njit(cache=True)
def run(
    steps: int,
    streams: int,
    queue_start: Ints,
    queue: Ints,
    floating: NDArray[np.bool_],
    pending: Ints,
    then_start: Ints,
    then: Ints,
    seconds: Floats,
    meeting: Ints,
    member_start: Ints,
    member: Ints,
    pattern: Ints,
    port_start: Ints,
    port: Ints,
    load: Floats,
    connections: Floats,
    capacity: Floats,
    slowdown: float,
    drag: float,
    first_forward: Ints,
) -> tuple[bool, Floats, Floats, Longs, Longs]:
    """Runs until every lane has begun its last step and all steps before it are over; a single step to its
    end. Arguments after `steps` are those of `Tables`; `pending` is used up.

    Returns whether it got there (or something waits for ever), and per flat node: start and end in seconds
    (-1: never), how many actions had started before, and for which flat node its compute queue stood still
    right before (-1: it did not).
    """
    nodes, queues, meetings = len(queue), len(queue_start) - 1, len(pattern)
    lanes, total = queues // streams, steps * nodes
    to_finish = nodes * max(steps - 1, 1)
    start, end = np.full(total, -1.0), np.full(total, -1.0)
    turn, stood = np.zeros(total, np.int64), np.full(total, -1, np.int64)
    started, finished, begun = 0, 0, 0

    head = np.empty(queues, np.int64)  # next in list order, `total` once through
    busy = np.zeros(queues, np.bool_)
    running = np.zeros(queues, np.int64)
    stands_for = np.full(lanes, -1, np.int64)
    arrived = np.zeros(steps * meetings, np.int32)
    # What is left to look at in this instant: actions that end, queues, compute queues that may stand still.
    over, n_over = np.zeros(queues, np.int64), 0
    todo, n_todo, in_todo = np.zeros(queues, np.int64), 0, np.zeros(queues, np.bool_)
    idle, n_idle, in_idle = np.zeros(lanes, np.int64), 0, np.zeros(lanes, np.bool_)
    # Floating actions whose needs are met, a region per lane.
    ready_start = np.zeros(lanes + 1, np.int64)
    for node in range(nodes):
        if floating[node]:
            ready_start[queue[node] // streams + 1] += steps
    ready_start = np.cumsum(ready_start)
    ready, n_ready = np.zeros(ready_start[lanes], np.int64), np.zeros(lanes, np.int64)
    # Meetings under way, in slots: each holds at least one queue.
    held = np.full(queues, -1, np.int64)
    flowing = np.zeros(queues, np.bool_)
    free, n_free = np.arange(queues), queues
    on_port = np.zeros((len(capacity), queues), np.int64)
    n_on_port = np.zeros(len(capacity), np.int64)
    shares = np.zeros(len(capacity))  # connections on a port
    changed, n_changed, in_changed = (
        np.zeros(len(capacity), np.int64),
        0,
        np.zeros(len(capacity), np.bool_),
    )
    under_way = np.zeros(lanes, np.int64)  # meetings of a lane
    remaining, since, rate = np.zeros(2 * queues), np.zeros(2 * queues), np.ones(2 * queues)
    fair = np.ones(queues)  # pace of the meeting in a slot: of time in its latency, then as its ports allow
    when = np.zeros(2 * queues)
    heap, place = np.zeros(2 * queues, np.int64), np.full(2 * queues, -1, np.int64)
    n_heap = 0

    for q in range(queues):
        head[q] = queue_start[q] if queue_start[q] < queue_start[q + 1] else total
        todo[n_todo], in_todo[q] = q, True
        n_todo += 1
    for flat in range(total):
        node = flat % nodes
        if floating[node] and pending[flat] == 0:
            lane = queue[node] // streams
            ready[ready_start[lane] + n_ready[lane]] = flat
            n_ready[lane] += 1

    now, limit = 0.0, 0.0
    while True:
        while True:  # everything that happens at this instant
            if n_over > 0:
                n_over -= 1
                flat = over[n_over]
                node = flat % nodes
                q = queue[node]
                end[flat], busy[q] = now, False
                finished += flat < to_finish
                if not in_todo[q]:
                    todo[n_todo], in_todo[q] = q, True
                    n_todo += 1
                # What a standing queue of this lane waits for may be something else now.
                lane = q // streams
                if not in_idle[lane]:
                    idle[n_idle], in_idle[lane] = lane, True
                    n_idle += 1
                for i in range(then_start[node], then_start[node + 1]):
                    later = flat - node + then[i]
                    if later >= total:
                        continue
                    pending[later] -= 1
                    if pending[later] == 0:
                        node_later = later % nodes
                        q = queue[node_later]
                        if floating[node_later]:
                            ready[ready_start[lane] + n_ready[lane]] = later
                            n_ready[lane] += 1
                        if not in_todo[q]:
                            todo[n_todo], in_todo[q] = q, True
                            n_todo += 1
                continue
            if n_heap > 0 and when[heap[0]] <= limit:
                job = heap[0]
                n_heap = _unschedule(heap, place, when, n_heap)
                if job < queues:
                    over[n_over] = running[job]
                    n_over += 1
                    continue
                slot = job - queues
                step, k = held[slot] // meetings, held[slot] % meetings
                ports = pattern[k]
                begins = not flowing[slot] and port_start[ports] < port_start[ports + 1]
                if begins:
                    flowing[slot] = True
                    remaining[job], since[job], rate[job] = 1.0, now, 0.0  # its whole, at no pace yet
                for i in range(port_start[ports], port_start[ports + 1]):
                    p = port[i]
                    shares[p] += connections[ports] if begins else -connections[ports]
                    if begins:
                        on_port[p, n_on_port[p]] = slot
                        n_on_port[p] += 1
                    else:
                        n_on_port[p] -= 1
                        for n in range(n_on_port[p]):
                            if on_port[p, n] == slot:
                                on_port[p, n] = on_port[p, n_on_port[p]]
                                break
                    if not in_changed[p]:
                        changed[n_changed], in_changed[p] = p, True
                        n_changed += 1
                if begins:
                    continue
                for i in range(member_start[k], member_start[k + 1]):
                    under_way[queue[member[i]] // streams] -= 1
                    over[n_over] = step * nodes + member[i]
                    n_over += 1
                free[n_free] = slot
                n_free += 1
                continue
            if n_todo > 0:
                n_todo -= 1
                q = todo[n_todo]
                in_todo[q] = False
                if busy[q] or head[q] == total:
                    continue
                flat = head[q]
                floated = start[flat] >= 0
                lane = q // streams
                if pending[flat] > 0:
                    if q % streams == COMPUTE and not in_idle[lane]:
                        idle[n_idle], in_idle[lane] = lane, True
                        n_idle += 1
                    continue
                node = flat % nodes
                head[q] += 1
                if node + 1 == queue_start[q + 1]:
                    head[q] = min(total, flat - node + nodes + queue_start[q])
                if floated:
                    todo[n_todo], in_todo[q] = q, True
                    n_todo += 1
                    continue
            elif n_idle > 0:
                n_idle -= 1
                lane = idle[n_idle]
                in_idle[lane] = False
                q = lane * streams + COMPUTE
                blocked = head[q]
                if busy[q] or blocked == total or pending[blocked] == 0:
                    continue
                flat = (blocked // nodes + 1) * nodes
                for i in range(ready_start[lane], ready_start[lane] + n_ready[lane]):
                    flat = min(flat, ready[i])
                if flat == (blocked // nodes + 1) * nodes:
                    stands_for[lane] = blocked
                    continue
                node = flat % nodes
            else:
                break
            # `flat` starts.
            start[flat], turn[flat] = now, started
            started += 1
            busy[q], running[q] = True, flat
            if q % streams == COMPUTE:
                stood[flat] = stands_for[lane]
                stands_for[lane] = -1
            if floating[node]:
                for i in range(ready_start[lane], ready_start[lane] + n_ready[lane]):
                    if ready[i] == flat:
                        n_ready[lane] -= 1
                        ready[i] = ready[ready_start[lane] + n_ready[lane]]
                        break
            step = flat // nodes
            if step == steps - 1 and node == first_forward[lane]:
                begun += 1
            row = step if len(seconds) > 1 else 0
            k = meeting[node]
            if k < 0:
                if seconds[row, node] == 0:
                    over[n_over] = flat
                    n_over += 1
                else:
                    slow = q % streams == COMPUTE and under_way[lane] > 0
                    remaining[q], since[q] = seconds[row, node], now
                    rate[q] = 1 / slowdown if slow else 1.0
                    n_heap = _schedule(heap, place, when, n_heap, q, now + remaining[q] / rate[q])
                continue
            arrived[step * meetings + k] += 1
            if arrived[step * meetings + k] == member_start[k + 1] - member_start[k]:
                latency = 0.0
                for i in range(member_start[k], member_start[k + 1]):
                    latency = max(latency, seconds[row, member[i]])
                n_free -= 1
                slot = free[n_free]
                job = queues + slot
                held[slot], flowing[slot], fair[slot] = step * meetings + k, False, 1.0
                remaining[job], since[job], rate[job] = latency, now, 1.0
                n_heap = _schedule(heap, place, when, n_heap, job, now + latency)
                for i in range(member_start[k], member_start[k + 1]):
                    under_way[queue[member[i]] // streams] += 1

        # Ports whose transfers came or went divide anew.
        while n_changed > 0:
            n_changed -= 1
            p = changed[n_changed]
            in_changed[p] = False
            for n in range(n_on_port[p]):
                slot = on_port[p, n]
                other = pattern[held[slot] % meetings]
                pace = np.inf
                for i in range(port_start[other], port_start[other + 1]):
                    pace = min(pace, capacity[port[i]] * (connections[other] / shares[port[i]]) / load[i])
                job = queues + slot
                fair[slot] = pace
                if pace != rate[job]:
                    n_heap = _repace(heap, place, when, n_heap, job, now, pace, remaining, since, rate)
        if drag != 1:
            for slot in range(queues):
                job = queues + slot
                if place[job] < 0:
                    continue
                pace, k = fair[slot], held[slot] % meetings
                for i in range(member_start[k], member_start[k + 1]):
                    if place[queue[member[i]] // streams * streams + COMPUTE] >= 0:
                        pace = fair[slot] / drag
                        break
                if pace != rate[job]:
                    n_heap = _repace(heap, place, when, n_heap, job, now, pace, remaining, since, rate)
        if slowdown != 1:
            for lane in range(lanes):
                q = lane * streams + COMPUTE
                pace = 1 / slowdown if under_way[lane] > 0 else 1.0
                if place[q] >= 0 and pace != rate[q]:
                    n_heap = _repace(heap, place, when, n_heap, q, now, pace, remaining, since, rate)

        if finished == to_finish and (steps == 1 or begun == lanes):
            return True, start, end, turn, stood
        if n_heap == 0:
            return False, start, end, turn, stood
        now = when[heap[0]]
        limit = now * (1 + SAME_INSTANT)


@njit(cache=True)
def _repace(
    heap: Longs,
    place: Longs,
    when: Floats,
    size: int,
    job: int,
    now: float,
    pace: float,
    remaining: Floats,
    since: Floats,
    rate: Floats,
) -> int:
    """Lets `job` go on at another pace from now. Returns the new size of the heap."""
    remaining[job] = max(0.0, remaining[job] - (now - since[job]) * rate[job])
    since[job], rate[job] = now, pace
    return _schedule(heap, place, when, size, job, now + remaining[job] / pace)


@njit(cache=True)
def _schedule(heap: Longs, place: Longs, when: Floats, size: int, job: int, time: float) -> int:
    """Puts `job` into the heap at `time`, or moves it there. Returns the new size."""
    at = place[job]
    if at < 0:
        at = size
        size += 1
    when[job] = time
    _sift(heap, place, when, size, at, job)
    return size


@njit(cache=True)
def _unschedule(heap: Longs, place: Longs, when: Floats, size: int) -> int:
    """Takes the earliest job off the heap. Returns the new size."""
    place[heap[0]] = -1
    size -= 1
    if size > 0:
        _sift(heap, place, when, size, 0, heap[size])
    return size


@njit(cache=True)
def _sift(heap: Longs, place: Longs, when: Floats, size: int, at: int, job: int) -> None:
    """Puts `job` where it belongs, from the hole at position `at` up or down."""
    time = when[job]
    while at > 0 and when[heap[(at - 1) // 2]] > time:
        heap[at] = heap[(at - 1) // 2]
        place[heap[at]] = at
        at = (at - 1) // 2
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and when[heap[child + 1]] < when[heap[child]]:
            child += 1
        if when[heap[child]] >= time:
            break
        heap[at] = heap[child]
        place[heap[at]] = at
        at = child
    heap[at] = job
    place[job] = at
