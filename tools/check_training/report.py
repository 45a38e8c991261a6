"""Puts together what is said of a command, and prints it."""

import json
import pathlib
import textwrap
from dataclasses import dataclass, replace

from . import gaps, gpu_times, links, machines, times
from .findings import Found, judge_all
from .records.files import Save
from .records.model import Buffers, Forward
from .records.optimizer import ModelCopy
from .rules import RULES
from .watching import ALONE
from .words import in_words

TOP = pathlib.Path(__file__).absolute().parents[2]  # where the pages are
COLUMNS = 100  # of a printed line
NOT_LOOKED_INTO = {  # {a name in FEATURES: what is not seen of it}
    "shards": "the weights of DTensors or FSDP (their ranks hold parts)",
    "sharded saves": "what torch.distributed.checkpoint saves",
    "to_one": "what ranks send to each other one by one (a pipeline)",
    "groups": "which groups should hold the same weights, where DDP does not say so",
    "join": "weights and unequal shares, as Join is used",
}


@dataclass(slots=True)
class Report:
    """All that is said."""

    findings: list  # those that are Found first
    lines: list[str]  # the times, and what was not seen
    steps: dict | None  # {rank: {step: StepTimes}} for a picture; None: there are too few
    status: int  # of the tool: 0 nothing found, 1 found or nothing seen


def put_together(records, watched, seconds, stall):
    """Return a Report. watched: a Watched. seconds, stall: the options, as of watching.watch()."""
    judgement = judge_all(records, RULES)
    findings, lines, steps = list(judgement.findings), [], {}
    longest = longest_run(records)
    if longest is not None:
        steps = times.aligned(longest)
        table = times.parts_of_steps(steps)
        lines += machines.lines_of(longest)
        lines += times.lines_of(longest, table, busy=watched.here)
        lines += links.lines_of(longest, table)
        lines += gpu_times.lines_of(longest, gpu_times.parts_of_steps(longest, steps))
        pauses = gaps.pauses_of(longest)
        lines += gaps.lines_of(longest, pauses)
        of_time = [*findings_of_steps(longest, steps, table), *gaps.findings_of(longest, pauses)]
        of_time = [machines.with_names(each, longest) for each in of_time]
        findings += [each for each in of_time if each not in findings]
    end = how_it_ended(records, watched, stall)
    if end is not None:
        its_cause_is_said = watched.ended == "stall" and "calls" in judgement.wrong
        findings.insert(len(findings) if its_cause_is_said else 0, end)
    lines += why_nothing_is_found(records, watched, seconds, findings)
    failed = "the recorder failed in a process, which ran on without it: "
    lines += [failed + failure for failure in sorted(set(records.failures))]
    if not watched.here:
        lines += where_it_stands(records)
    by = {"seconds": f"after {seconds:g} s (--seconds)", "Ctrl-C": "by Ctrl-C"}
    if watched.ended in by:
        lines.append(f"ended {by[watched.ended]}: what comes later was not seen")
    lines += what_was_seen(records)
    findings.sort(key=lambda each: not isinstance(each, Found))
    found = any(isinstance(each, Found) for each in findings)
    has_trained = any(rank.steps for rank in all_ranks(records))
    status = int(found or not has_trained)
    can_be_drawn = longest is not None and longest.first.steps_taken > 4
    return Report(with_places(findings), lines, steps if can_be_drawn else None, status)


def findings_of_steps(run, steps, table):
    """Return what is found of the time of the steps, on the CPUs and on the GPUs of a run.

    steps: as times.aligned() returns it. table: as times.parts_of_steps() does.
    """
    on = {rank: run.machine_of(rank) for rank in run.ranks}
    table_of_gpus = gpu_times.parts_of_steps(run, steps)
    found = [*times.findings_of(table, on)]
    if gpu_times.on_gpus(run):
        # The CPU does not stay in an exchange of GPUs, and its own code may be a wait for them.
        found = [each for each in found if isinstance(each, Found)]
    if times.steps_in(table_of_gpus) >= gpu_times.LEAST:
        of_gpus = gpu_times.findings_of(table_of_gpus, table, on)
        found = [*times.shares_of_ranks(table), *of_gpus]
    of_links = [*links.findings_of(run, table)]
    if of_links:  # that the exchange takes long is its consequence
        found = [each for each in found if isinstance(each, Found)]
    return [*of_links, *found]


def longest_run(records):
    """Return the run of several ranks that has taken most steps, or None."""
    several = [run for run in records.runs if len(run.ranks) > 1]
    return max(several, key=lambda run: (run.first.steps_taken, run.first.begin), default=None)


def how_it_ended(records, watched, stall):
    """Return what is found if the command stands still or fails, or None."""
    if watched.ended == "stall":
        ranks = records.runs[-1].ranks if records.runs else dict(enumerate(records.strangers))
        return Found(
            f"it stands still for {stall:g} s: {where_ranks_stand(ranks)}",
            read="pitfalls/README.md#it-hangs-or-a-timeout-ends-it",
        )
    if not watched.here:
        return first_error(records)
    if watched.status and not watched.ended:
        failed = f"the script fails, with status {watched.status}"
        stood = where_ranks_stood(records)
        if len(set(stood.values())) > 1:
            places = "; ".join(f"rank {rank} in {place}" for rank, place in [*stood.items()][:8])
            return Found(
                f"{failed}, as the ranks are in different calls: {places}",
                watched.error,
                "pitfalls/collective_on_one_rank.py",
            )
        why = [watched.error, who_left_before(records)]
        return Found(failed, "; ".join(filter(None, why)))
    return None


def first_error(records):
    """Return what is found if a rank of the last run ends by an error, or None.

    The first one counts: the others may fail as it is gone.
    """
    if not records.runs:
        return None
    run = records.runs[-1]
    failed = [rank for rank in run.ranks.values() if rank.left and rank.left[-1].error]
    if not failed:
        return None
    first = min(failed, key=lambda rank: rank.left[-1].time)
    what = f"the script fails, on rank {first.number} at first"
    return machines.with_names(Found(what, first.left[-1].error), run)


def who_left_before(records):
    """Return in words who had left, as by sys.exit(2), before a rank of the last run failed."""
    ranks = records.runs[-1].ranks if records.runs else {}
    ends = {number: rank.left[-1] for number, rank in ranks.items() if rank.left}
    failed = min((each.time for each in ends.values() if each.error), default=0)
    before = [number for number, each in ends.items() if not each.error and each.time < failed]
    return f"{in_words(before)} had left before, without a traceback" if before else ""


def where_it_stands(records):
    """Yield lines of the last run, if records are missing, or not all of its ranks have ended.

    Such a run goes on, or was killed.
    """
    if not records.runs:
        return
    run = records.runs[-1]
    missing = [rank for rank in range(run.world_size) if rank not in run.ranks]
    if missing:
        yield f"no records of {in_words(missing)}: is the folder of a machine missing?"
    living = {number: rank for number, rank in run.ranks.items() if not rank.left and not rank.full}
    if living:
        where = machines.in_text(where_ranks_stand(living), run)
        yield f"judged up to here, as not all ranks have ended: {where}"


def where_ranks_stood(records):
    """Return {rank: "all_reduce at train.py:42"} of the last run: in which exchange each ended.

    It may have died there, or come back with an error. Ranks that were elsewhere are left out: also
    those in backward(), where no DDP object exchanges anything in it.
    """
    if not records.runs:
        return {}
    run = records.runs[-1]
    alone = ALONE if run.wrapped else (*ALONE, "backward")
    return {
        number: f"{rank.standing.what} at {rank.standing.line}"
        for number, rank in sorted(run.ranks.items())
        if rank.standing.what not in alone
    }


def where_ranks_stand(ranks):
    """Return "rank 0 in all_reduce at train.py:42; rank 1 in no call of torch".

    ranks: {number: Rank}.
    """
    return "; ".join(
        f"rank {number} {rank.where or 'in no call of torch'}"
        for number, rank in sorted(ranks.items())[:8]
    )


def all_ranks(records):
    """Return the ranks of all runs, and the processes without a group."""
    return [rank for run in records.runs for rank in run.ranks.values()] + records.strangers


def why_nothing_is_found(records, watched, seconds, findings):
    """Yield the line that says why there is nothing to judge, or that nothing is found."""
    ranks = all_ranks(records)
    if not ranks:
        if watched.ended == "seconds":
            yield f"no process came to training within {seconds:g} s: --seconds gives it more"
        elif watched.ended:
            yield "no process came to training yet"
        elif watched.status:
            yield "no process came to training"
        else:
            yield (
                "no process of the command was seen to train: python -I and -E, and a PYTHONPATH"
                " that the script sets anew, keep the recorder out"
            )
    elif not any(rank.steps for rank in ranks):
        yield why_no_step_was_judged(records, ranks)
    elif not findings:
        alone = longest_run(records) is None
        yield "one rank alone: there was nothing to compare" if alone else "nothing found"


def why_no_step_was_judged(records, ranks):
    """Return the line that says why no rank has noted a step."""
    if records.failures:
        return "the recorder failed, so there was nothing to judge"
    if any(rank.steps_taken for rank in ranks):
        return "no parameter of the optimizer is a tensor, so there was nothing to judge"
    return (
        "no optimizer of torch took a step, so there was nothing to judge. Does it find a"
        " finished checkpoint? Then start it in a new folder"
    )


def what_was_seen(records):
    """Yield two lines: what was looked at, and what was not seen."""
    ranks = all_ranks(records)
    most_ranks = max((len(run.ranks) for run in records.runs), default=0)
    steps = max((rank.steps_taken for rank in ranks), default=0)
    compared = [len(numbers) for rank in ranks for numbers in rank.steps.values()]
    passes = max((len(rank.passes) for rank in ranks), default=0)
    # pickle saves each tensor into memory, by torch.save().
    saves = max((sum(1 for save in rank.records(Save) if save.path) for rank in ranks), default=0)
    yield (
        f"looked at: ranks {most_ranks}, starts {len(records.runs)}; of a rank: steps {steps}"
        f" ({max(compared, default=0)} bit by bit), passes over loaders {passes}, saves {saves}"
    )
    yield "not seen: " + "; ".join(what_was_not_seen(records))


def what_was_not_seen(records):
    """Return a list of texts."""
    ranks = all_ranks(records)
    features = set().union(*(run.features for run in records.runs))
    unseen = [text for feature, text in NOT_LOOKED_INTO.items() if feature in features]
    unseen += what_was_not_seen_of_data(records)
    if not any(rank.records(Forward) for rank in ranks):
        unseen.append('forward passes outside DDP (their time is in "rest")')
    if not any(rank.records(Buffers) for rank in ranks):
        unseen.append("buffers (those of DDP's models are compared in step 9)")
    if len(records.runs) < 2:
        unseen.append("a restart")
    if any(rank.full for rank in ranks):
        unseen.append("what came when a rank had no more room for records")
    if any(not save.path for rank in ranks for save in rank.records(Save)):
        unseen.append("what torch.save() writes into memory")
    if any(rank.evaluations() or rank.records(ModelCopy) for rank in ranks):
        unseen.append("figures of your own, and copies of the weights outside modules")
    devices = {note.device for rank in ranks for note in rank.optimizers.values()}
    if devices - {"cpu"}:
        unseen.append("weights on GPUs after the first 20 steps")
    return [*unseen, "whether loss, rates and masks are as you mean"]


def what_was_not_seen_of_data(records):
    """Yield texts."""
    ranks = all_ranks(records)
    passes = [each for rank in ranks for each in rank.passes]
    trained = [each for each in passes if each.trains]
    if not passes:
        yield "the data: no DataLoader was used (only what goes into DDP is compared)"
        return
    if not any(each.progress.exhausted for each in trained):
        yield "whole epochs: none was finished"
    for run in records.runs:
        with_data = [rank for rank in run.ranks.values() if rank.training_passes()]
        if 0 < len(with_data) < len(run.ranks):
            yield "the data of ranks that take no batch from a loader"
            break
    if any(each.start.is_stream for each in trained):
        yield "the shares of a stream (an IterableDataset)"
    if any(each.start.draws_its_items for each in trained):
        yield "the shares of a dataset that draws its items by itself"
    if any(each.progress.batches > 1 and not each.progress.batch_bits for each in trained[:9]):
        yield "what is in the batches: they begin with no tensor that may be read"
    if any(each.start.workers for each in trained):
        yield "what the loaders' workers draw by generators of their own"


def with_places(findings):
    """Return the findings with whole paths of their pages, unless the reader is where they are."""
    if not (TOP / "pitfalls").is_dir() or pathlib.Path.cwd() == TOP:
        return findings
    return [replace(each, read=each.read and f"{TOP}/{each.read}") for each in findings]


def show(report):
    """Print a Report."""
    print(f"\n{'-' * 20} check_training {'-' * 20}")
    for each in report.findings:
        first = "found: " if isinstance(each, Found) else "question: "
        indent = " " * len(first)
        page = f"read {each.read}" if each.read else ""
        show_line(each.what, first, indent)
        for text in filter(None, (each.why, page)):
            show_line(text, indent, indent)
    for line in report.lines:
        show_line(line, "", "    ")


def show_line(text, first, indent):
    """Print a line, 100 columns wide at most where it has spaces. A table's rows stay.

    first: what stands before it. indent: what stands before what follows.
    """
    if first or len(text) > COLUMNS:
        text = textwrap.fill(
            text,
            COLUMNS,
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    print(text, flush=True)


def as_json(report, watched):
    """Return a Report as JSON, for another program."""
    said = [
        {
            "level": "found" if isinstance(each, Found) else "asked",
            "what": each.what,
            "cost": each.why,
            "read": each.read,
        }
        for each in report.findings
    ]
    content = {
        "status": report.status,
        "script_status": watched.status,
        "ended": watched.ended,
        "lines": report.lines,
        "said": said,
    }
    return json.dumps(content, indent=1) + "\n"
