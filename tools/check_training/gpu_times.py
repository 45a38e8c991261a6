"""Where the time of a step goes on the GPUs, and which GPU waits for which."""

from . import times
from .findings import Question
from .records.optimizer import Optimizer
from .records.times import PARTS, GpuTimes

LEAST = 8  # steps that are needed for a table: one of ten is measured
# Of times.COLUMNS, what a GPU can be in. The rest: nothing to do, or work between the parts.
COLUMNS = [part for part in times.COLUMNS if part not in ("loading", "saving")]


def on_gpus(run):
    """Return whether a Run trains on anything but CPUs."""
    ranks = run.ranks.values()
    devices = {each.device for rank in ranks for each in rank.records(Optimizer)}
    return bool(devices - {"cpu"}) or any(rank.records(GpuTimes) for rank in ranks)


def parts_of_steps(run, steps_of_ranks):
    """Return {rank: {step: {part: seconds}}}, as times.parts_of_steps() does, by the GPUs' clocks.

    steps_of_ranks: as times.aligned() returns it, which shifts the numbers of some ranks.
    """
    noted = {}
    for number, rank in run.ranks.items():
        first, came = next(iter(steps_of_ranks.get(number, {}).items()), (0, None))
        shift = came.number - first if came else 0
        noted[number] = {each.number - shift: row_of(each) for each in rank.records(GpuTimes)}
    common = set.intersection(*(set(steps) for steps in noted.values())) if noted else set()
    return times.table_of(noted, sorted(common))


def row_of(gpu_times):
    """Return {part: seconds} of a GpuTimes, with the parts of records.times, and WHOLE."""
    row = dict.fromkeys(PARTS, 0.0)
    for each in gpu_times.parts:
        if each.part in row:
            row[each.part] += each.seconds
    return row | {times.WHOLE: sum(each.seconds for each in gpu_times.parts)}


def lines_of(run, table):
    """Yield the lines of the table; nothing, if the run trains on CPUs."""
    if not on_gpus(run):
        return
    steps = times.steps_in(table)
    if steps < LEAST:
        yield (
            "too few steps to tell the time on the GPUs, by their own clocks"
            f" ({steps} were measured of {LEAST}; one of ten is, after the first 25)"
        )
        return
    yield f"the same on the GPUs, by their own clocks, in {steps} steps: what each waits for counts"
    yield "rank    step           range" + "".join(f"  {name}" for name in COLUMNS)
    for rank, rows in sorted(table.items()):
        yield times.line_of(rank, rows, COLUMNS)


def findings_of(table, table_of_cpus, machines):
    """Yield what is found in a table of parts_of_steps().

    table_of_cpus: as times.parts_of_steps() returns it. machines: {rank: name of its machine}.
    """
    yield from times.waits(with_loading(table, table_of_cpus), machines, least=LEAST)
    medians = times.medians_of(table[min(table)])
    whole, exchange, rest = (medians[part] for part in (times.WHOLE, "exchange", "rest"))
    step = f"of a step of {1e3 * whole:.1f} ms"
    if exchange > max(0.6 * whole, 5e-4):
        yield Question(
            f"the GPU is in the exchange for {exchange / whole:.0%} {step}",
            "a larger batch on each rank, or accumulation, makes fewer of them",
            "benchmarks/README.md",
        )
    if rest > max(0.6 * whole, 5e-3):
        yield Question(
            f"the GPU is in none of the parts for {rest / whole:.0%} {step}",
            "it waits for the loader, or for Python (see the table above), or works elsewhere",
            "benchmarks/README.md",
        )


def with_loading(table, table_of_cpus):
    """Return a table in which a GPU's rest is loading or saving, as long as its CPU was in these.

    table, table_of_cpus: as of findings_of().
    """
    found = {}
    for rank, rows in table.items():
        found[rank] = {}
        of_cpu = {"loading": 0.0, "saving": 0.0}  # as long as no step of the CPUs can be told
        if table_of_cpus[rank]:
            of_cpu = times.medians_of(table_of_cpus[rank])
        for number, row in rows.items():
            loading = min(row["rest"], of_cpu["loading"])
            saving = min(row["rest"] - loading, of_cpu["saving"])
            rest = row["rest"] - loading - saving
            found[rank][number] = row | {"loading": loading, "saving": saving, "rest": rest}
    return found
