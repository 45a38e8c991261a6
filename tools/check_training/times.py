"""Where the time of a step goes, and which rank waits for which."""

import bisect
import collections
import dataclasses
import math
import os
import statistics

from .findings import Found, Question
from .gaps import evaluations_of
from .records.times import PARTS, StepTimes
from .words import in_words

# The parts of a step in the table, in seconds. The time in the calls that all ranks are in
# together, the collective ones and those of backward(), is told as waiting and exchange there.
COLUMNS = {
    "loading": "the loader makes the next batch",
    "forward": "forward passes of DDP objects",
    "backward": "backward(), until this rank has all its gradients",
    "waiting": "longer in exchanges than the rank that comes last",
    "exchange": "as long in exchanges as the rank that comes last",
    "optimizer": "optimizer.step()",
    "saving": "torch.save()",
    "rest": "the script's own code",
}
WHOLE = "whole"  # the key of the whole step's time, beside those of COLUMNS
WORKERS = "workers"  # a part of the loading: their start, and the first batch of a pass
LEAST = 10  # steps that are needed for a table


def aligned(run):
    """Return {rank: {step: StepTimes}}, in which one number is one moment, by the clock.

    A rank may take some steps alone, in a warm-up, before the others do.
    """
    found = {number: steps_of(rank) for number, rank in run.ranks.items()}
    with_steps = {rank: steps for rank, steps in found.items() if steps}
    if not with_steps:
        return found
    shortest = min(with_steps.values(), key=max)
    for rank, steps in with_steps.items():
        shift = shift_against(shortest, steps)
        found[rank] = {number - shift: times for number, times in steps.items()}
    return found


def steps_of(rank):
    """Return {number: StepTimes} of a Rank, without the time of loaders in its evaluations.

    An evaluation comes between two steps, so it is in the time of the second one.
    """
    evaluations = sorted(evaluations_of(rank), key=lambda each: each.begin)
    with_workers = [each.start.time for each in rank.passes if each.start.workers]
    found = {}
    last = -1
    for times in rank.records(StepTimes):
        if times.number <= last:  # from here on, another optimizer is the main one
            found.clear()
        last = times.number
        spans = [span for span in times.spans if not is_of_an_evaluation(span, evaluations)]
        begins = [begin for begin in with_workers if spans and spans[0].begin <= begin < times.end]
        if begins:
            spans = with_first_batch(spans, begins[0])
        found[times.number] = dataclasses.replace(times, spans=spans)
    return found


def with_first_batch(spans, begin):
    """Return the Spans of a step, in which the wait for a first batch counts as that for workers.

    begin: when the pass over the loader began.
    """
    for place, span in enumerate(spans):
        if span.part == "loading" and span.begin >= begin:
            return [*spans[:place], dataclasses.replace(span, part="workers"), *spans[place + 1 :]]
    return spans


def is_of_an_evaluation(span, evaluations):
    """Return whether a Span is that of a loader, in one of some Evaluation objects.

    evaluations: in the order in which they begin.
    """
    before = bisect.bisect(evaluations, span.begin, key=lambda each: each.begin)
    if span.part != "loading" or not before:
        return False
    return span.begin < evaluations[before - 1].end


def shift_against(shortest, steps):
    """Return by how much a rank's numbers are higher than those of the rank with the fewest.

    shortest, steps: {step: StepTimes}. 0 if another shift does not fit at least twice as well.
    """

    def distance(shift):
        distances = [
            abs(steps[number + shift].end - times.end)
            for number, times in shortest.items()
            if number + shift in steps
        ]
        return statistics.median(distances or [math.inf])

    more = max(steps) - max(shortest)
    best = min(0, more - 1, more, more + 1, key=distance)
    return best if distance(best) < distance(0) / 2 else 0


def parts_of_steps(steps_of_ranks):
    """Return {rank: {step: {part: seconds}}}, with the parts of COLUMNS, and WHOLE.

    steps_of_ranks: as aligned() returns it. Only steps are told that all ranks have noted and, if
    there are enough, that were not looked into. Waiting is what a rank stays longer in the calls
    that all are in than the one that comes last: that one's time there is the exchange's.
    """
    noted = {rank: noted_parts(steps) for rank, steps in steps_of_ranks.items()}
    common = set.intersection(*(set(steps) for steps in noted.values())) if noted else set()
    calm = {number for number in common if number >= 30 and number % 10}
    return table_of(noted, sorted(calm if len(calm) > 19 else common))


def table_of(noted, numbers):
    """Return {rank: {step: {part: seconds}}} of some steps, with the parts of COLUMNS, and WHOLE.

    noted: {rank: {step: {part: seconds}}}, with the parts of records.times, and WHOLE.
    """
    table = {rank: {} for rank in noted}
    for number in numbers:
        rows = {rank: steps[number] for rank, steps in noted.items()}
        exchange = sum(
            min(row[part] for row in rows.values()) for part in ("exchange", "collective")
        )
        for rank, row in rows.items():
            table[rank][number] = with_waiting(row, exchange)
    return table


def noted_parts(steps):
    """Return {step: {part: seconds}} of one rank, with the parts of records.times, and WHOLE."""
    found = {}
    for number, times in steps.items():
        if number < 3 or not times.spans:
            continue
        before = steps.get(number - 1)
        begins = (span.begin for span in times.spans)
        start = before.end + before.own if before else min(begins)
        seconds = dict.fromkeys(PARTS, 0.0)
        for span in times.spans:
            seconds[span.part] += max(0, span.end - max(span.begin, start))
        found[number] = {**seconds, WHOLE: times.end - start}
    return found


def with_waiting(row, exchange):
    """Return {part: seconds} of COLUMNS, WHOLE and WORKERS.

    exchange: seconds of the last rank in it.
    """
    parts = {
        "loading": row["loading"] + row["workers"],
        "forward": row["forward"],
        "backward": row["backward"],
        "waiting": row["exchange"] + row["collective"] - exchange,
        "exchange": exchange,
        "optimizer": row["optimizer"],
        "saving": row["saving"],
    }
    rest = max(0.0, row[WHOLE] - sum(parts.values()))
    return {**parts, "rest": rest, WHOLE: row[WHOLE], WORKERS: row["workers"]}


def medians_of(steps):
    """Return {part: median of the seconds} of one rank. steps: {step: {part: seconds}}."""
    return {
        part: statistics.median(row[part] for row in steps.values()) for part in [*COLUMNS, WHOLE]
    }


def steps_in(table):
    """Return the number of steps in a table of parts_of_steps()."""
    return len(next(iter(table.values()), {}))


def lines_of(run, table, busy=True):
    """Yield the lines of the table, 100 columns at most.

    busy: whether the load of this machine counts, as the ranks have just run on it.
    """
    if steps_in(table) < LEAST:
        yield f"too few steps to tell the time ({steps_in(table)} that all ranks have noted)"
        return
    yield "milliseconds of a step, medians; range: of nine steps in ten"
    yield "rank    step           range" + "".join(f"  {name}" for name in COLUMNS)
    for rank, steps in sorted(table.items()):
        yield line_of(rank, steps)
    load, cores = os.getloadavg()[0], run.cores_of(run.first)
    if busy and load > 3 * cores:
        yield (
            f"the machine is busy (load {load:.0f} on {cores} cores): on an idle one, the parts may"
            " be others"
        )


def line_of(rank, steps, shown=COLUMNS):
    """Return a rank's line of the table. steps: {step: {part: seconds}}. shown: parts."""
    medians = medians_of(steps)
    totals = sorted(row[WHOLE] for row in steps.values())
    left_out = len(totals) // 20  # at each end
    spread = f"{milliseconds(totals[left_out])} to {milliseconds(totals[-1 - left_out])}"
    texts = {name: milliseconds(medians[name]) for name in shown}
    if not any(row.get("forward") for row in steps.values()):
        texts["forward"] = "-"  # no DDP object is called
    columns = [f"{texts[name]:>{2 + len(name)}}" for name in shown]
    return f"{rank:4} {milliseconds(statistics.median(totals)):>7} {spread:>15}{''.join(columns)}"


def milliseconds(seconds):
    """Return seconds as a text in milliseconds, which is short for a long time, too."""
    return f"{1e3 * seconds:.{1 if seconds < 1 else 0}f}"


def findings_of(table, machines=None):
    """Yield what is found in a table of parts_of_steps().

    machines: {rank: name of its machine}; None: all run on one.
    """
    if steps_in(table) < LEAST:
        return
    yield from shares_of_ranks(table)
    machines = machines or dict.fromkeys(table, "")
    yield from waits(table, machines)
    yield from large_parts(medians_of(table[min(table)]), len({*machines.values()}) > 1)


def shares_of_ranks(table):
    """Yield what is found of the loaders and the saves of all ranks, if there are enough steps."""
    if steps_in(table) >= LEAST:
        for rank, steps in table.items():
            yield from large_shares(rank, steps)


def large_shares(rank, steps):
    """Yield a finding if a rank's loader, or its saves, take much of its time."""
    saving = sum(row["saving"] for row in steps.values()) / sum(
        row[WHOLE] for row in steps.values()
    )
    # A loader that is too slow is so in many steps. gaps.py tells of single long ones, and asks
    # about workers that are started in each epoch.
    rows = sorted(steps.values(), key=lambda row: row[WHOLE])
    calm = rows[: len(rows) - math.ceil(len(rows) / 50)]
    loading = sum(row["loading"] - row[WORKERS] for row in calm)
    loading /= sum(row[WHOLE] for row in calm)
    if loading > 0.5:
        yield Found(
            f"rank {rank} waits for its loader for {loading:.0%} of the time of its steps",
            "more workers, or less work for each item (of a stream: does each worker read all?)",
            "benchmarks/README.md#throughput",
        )
    if saving > 0.2:
        yield Found(
            f"rank {rank} saves for {saving:.0%} of the time of its steps",
            "save more rarely, or from a thread's copy",
            "recipes/checkpoint_any_world_size.py",
        )


def waits(table, machines, least=20):
    """Yield a finding for each rank for which others wait in most steps, or for each such machine.

    machines: {rank: name of its machine}. least: so many steps are needed.
    """
    shares = {rank: typical_share(steps) for rank, steps in table.items()}
    waiting = [rank for rank, share in shares.items() if share > 0.3 and len(table[rank]) >= least]
    by_last = collections.defaultdict(list)  # {(the ranks that come last): [ranks that wait]}
    for rank in waiting:
        last = last_in_most_steps(rank, table, machines)
        if last and rank not in last:
            by_last[last].append(rank)
    for last, ranks in by_last.items():
        share = statistics.median(shares[rank] for rank in ranks)
        yield wait_of(ranks, last, share, table, machines)


def typical_share(steps):
    """Return the median of the share of a step's time in which a rank waits."""
    return statistics.median(row["waiting"] / row[WHOLE] for row in steps.values())


def wait_of(ranks, last, share, table, machines):
    """Return the finding that ranks wait for one, or for those of one machine.

    last: the ranks that come last. share: of the time of a step. table, machines: as of waits().
    """
    own_parts = "loading", "forward", "backward", "optimizer", "saving", "rest"
    mine, others = [
        {
            part: statistics.median(medians_of(table[rank])[part] for rank in some)
            for part in own_parts
        }
        for some in (ranks, last)
    ]
    longer = {part: others[part] - mine[part] for part in own_parts}
    part = max(longer, key=longer.get)
    where = 'its own code (the column "rest")' if part == "rest" else part
    for_whom = f"rank {last[0]}" if len(last) == 1 else machines[last[0]]
    verb = "waits" if len(ranks) == 1 else "wait"
    return Found(
        f"{in_words(ranks)} {verb} for {for_whom} in {share:.0%} of the time of a step",
        f"{for_whom} takes {1e3 * longer[part]:.1f} ms longer in {where}",
        "pitfalls/slow_rank.py",
    )


def last_in_most_steps(rank, table, machines):
    """Return the rank that waits least in 80% of the steps, as a tuple.

    If now one, now another one of a machine does: all of that machine's. Else (). Steps count in
    which this rank waits for more than a tenth of the time.
    """
    last = collections.Counter()
    for number, row in table[rank].items():
        if row["waiting"] > 0.1 * row[WHOLE]:
            waiting = {other: steps[number]["waiting"] for other, steps in table.items()}
            last[min(waiting, key=waiting.get)] += 1
    if not last:
        return ()
    most = 0.8 * len(table[rank])
    [(other, count)] = last.most_common(1)
    if count > most:
        return (other,)
    there = [each for each in sorted(table) if machines[each] == machines[other]]
    is_another = len({*machines.values()}) > 1 and machines[rank] != machines[other]
    return tuple(there) if is_another and sum(last[each] for each in there) > most else ()


def large_parts(medians, on_several_machines=False):
    """Yield a question if the exchange, or the script's own code, takes most of a step."""
    if not medians["forward"]:
        return
    step = f"of a step of {1e3 * medians[WHOLE]:.1f} ms"
    if medians["exchange"] > max(0.6 * medians[WHOLE], 5e-4):
        link = "; a slow link of one machine looks so, too: tools/check_machines.py measures it"
        yield Question(
            f"the exchange takes {medians['exchange'] / medians[WHOLE]:.0%} {step}",
            "a larger batch on each rank, or accumulation, makes fewer of them"
            + (link if on_several_machines else ""),
            "benchmarks/README.md",
        )
    if medians["rest"] > max(0.6 * medians[WHOLE], 5e-3):
        yield Question(
            "the script's own code between the other parts takes"
            f" {medians['rest'] / medians[WHOLE]:.0%} {step}",
            "preparing batches, printing, metrics, models outside DDP?",
            "benchmarks/README.md",
        )
