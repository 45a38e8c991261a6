"""Which machine has a slow link: all leave an exchange together, so the times of steps do not tell.

A link's speed comes from the kernel's figures: bytes that have arrived, by the time in which some
were under way. A rank that comes late does not make a link slower by that. Short messages do: the
other side takes its time to confirm them. So speeds are compared where much is sent.
"""

import collections
from dataclasses import dataclass

from .findings import Found
from .records.process import Links
from .times import LEAST, WHOLE, medians_of, steps_in

LEAST_SENT = 1e7  # bytes from one machine to another, for a speed
PART_OF_MOST = 0.1  # and so much of what the pair has sent that has sent most
SLOWER = 4  # times, than the fastest of the others
SHARE = 0.4  # of a step's time that the exchange must take


@dataclass(slots=True)
class Speed:
    """What one machine has sent to another one."""

    sent: int = 0  # bytes
    seconds: float = 0.0  # in which some were under way, over all connections

    @property
    def rate(self):
        """Bits a second."""
        return 8 * self.sent / max(self.seconds, 1e-6)


def speeds_of(run):
    """Return {(name of a machine, name of another): Speed}, of those with enough bytes."""
    links_of = {number: latest(rank.records(Links)) for number, rank in run.ranks.items()}
    places = {}  # {address: name of the machine that has it}
    for rank, links in links_of.items():
        places.update({link.local: run.machine_of(rank) for link in links})
    speeds = collections.defaultdict(Speed)
    for rank, links in links_of.items():
        for link in links:
            here, there = run.machine_of(rank), places.get(link.peer)
            if there not in (None, here):
                speeds[here, there].sent += link.sent
                speeds[here, there].seconds += link.seconds
    most = max((speed.sent for speed in speeds.values()), default=0)
    least = max(LEAST_SENT, PART_OF_MOST * most)
    return {pair: speed for pair, speed in speeds.items() if speed.sent >= least}


def latest(records):
    """Return the Link objects of a rank: of each pair of addresses, that with the most bytes.

    records: the rank's Links. In a later one, a connection may be closed.
    """
    found = {}
    for link in (link for noted in records for link in noted.links):
        pair = link.local, link.peer
        if pair not in found or link.sent >= found[pair].sent:
            found[pair] = link
    return [*found.values()]


def slow_machine(speeds):
    """Return the one machine to or from which all slow pairs go, and the fast ones do not; or None.

    speeds: as of speeds_of(). Of two machines, the link of either may be the slow one.
    """
    machines = {name for pair in speeds for name in pair}
    fastest = max((speed.rate for speed in speeds.values()), default=0)
    slow = {pair for pair, speed in speeds.items() if speed.rate < fastest / SLOWER}
    if len(machines) < 3 or len(slow) < 2:
        return None
    common = set.intersection(*(set(pair) for pair in slow))
    fast = {name for pair in speeds if pair not in slow for name in pair}
    found = common - fast
    return found.pop() if len(found) == 1 else None


def share_of_exchange(run, table):
    """Return the exchange's share of a step's time; 0.0: on one machine, or too few steps.

    table: as times.parts_of_steps() returns it.
    """
    if len(run.machines) < 2 or steps_in(table) < LEAST:
        return 0.0
    medians = medians_of(table[min(table)])
    return medians["exchange"] / medians[WHOLE]


def findings_of(run, table):
    """Yield what is found of the links of a Run. table: as times.parts_of_steps() returns it."""
    share = share_of_exchange(run, table)
    speeds = speeds_of(run) if share > SHARE else {}
    name = slow_machine(speeds)
    if name is None:
        return
    with_it = [speed.rate for pair, speed in speeds.items() if name in pair]
    others = [speed.rate for pair, speed in speeds.items() if name not in pair]
    yield Found(
        f"all wait for the link of {name}: to and from it go {in_bits(max(with_it))}, between the"
        f" others {in_bits(max(others))}",
        f"the exchange takes {share:.0%} of the time of a step; tools/check_machines.py measures"
        " links",
        "tools/README.md",
    )


def lines_of(run, table):
    """Yield a line with the speeds between machines, at most six, if the exchange takes long."""
    speeds = speeds_of(run) if share_of_exchange(run, table) > SHARE else {}
    if 0 < len(speeds) <= 6:
        texts = [f"{one} to {two} {in_bits(speed.rate)}" for (one, two), speed in speeds.items()]
        yield f"links, by TCP, while something was under way: {'; '.join(texts)}"


def in_bits(rate):
    """Return bits a second as a text."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= size:
            return f"{rate / size:.{0 if rate >= 10 * size else 1}f} {unit}"
    return f"{rate / 1e3:.0f} kbit/s"
