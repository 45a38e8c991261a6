"""Do the ranks meet, and do they make the same collective calls?"""

import collections
import json

from ..findings import Found, Question, rule
from ..records.files import Save
from ..records.model import Forward
from ..records.process import Call, Forgotten, GroupMade, Joined, Started
from ..records.times import StepTimes
from ..words import differ, in_words, verb
from .pages import SILENT

# Calls whose tensor has the same size on all ranks.
SAME_SIZE = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"}
LONGEST = 3000  # calls of a group that are compared; the recorder notes no more


@rule(of_strangers=True)
def no_group(ranks):
    """Several processes that torchrun has started never meet: they train so many models.

    Looks alike, and is right: a sweep, in which RANK chooses a setting. Then the weights differ
    from the first step on, or from a later one, and it is asked. What meets by RPC is left out.
    """
    alone = [rank for rank in ranks if rank.number is None and trains_alone(rank)]
    if len(alone) < 2 or exchange_by_other_means(alone):
        return
    kind = Found if do_the_same(alone) or save_to_one_file(alone) else Question
    doubt = "" if kind is Found else "unless gradients go by another library, "
    yield kind(
        f"{len(alone)} processes train, and none calls init_process_group(): so many models",
        f"{doubt}each learns from its own data alone: no gradient is exchanged",
        "docs/how_a_job_starts.md#six-parts",
    )


@rule(of_strangers=True)
def groups_of_one(ranks):
    """Processes that torchrun has started join groups of one rank: they train so many models.

    Looks alike, and is right: as in no_group; processes that run one after another; groups of
    several ranks, of which the records of one are there.
    """
    alone = [rank for rank in ranks if rank.number is not None and trains_alone(rank)]
    alone = at_one_time([rank for rank in alone if rank.world_size == 1])
    if len(alone) < 2 or exchange_by_other_means(alone):
        return
    sure = train_the_same(alone) or save_to_one_file(alone)
    kind = Found if sure else Question
    doubt = "" if sure else "is each a trial of its own? Else "
    told = alone[0].records(Started)[0].world_size
    line = alone[0].records(Joined)[0].line
    yield kind(
        f"{len(alone)} processes train, each in a group of one rank, though WORLD_SIZE is {told}"
        f" ({line}): so many models",
        f"{doubt}leave store, rank and world_size out of init_process_group(): torchrun has set"
        " them",
        SILENT,
    )


def trains_alone(rank):
    """Return whether a Rank has taken steps, was told of others, and does not meet them by RPC.

    Others: WORLD_SIZE in its environment is more than 1.
    """
    started = rank.records(Started)
    if not rank.steps or not started or "to_one" in rank.features:
        return False
    return int(started[0].world_size or 1) > 1


def at_one_time(ranks):
    """Return those of the last attempt that run while the last of them begins.

    Ranks with another clock count as well.
    """
    last = max((rank.attempt for rank in ranks), default=0)
    ranks = [rank for rank in ranks if rank.attempt == last]
    newest = max(ranks, key=lambda rank: rank.begin, default=None)
    return [
        rank
        for rank in ranks
        if rank.machine.clock != newest.machine.clock or rank.last >= newest.begin
    ]


def train_the_same(ranks):
    """Return whether the weights of all ranks are equal in all steps that they have noted.

    In the steps in which they were read, that is: in two at least.
    """
    numbers = [next(iter(rank.steps.values())) for rank in ranks]
    common = set.intersection(*map(set, numbers))
    rows = [[steps[number].weights for steps in numbers] for number in common]
    rows = [row for row in rows if any(row[0])]
    return len(rows) > 1 and not any(differ(row) for row in rows)


def do_the_same(ranks):
    """Return whether all ranks have equal weights in all steps, and train on the same batches.

    False if no batch was noted.
    """
    batches = batches_of(ranks)
    return train_the_same(ranks) and any(batches) and not differ(batches)


def exchange_by_other_means(ranks):
    """Return whether the weights stay equal, though other batches are trained on.

    Then gradients or weights are exchanged by files, sockets or another library.
    """
    return train_the_same(ranks) and differ(batches_of(ranks))


def batches_of(ranks):
    """Return the bits of the batches that each rank trains on, a list for a rank."""
    return [
        [
            bits
            for passes in rank.training_passes().values()
            for each in passes
            for bits in each.progress.batch_bits
        ]
        for rank in ranks
    ]


def save_to_one_file(ranks):
    """Return whether all begin with the same weights, and save to one file of one machine."""
    numbers = [next(iter(rank.steps.values())) for rank in ranks]
    firsts = [steps[min(steps)].weights for steps in numbers]
    if not any(firsts[0]) or differ(firsts):
        return False
    if differ(rank.machine.key for rank in ranks):
        return False
    paths = [{save.path for save in rank.records(Save)} - {None} for rank in ranks]
    return bool(set.intersection(*paths))


@rule("calls")
def some_call_the_wrapper(run):
    """Some ranks alone call a DDP object at a line of the script.

    DDP broadcasts buffers there, and the others take that broadcast for another call.

    Looks alike, and is right: models without buffers; torch's Join; ranks that call it equally
    often, but at different lines.
    """
    if "join" in run.features:
        return
    for number, wrapped in run.wrapped.items():
        if not wrapped.sends_buffers:
            continue
        counts = {rank: calls_by_line(run, rank, number) for rank in run.members(wrapped)}
        totals = [count.total() for count in counts.values()]
        unequal = run.stalled or differ(totals)
        if min(totals, default=0) < 2 or not unequal:
            continue
        for line in sorted({line for count in counts.values() for line in count}):
            callers = [rank for rank, count in counts.items() if line in count]
            if len(callers) == len(counts):
                continue
            page = "pitfalls/wrapper_on_rank_0.py"
            what = f"{in_words(callers)} alone {verb('call', callers)} the DDP object at {line}"
            if not run.stalled and all(are_in_no_sync(run.ranks[rank], line) for rank in callers):
                continue
            if not run.stalled and all(
                are_made_up_for(run.ranks[rank], number, line) for rank in callers
            ):
                yield Question(
                    f"{what}, without gradients",
                    "its broadcast of buffers meets the others' next forward pass, if no other"
                    " collective call comes before: call model.module, and nothing is sent",
                    page,
                )
                continue
            yield Found(
                what,
                "it broadcasts buffers there, which the others take for another call: call"
                " model.module",
                page,
            )


def are_in_no_sync(rank, line):
    """Return whether a Rank's calls of DDP objects at a line have the exchange switched off.

    After such a call, DDP's next forward pass sends no buffers, either.
    """
    alone = [each for each in rank.records(Forward) if each.line == line]
    return all(each.gradients and not each.exchanges for each in alone)


def are_made_up_for(rank, ddp, line):
    """Return whether a Rank leaves out a broadcast of buffers for each call of a DDP object there.

    After a call without gradients, DDP's next forward pass sends no buffers: so the ranks' calls
    pair again, if a step follows.
    """
    forwards = [each for each in rank.records(Forward) if each.ddp == ddp]
    alone = [each for each in forwards if each.line == line]
    last_step = max((times.time for times in rank.records(StepTimes)), default=0.0)
    return all(not each.gradients and each.time < last_step for each in alone)


def calls_by_line(run, rank, ddp):
    """Return a Counter of the lines at which a rank has called a DDP object."""
    forwards = run.ranks[rank].records(Forward)
    return collections.Counter(each.line for each in forwards if each.ddp == ddp)


@rule("calls")
def groups_differ(run):
    """The n-th group that the ranks make is another one on some rank, or some rank makes none.

    It is a question if the run has come to its end: Gloo may do without the ranks outside a group.

    Looks alike, and is right: groups that their members alone are to make, which are not noted.
    """
    notes = run.records_by_rank(GroupMade)
    made = {rank: {each.number: each for each in own} for rank, own in notes.items()}
    for number in range(max(map(len, made.values()))):
        row = {rank: groups.get(number) for rank, groups in made.items()}
        missing = [rank for rank, group in row.items() if group is None]
        never = bool(missing) and will_never_come(run, missing)
        if never or differ(group.ranks for group in row.values() if group is not None):
            kind = Found if run.cut else Question
            yield kind(
                f"the ranks make other groups, from number {number + 1} on",
                "; ".join(group_in_words(*each) for each in sorted(row.items())[:3])
                + ": all ranks call new_group() for each group, in the same order",
                "pitfalls/README.md#it-hangs-or-a-timeout-ends-it",
            )
            return


def group_in_words(rank, group):
    """Return "rank 0 that of ranks 2 and 3 (train.py:42)"; group: a GroupMade, or None."""
    if group is None:
        return f"rank {rank} none"
    members = in_words(group.ranks) if len(group.ranks) <= 8 else f"{len(group.ranks)} ranks"
    return f"rank {rank} that of {members} ({group.line})"


@rule("calls", unless={"calls"})
def calls_differ(run):
    """The n-th collective call of a group is another one on some rank: they pair by their order.

    Looks alike, and is right: sizes that may differ by rank (objects, scatter, all_to_all), calls
    of a test that time out and are caught, and calls point to point.
    """
    for group in sorted({call.group for call in run.records(Call)}):
        calls = calls_of_a_group(run, group)
        if len(calls) < 2 or errors_were_caught(run, calls):
            continue
        longest = max(max(numbers, default=-1) for numbers in calls.values()) + 1
        for number in range(min(longest, LONGEST)):
            row = {rank: numbers.get(number) for rank, numbers in calls.items()}
            missing = [rank for rank, call in row.items() if call is None]
            kinds = {what_must_agree(call) for call in row.values() if call is not None}
            never = bool(missing) and will_never_come(run, missing)
            if len(kinds) > 1 or never:
                names = {call.name for call in row.values() if call is not None}
                yield Found(
                    f"the ranks' collective calls differ, from number {number + 1} on",
                    "; ".join([call_in_words(run, *each) for each in row.items()][:3]),
                    "pitfalls/collective_on_one_rank.py"
                    if never or len(names) > 1
                    else "pitfalls/mismatched_shapes.py",
                )
            if len(kinds) > 1 or missing:
                break


def calls_of_a_group(run, group):
    """Return {rank: {number: Call}} of the ranks in a group. group: Call.group."""
    members = json.loads(group.partition("#")[0]) if group else sorted(run.ranks)
    return {
        rank: {call.number: call for call in run.ranks[rank].records(Call) if call.group == group}
        for rank in members
        if rank in run.ranks
    }


def errors_were_caught(run, calls):
    """Return whether a call has failed, and all ranks have come to their end nevertheless."""
    if not all(rank.left for rank in run.ranks.values()):
        return False
    return any(call.failed for numbers in calls.values() for call in numbers.values())


def what_must_agree(call):
    """Return what has to be the same on all ranks: the name; dtype and size of some calls."""
    if call.name in SAME_SIZE:
        return call.name, call.dtype, call.elements
    return (call.name,)


def will_never_come(run, missing):
    """Return whether the ranks that lack a call will not make it any more."""
    if run.stalled:
        return True
    return not run.cut and all(run.ranks[rank].left for rank in missing)


def call_in_words(run, rank, call):
    """Return "rank 0 all_reduce of 3 float32 at train.py:42"; call: None if it lacks it."""
    if call is None:
        return f"rank {rank} {run.ranks[rank].where or 'no such call'}"
    elements = "?" if call.elements is None else call.elements
    return f"rank {rank} {call.name} of {elements} {call.dtype or 'objects'} at {call.line}"


@rule()
def total_summed_again(run):
    """A running total is all-reduced in place again and again, and never set back to 0.

    Each sum is given the one before, and what was added to it: four times in a row, else it is
    asked. (Figures that grow fast may come near to that.) Looks alike, and is right: a total
    that is set back, or divided by the number of ranks; a sum of a copy; a tensor to which nothing
    is added, as for a barrier; the largest of all (MAX); a total that one rank alone keeps. It may
    be gathered, too, and added up by the script, or stand in another tensor each time, if it never
    begins anew: figures that begin small and grow fast look alike there.
    """
    rows = collections.defaultdict(dict)  # {(name, line, group): {rank: the longest row}}
    for rank, calls in run.records_by_rank(Call).items():
        begun = collections.Counter(
            (call.line, call.again_at_place) for call in calls if call.again == 3
        )
        for call in calls:
            begins_anew = call.again_at_place and begun[call.line, True] > 1
            if call.again > 2 and not begins_anew:
                row = rows[call.name, call.line, call.group]
                row[rank] = max(call.again, row.get(rank, 0))
    for (name, line, group), longest in rows.items():
        members = json.loads(group.partition("#")[0]) if group else [*run.ranks]
        if len(members) > 1 and longest.keys() == {*members} & {*run.ranks}:
            count = len(members)
            kind = Found if min(longest.values()) > 3 else Question
            does = (
                "sums a running total in place" if "reduce" in name else "gathers a running total"
            )
            yield kind(
                f"{name} at {line} {does}, again and again: each sum is given the one before, and"
                " what was added to it",
                f"what came first counts {count} times, then {count * count} times, and so on: sum"
                " a copy of it, or set it back to 0 after each sum",
                SILENT,
                once=f"again {line}",
            )


@rule()
def nobody_waits(run):
    """Calls with async_op=True, for which nobody waits: what they return is gone unasked.

    It is a question: the tensor may be used much later. Looks alike, and is right: wait() by a list
    or a future, a barrier after one or several of them, a call without a tensor. Tensors on GPUs
    are not looked at: a later call may wait for an earlier one there.
    """
    counts = collections.Counter()
    for rank, forgotten in run.records_by_rank(Forgotten).items():
        for each in forgotten:
            if "barrier" not in each.next_call:
                counts[each.name, each.line, rank] += 1
    for (name, line, _), count in counts.items():
        if count > 3:
            yield Question(
                f"nobody waits for {name} at {line}, which has async_op=True: what it returns is"
                " dropped",
                "until it has ended, its tensor holds anything: keep what it returns, and call its"
                " wait()",
                "pitfalls/async_read_too_early.py",
                once=f"nobody waits {line}",
            )
