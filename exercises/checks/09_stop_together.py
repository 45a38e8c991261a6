"""The check of exercises/09_stop_together.py."""

import time

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect, limit

NEVER = 10**6
CASES = [  # for each rank: how many batches it has; after how many steps it is asked to stop
    ([5, 5, 5, 5], [NEVER, NEVER, NEVER, NEVER]),
    ([6, 4, 5, 7], [NEVER, NEVER, NEVER, NEVER]),
    ([3, 8, 8, 8], [NEVER, NEVER, NEVER, NEVER]),
    ([9, 9, 9, 9], [NEVER, 3, NEVER, 6]),
    ([9, 9, 9, 9], [2, NEVER, NEVER, NEVER]),
    ([5, 4, 9, 9], [4, NEVER, NEVER, NEVER]),
    ([4, 0, 4, 4], [NEVER, NEVER, NEVER, NEVER]),
    ([9, 9, 9, 9], [NEVER, 0, NEVER, NEVER]),
    ([9, 9, 5, 9], [NEVER, NEVER, NEVER, 4]),
    ([9, 9, 9, 7], [NEVER, NEVER, 6, NEVER]),
    ([1300, 1300, 1310, 1320], [NEVER, 1200, NEVER, NEVER]),
    ([9, 9, 9, 9], [NEVER, 3, NEVER, NEVER]),  # just when this rank has answered "not yet"
]
LATE = len(CASES) - 1


def trial(folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    together, counts = [], []
    for case, (lengths, asked) in enumerate(CASES):
        if world_size > 2 and max(lengths) > 1000:
            continue  # it takes long
        lengths, asked = lengths[:world_size], asked[:world_size]
        right = min(lengths + asked)
        told = f"with {lengths} batches, " + "".join(
            f"and rank {r} asked to stop after step {after}, "
            for r, after in enumerate(asked)
            if after < NEVER
        )
        who = [r for r in range(world_size) if right in (lengths[r], asked[r])]
        hint = "this rank has no batch left: the others have to know before their step"
        if len(who) > 1:
            hint = (
                f"{len(who)} ranks, {who}, have to stop here, and this one has no batch left."
                " What do two flags make of each other? 1 + 1 is 2, which is not 1"
            )
        work = Work(lengths[rank], asked[rank], told, case == LATE, hint)
        with Exchanges() as exchanges:
            found = answer.train(work.batches(), work.step, work.asked_to_stop)
        (folder / f"new-{rank}").write_text(str(work.steps))
        (folder / f"new-{rank}").rename(folder / f"{case}-{rank}")
        if case == LATE:  # the others may have been told in this round, or in the next one
            right += work.steps > right
        expect(
            work.steps <= right,
            f"{told}this rank took {work.steps} steps; rank {who[0]} can take only {right}",
            "each rank tells the others, before each step, whether it has to stop",
            "one number from each rank, 0 or 1, and an all_reduce in which a 1 of any rank wins",
        )
        expect(
            work.steps == right,
            f"{told}this rank took {work.steps} steps; all ranks can take {right}",
            "who wanted to stop? Does a rank stop while it has a batch, 0 for one, and nobody"
            " asked?",
            "take a batch, then agree, then use it: that batch must not get lost",
        )
        expect(
            work.taken <= right + 1,
            f"{told}{work.taken} batches were taken for {right} steps",
            "take one, agree, use it; the rest is for the next epoch",
        )
        expect(
            found == right and isinstance(found, int),
            f"{told}this rank took {right} steps, and returned {found!r}",
            "return how many steps it took",
        )
        missing = wait_for([folder / f"{case}-{r}" for r in range(world_size)])
        expect(
            not missing,
            f"{told}this rank took {right} steps and came back from train();"
            f" rank {min(missing, default=0)} has not",
            "does this rank leave without a call in"
            " which the others wait? All ranks have to come to it, in each round",
            "a for loop ends without the call, and so may a or b(). Take next(batches, None),"
            " make the call, then decide, by what all ranks know alone",
        )
        taken = [int((folder / f"{case}-{r}").read_text()) for r in range(world_size)]
        expect(
            len(set(taken)) == 1,
            f"{told}the ranks took {taken} steps",
            "what a rank hears after it has told the others has to wait for the next round",
        )
        together.append(right)
        counts.append(len(exchanges.calls))
    expect(all(counts), "right, but no exchange was seen", "a collective tells all ranks at once")
    return (
        f"in {len(together)} cases, all ranks stopped together, after {together} steps;"
        f" {counts[-1]} exchange(s) in the last case, of {work.steps} steps"
    )


def wait_for(paths):
    """Return the numbers of the files that do not appear in time."""
    deadline = time.monotonic() + limit() / 4  # for a rank to come back, when another has
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.005)
    return [number for number, path in enumerate(paths) if not path.exists()]


class Work:
    """This rank's batches and steps; batch n is a tensor of numbers n."""

    def __init__(self, length, asked, told, late, hint):
        self.length, self.asked, self.told, self.late, self.hint = length, asked, told, late, hint
        self.steps = self.taken = 0
        self.answered = -1  # the step in which asked_to_stop was called last

    def batches(self):
        while self.taken < self.length:
            self.taken += 1
            yield torch.full((2,), self.taken - 1)

    def step(self, batch):
        expect(batch is not None, f"{self.told}step() got None in step {self.steps + 1}", self.hint)
        number = int(batch[0]) if torch.is_tensor(batch) else batch
        expect(
            number == self.steps,
            f"{self.told}batch {number} was used in step {self.steps + 1}, not {self.steps}",
            "each batch that is taken is used, once: next() takes one",
        )
        self.steps += 1

    def asked_to_stop(self):
        first, self.answered = self.answered != self.steps, self.steps
        return self.steps >= self.asked + (self.late and first)
