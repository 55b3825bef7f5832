# ruff: noqa: T201
"""The barriers of steps of 128 queries, on the CPU: every warp role as a coroutine, in random orders.

Each wait and arrival stands where the kernel has it, with its parity. Memory holds what was written last; a read that
sees another thing at its begin or end fails, and so does a run in which nobody can go on.

    python draft/bwd64_barriers.py [runs]
"""

import random
import sys


class Barrier:
    def __init__(self, count):
        self.count, self.left, self.phases = count, count, 0

    def arrive(self):
        self.left -= 1
        if self.left == 0:
            self.left, self.phases = self.count, self.phases + 1

    def passes(self, parity):
        return self.phases % 2 != parity


class Sim:
    def __init__(self, tiles, stages, draw, drop=None):
        self.tiles, self.stages, self.draw, self.drop = tiles, stages, draw, drop
        self.m = {}
        bar = Barrier
        self.k_full, self.k_empty, self.v_full, self.v_empty = bar(1), bar(2), bar(1), bar(2)
        self.q_full = [bar(1) for _ in range(stages)]
        self.do_full = [bar(1) for _ in range(stages)]
        self.ring_empty = [bar(2) for _ in range(stages)]
        self.ds_full, self.ds_empty = [bar(2), bar(2)], [bar(2), bar(2)]
        self.dq_full, self.dq_empty = [bar(1), bar(1)], [bar(1), bar(1)]
        self.flying = []
        self.out = []

    def wait(self, name, bar, parity):
        while name != self.drop and not bar.passes(parity):
            yield

    def write(self, place, value):
        self.m[place] = ("torn", value)
        yield True
        self.m[place] = value

    def read(self, place, value):
        """What a product or TMA reads while others go on."""
        for _ in range(2):
            assert self.m.get(place) == value, (place, value, self.m.get(place))
            yield True
        assert self.m.get(place) == value, (place, value, self.m.get(place))

    def land(self, place, value, bar):
        """A TMA load: lands at any time later."""

        def flight():
            yield from self.write(place, value)
            bar.arrive()

        self.flying.append(flight())

    def keys(self):
        turn = 0
        for t, _ in enumerate(self.tiles):
            yield from self.wait("k_empty", self.k_empty, turn ^ 1)
            self.land("K", t, self.k_full)
            yield from self.wait("v_empty", self.v_empty, turn ^ 1)
            bar = Barrier(2)
            bar.arrive = self._both(bar, self.v_full)
            for w in (0, 1):
                self.land(f"V{w}", t, bar)
            turn ^= 1

    def _both(self, bar, full):
        def arrive():
            bar.left -= 1
            if bar.left == 0:
                full.arrive()

        return arrive

    def queries(self):
        at = 0
        for steps in self.tiles:
            for _ in range(steps):
                slot = at % self.stages
                yield from self.wait("ring_empty", self.ring_empty[slot], (at // self.stages & 1) ^ 1)
                self.land(f"Q{slot}", at, self.q_full[slot])
                self.land(f"dO{slot}", at, self.do_full[slot])
                at += 1

    def start_dq(self, wg, at, t):
        yield from self.wait("ds_full", self.ds_full[at & 1], at // 2 & 1)
        for w in (0, 1):
            yield from self.read(f"dS{at & 1}{w}", ("dS", at))
        yield from self.read("K", t)

    def stage_dq(self, wg, at):
        self.ds_empty[at & 1].arrive()
        yield from self.wait("dq_empty", self.dq_empty[wg], (at & 1) ^ 1)
        yield from self.write(f"dQ{wg}", at)
        self.dq_full[wg].arrive()

    def consume(self, wg):
        turn = at = 0
        for t, steps in enumerate(self.tiles):
            yield from self.wait("k_full", self.k_full, turn)
            yield from self.wait("v_full", self.v_full, turn)
            for i in range(steps):
                slot, phase = at % self.stages, at // self.stages & 1
                yield from self.wait("q_full", self.q_full[slot], phase)
                yield from self.read("K", t)
                yield from self.read(f"Q{slot}", at)
                yield from self.wait("do_full", self.do_full[slot], phase)
                yield from self.read(f"V{wg}", t)
                yield from self.read(f"dO{slot}", at)
                yield from self.wait("ds_empty", self.ds_empty[at & 1], (at // 2 & 1) ^ 1)
                yield from self.write(f"dS{at & 1}{wg}", ("dS", at))
                yield from self.read(f"Q{slot}", at)
                self.ds_full[at & 1].arrive()
                if i > 0:
                    yield from self.start_dq(wg, at - 1, t)
                self.ring_empty[slot].arrive()
                if i > 0:
                    yield from self.stage_dq(wg, at - 1)
                at += 1
            if steps:
                yield from self.start_dq(wg, at - 1, t)
                yield from self.stage_dq(wg, at - 1)
            self.k_empty.arrive()
            yield from self.write(f"V{wg}", ("dV", t))
            yield from self.wait("ds_empty", self.ds_empty[at & 1], (at // 2 & 1) ^ 1)
            yield from self.write(f"dS{at & 1}{wg}", ("dK", t))
            yield from self.read(f"dS{at & 1}{wg}", ("dK", t))
            yield from self.read(f"V{wg}", ("dV", t))
            self.v_empty.arrive()
            turn ^= 1

    def writer(self, wg):
        at = 0
        for steps in self.tiles:
            for _ in range(steps):
                for _ in range(self.draw.choice((0, 0, 30))):  # its ticket's turn
                    yield True
                yield from self.wait("dq_full", self.dq_full[wg], at & 1)
                yield from self.read(f"dQ{wg}", at)
                self.out.append((wg, at))
                self.dq_empty[wg].arrive()
                at += 1

    def run(self):
        roles = [
            self.keys(),
            self.queries(),
            *(self.consume(w) for w in (0, 1)),
            *(self.writer(w) for w in (0, 1)),
        ]
        live = {n: (role, self.draw.choice((1, 1, 5, 25))) for n, role in enumerate(roles)}
        idle = 0
        number = len(roles)
        while live or self.flying:
            while self.flying:
                live[number] = self.flying.pop(), self.draw.choice((1, 10, 40))
                number += 1
            moved = False
            for n in self.draw.sample(list(live), len(live)):
                role, slow = live[n]
                if self.draw.randrange(slow):
                    continue
                try:
                    moved |= bool(next(role))
                except StopIteration:
                    del live[n]
                    moved = True
            idle = 0 if moved else idle + 1
            assert idle < 1000, "nobody can go on"
        assert len(self.out) == 2 * sum(self.tiles)


def trial(seed, drop=None):
    draw = random.Random(seed)
    tiles = [draw.choice((0, 1, 1, 2, 3, 5)) for _ in range(draw.randint(1, 7))]
    Sim(tiles, draw.choice((2, 2, 3)), draw, drop).run()


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for seed in range(runs):
        trial(seed)
    print(f"{runs} runs: right")
    waits = (
        "k_full",
        "v_full",
        "k_empty",
        "v_empty",
        "q_full",
        "do_full",
        "ring_empty",
        "ds_full",
        "ds_empty",
    )
    for drop in (*waits, "dq_full", "dq_empty"):
        caught = 0
        for seed in range(100):
            try:
                trial(seed, drop)
            except AssertionError:
                caught += 1
        print(f"without waiting for {drop}: {caught} of 100 runs fail")
