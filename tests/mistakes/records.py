"""What rules say of records that are written by hand: a case for each thing that looks alike.

CASES has (rule, what it shall say, a Run). Each base below is a mistake that its rule finds; each
right twin differs from it in one thing.
"""

import dataclasses
import zlib

from check_training.findings import Found, Question
from check_training.records.base import Print
from check_training.records.data import Listed, Pass, Progress, SubsetMade
from check_training.records.files import Folder, Save
from check_training.records.model import Forward, Wrapped
from check_training.records.optimizer import Clip, Optimizer, ParameterName, Step, ThrownAway
from check_training.records.process import (
    Call,
    Forgotten,
    GroupMade,
    JoinBegun,
    Joined,
    Link,
    Links,
    Machine,
    Started,
    Uses,
)
from check_training.runs import Rank, Run

NOTHING = None
EIGHT = [*range(8)]


def run_of(*ranks, **how):
    """Return the Run of some ranks, each a list of records."""
    joined = [
        Joined(0.0, number, len(ranks), len(ranks), "a machine", 0, 2, [])
        for number in range(len(ranks))
    ]
    return Run([Rank([one, *records]) for one, records in zip(joined, ranks, strict=True)], **how)


def both(make, **changes):
    """Return the Run of two ranks, of which each has what make(rank, **changes) returns."""
    return run_of(make(0, **changes), make(1, **changes))


def record_of(kind, **fields):
    """Return a record of a class; fields that are not given are None."""
    return kind(**{**dict.fromkeys(each.name for each in dataclasses.fields(kind)), **fields})


def wrapped(ddp=0, group=(0, 1)):
    """Return the record of a DDP object."""
    return Wrapped(0.0, ddp, "a.py:1", [*group], ["w", "b"], [], False, False, False)


def number_of(text):
    """Return a number for a text, as a checksum stands for a tensor."""
    return zlib.crc32(str(text).encode())


# ---- Data: a rank's pass over a loader, in which it trains ----


def a_pass(rank, start=(), progress=(), bits=(), ddp=True, more=()):
    """Return a rank's records of one pass over 64 items, all of them, in an order of its own.

    start, progress: {field: another value}. bits: of the batches. more: other records.
    """
    begun = {
        "number": 0,
        "loader": "p1",
        "loader_object": 0,
        "line": "a.py:2",
        "sampler": "RandomSampler",
        "sampler_object": 1,
        "length": 64,
        "share": 64,
        "total_size": None,
        "batches": 8,
        "replicas": None,
        "replica": None,
        "epoch": None,
        "shuffle": None,
        "drop_last": False,
        "is_stream": False,
        "workers": 0,
        "workers_seed": None,
        "contents": {"tensors": [1, 2]},
        "listed": {},
    }
    came = {
        "pass_number": 0,
        "batches": 8,
        "rows": 64,
        "items": 64,
        "order": rank,
        "index_sum": 2016,
        "sketch": [*range(64)],
        "rising": False,
        "batch_bits": [number_of(f"{rank} {batch}") for batch in EIGHT] if bits == () else bits,
        "content": 0.5,
        "first_items": 8,
        "first_orders": [],
        "drawn": [],
        "backwards": 8,
        "no_grad_forwards": 0,
        "gradients": True,
        "over": True,
        "exhausted": True,
    }
    records = [record_of(Pass, time=1.0, **{**begun, **dict(start)})]
    records.append(record_of(Progress, time=2.0, **{**came, **dict(progress)}))
    return [*([wrapped()] if ddp else []), *more, *records]


def dealt(rank, **changes):
    """Return a_pass() of a DistributedSampler that deals out halves."""
    start = {"replicas": 2, "replica": rank, "share": 32, **changes.pop("start", {})}
    return a_pass(rank, start=start, **changes)


WRONG_RANK = [dealt(0), dealt(0)]
SAME = [f"batch {batch}" for batch in EIGHT]
ALIKE = [number_of(text) for text in SAME]
NOT_READ = {"contents": {}, "listed": {}}
NO_SUM = {"progress": {"content": 0.0}}
SETS = [
    ("whole_set_on_each_rank", Found, both(a_pass)),
    ("whole_set_on_each_rank", Found, both(a_pass, start=NOT_READ)),
    ("whole_set_on_each_rank", Found, both(a_pass, start=NOT_READ, progress={"content": -0.5})),
    ("whole_set_on_each_rank", Question, both(a_pass, start=NOT_READ, progress={"content": 0.0})),
    ("whole_set_on_each_rank", Question, both(a_pass, ddp=False)),
    ("whole_set_on_each_rank", Question, both(a_pass, progress={"items": 65})),
    ("whole_set_on_each_rank", NOTHING, both(a_pass, progress={"items": 32})),  # dealt out later
    ("whole_set_on_each_rank", Question, both(a_pass, progress={"exhausted": False})),
    ("whole_set_on_each_rank", Question, both(a_pass, progress={"batches": 300})),
    ("whole_set_on_each_rank", NOTHING, both(a_pass, start={"is_stream": True})),
    ("whole_set_on_each_rank", NOTHING, both(a_pass, start={"length": None, "share": None})),
    ("whole_set_on_each_rank", NOTHING, both(a_pass, start={"share": 32})),
    ("whole_set_on_each_rank", NOTHING, both(a_pass, start={"batches": None})),
    ("whole_set_on_each_rank", NOTHING, both(a_pass, progress={"backwards": 0})),
    ("whole_set_on_each_rank", NOTHING, run_of(a_pass(0), [wrapped()])),
    ("whole_set_on_each_rank", NOTHING, both(dealt, start={"share": 64})),
    # Sets of the ranks' own: their contents differ, or what their batches add up to.
    (
        "whole_set_on_each_rank",
        NOTHING,
        run_of(a_pass(0), a_pass(1, start={"contents": {"x": [3]}})),
    ),
    (
        "whole_set_on_each_rank",
        Question,
        run_of(
            a_pass(0, start=NOT_READ),
            a_pass(1, start=NOT_READ, progress={"content": 0.6}),
        ),
    ),
    (  # parts of one set
        "whole_set_on_each_rank",
        NOTHING,
        run_of(a_pass(0, start={"chosen": [3]}), a_pass(1, start={"chosen": [4]})),
    ),
    ("whole_set_on_each_rank", Found, both(a_pass, start={"chosen": [3]})),
    # Each rank draws with replacement: other items come.
    ("whole_set_on_each_rank", NOTHING, run_of(a_pass(0), a_pass(1, progress={"index_sum": 9}))),
    ("sampler_told_wrong", Found, run_of(*WRONG_RANK)),
    ("sampler_told_wrong", Found, both(dealt, start={"replicas": 4})),
    ("sampler_told_wrong", Question, run_of(dealt(0, ddp=False), dealt(0, ddp=False))),
    ("sampler_told_wrong", Question, both(dealt, start={"replicas": 4, **NOT_READ}, **NO_SUM)),
    ("sampler_told_wrong", NOTHING, run_of(dealt(0), dealt(0, start={"contents": {}}))),
    ("sampler_told_wrong", NOTHING, both(dealt)),
    ("sampler_told_wrong", NOTHING, both(a_pass)),
    ("sampler_told_wrong", NOTHING, run_of(dealt(0), a_pass(1))),
    ("sampler_told_wrong", NOTHING, run_of(dealt(0), [wrapped()])),
    # Data parallel in groups of two, beside what splits the model: two ranks have one share.
    (
        "sampler_told_wrong",
        NOTHING,
        run_of(*[dealt(rank % 2, more=[wrapped(0, (0, 1))]) for rank in range(4)]),
    ),
    *[
        ("sampler_told_wrong", NOTHING, run_of(dealt(0, more=[Uses(0.0, what)]), dealt(0)))
        for what in ("groups", "shards", "to_one")
    ],
    ("same_batches_without_ddp", Question, both(a_pass, bits=ALIKE, ddp=False)),
    ("same_batches_without_ddp", NOTHING, both(a_pass, bits=ALIKE)),
    ("same_batches_without_ddp", NOTHING, both(a_pass, ddp=False)),
    ("same_batches_without_ddp", NOTHING, both(a_pass, bits=ALIKE[:1] * 8, ddp=False)),
    ("same_batches_without_ddp", NOTHING, both(a_pass, bits=ALIKE[:2] * 4, ddp=False)),
    ("same_batches_without_ddp", NOTHING, both(a_pass, bits=ALIKE[:7], ddp=False)),
    ("same_batches_without_ddp", NOTHING, run_of(a_pass(0, bits=ALIKE, ddp=False), [])),
    ("same_batches_without_ddp", NOTHING, run_of(a_pass(0, bits=ALIKE, ddp=False))),
]


def subset(order=1, items=range(40), length=40, contents=1, key="u1"):
    """Return the record of a Subset of 80 items."""
    return [SubsetMade(1.0, key, "a.py:3", length, 80, order, [*items], {"x": [contents]}, {})]


REST = subset(3, range(40, 80), key="u3")
TESTED = a_pass(
    0,
    ddp=False,
    start={"length": 40, "chosen": [9]},
    progress={"backwards": 0, "gradients": False},
)


def with_list(order, entries=7, name="files"):
    """Return a_pass() over a dataset with a list of texts."""
    return a_pass(0, start={"listed": {name: Listed(order, entries)}})


SETS += [
    ("subsets_differ", Found, run_of(subset(1), subset(2))),
    ("subsets_differ", Found, run_of(subset(1) + REST + TESTED, subset(2, range(20, 60)))),
    ("subsets_differ", Question, run_of(subset(1) + REST, subset(2, range(20, 60)))),
    ("subsets_differ", NOTHING, run_of(subset(1), subset(2, range(20, 60)))),  # no rest
    ("subsets_differ", NOTHING, run_of(subset(1) + REST, subset(2, range(40, 80)))),
    ("subsets_differ", NOTHING, run_of(subset(1), subset(1))),
    ("subsets_differ", NOTHING, run_of(subset(1), subset(2, range(40, 80)))),  # a share each
    ("subsets_differ", NOTHING, run_of(subset(1), subset(2, contents=2))),  # other sets
    ("subsets_differ", NOTHING, run_of(subset(1), subset(2, key="u2"))),
    ("subsets_differ", NOTHING, run_of(subset(1, []), subset(2, []))),
    ("subsets_differ", NOTHING, run_of(subset(1), [])),
    ("entries_in_another_order", Question, run_of(with_list(1), with_list(2))),
    ("entries_in_another_order", NOTHING, run_of(with_list(1), with_list(1))),
    ("entries_in_another_order", NOTHING, run_of(with_list(1, 7), with_list(2, 8))),  # shards
    ("entries_in_another_order", NOTHING, run_of(with_list(1), with_list(2, name="other"))),
    ("entries_in_another_order", NOTHING, run_of(with_list(1), a_pass(1))),
]


def forwards(rank, bits, count=8, ddp=0, group=(0, 1), **fields):
    """Return a rank's forward passes, of batches with these bits; each its own, if None."""
    fields = {"line": "a.py:4", "gradients": True, "training": True, "exchanges": True, **fields}
    return [wrapped(ddp, group)] + [
        Forward(1.0, ddp, number, batch=[bits or number_of(f"{rank} {number}")], **fields)
        if bits is None or isinstance(bits, int)
        else Forward(1.0, ddp, number, batch=bits[number], **fields)
        for number in range(count)
    ]


ROWS = [[bits] for bits in ALIKE]
SETS += [
    ("same_batches", Found, both(forwards, bits=ROWS)),
    ("same_batches", NOTHING, both(forwards, bits=None)),
    ("same_batches", NOTHING, both(forwards, bits=5)),  # one constant batch
    ("same_batches", NOTHING, both(forwards, bits=ROWS, count=7)),
    ("same_batches", NOTHING, both(forwards, bits=[None] * 8)),  # they were not read
    ("same_batches", NOTHING, both(forwards, bits=ROWS, gradients=False)),
    # Ranks that hold parts of one model are in groups of their own.
    (
        "same_batches",
        NOTHING,
        run_of(forwards(0, ROWS, group=(0,)), forwards(1, ROWS, ddp=1, group=(1,))),
    ),
]


# ---- Gradients: a rank's steps with one optimizer of two parameters ----

FULL = [Print(1, 0.5), Print(2, 0.5)]
BARE = {"gradients": [None, None], "without_gradient": 2}


def steps(rank, count=8, more=(), optimizer="o1", each=lambda number: {}, **fields):
    """Return a rank's steps, all right. each: a function from a step's number to its fields."""
    right = {
        "optimizer": optimizer,
        "line": "a.py:5",
        "weights": FULL,
        "gradients": FULL,
        "without_gradient": 0,
        "outside": [],
        "outside_moved": [],
        "rates": [0.1],
        "scales": [],
        "stale": False,
        "cleared_after": 0,
        "forwards": 1,
        "backwards": 1,
        "two_forwards": [],
        "mixed": False,
        "exchanged": True,
        "backward_line": "a.py:6",
        "batches": 1,
        "small_sums": 0,
        "lost_hooks": [],
        "bare": [],
        "graphs_held": 0,
        **fields,
    }
    made = Optimizer(0.5, optimizer, "a.py:7", [None, None], [[2], [2]], 1, "cpu", True, 1, False)
    taken = [
        record_of(Step, time=1.0, number=number, **{**right, **each(number)})
        for number in range(count)
    ]
    return [wrapped(), *more, made, *taken]


def clips(count=8, **fields):
    """Return the records of clipping, which is right."""
    fields = {"parameters": 2, "in_an_optimizer": True, "scaled": False, "norm": 1.0, **fields}
    return [Clip(1.0, number, "a.py:8", **fields) for number in range(count)]


def thrown(backwards=1, count=1, at_the_end=True):
    """Return records of zero_grad() that throws gradients away."""
    return [ThrownAway(1.0, "a.py:9", backwards, at_the_end)] * count


def of_trials(groups):
    """Return the Run of four ranks with rates of two trials. groups: of each rank's DDP object."""
    ranks = []
    for rank, group in enumerate(groups):
        _, made, *taken = steps(rank, rates=[0.1 if rank < 2 else 0.03])
        made.names = [ParameterName(0, "w"), ParameterName(0, "b")]
        ranks.append([wrapped(group=group), made, *taken])
    return run_of(*ranks)


def calls(count, is_gradient, group=""):
    """Return records of all_reduce."""
    call = {"line": "a.py:10", "group": group, "failed": False}
    return [
        Call(1.0, name="all_reduce", number=number, is_gradient=is_gradient, **call)
        for number in range(count)
    ]


def from_step(first, **fields):
    """Return a function for steps(each=...): other fields from a step on."""
    return lambda number: fields if number >= first else {}


TWICE = {"forwards": 2, "backwards": 2}
INSIDE = [Forward(1.0, 0, 0, "a.py:4", True, True, exchanges=False)]
EVALUATION = [Forward(1.0, 0, 0, "a.py:4", False, True, exchanges=False)]
BROKEN = {"gradients": [Print(1, 0.5), Print(2, float("nan"))]}
LOST = {**BROKEN, "weights": BROKEN["gradients"]}
LATE = {"cleared_after": 1, "gradients": [Print(1, 0.0), None]}
OUT = {"outside": ["w"]}
STEPS = [
    ("never_cleared", Found, both(steps, count=9, stale=True)),
    ("never_cleared", NOTHING, both(steps, count=8, stale=True)),  # too few to tell
    ("never_cleared", NOTHING, both(steps, count=9)),
    ("never_cleared", NOTHING, both(steps, count=20, each=from_step(12, stale=True))),
    ("cleared_too_late", Found, both(steps, **LATE)),
    ("cleared_too_late", NOTHING, both(steps, cleared_after=1)),  # gradients came again
    ("cleared_too_late", NOTHING, both(steps, **{**LATE, "backwards": 0})),
    ("cleared_too_late", NOTHING, both(steps, **{**LATE, "cleared_after": 0})),
    ("cleared_too_late", NOTHING, both(steps, count=7, **LATE)),
    ("no_gradient_at_all", Found, both(steps, **BARE)),
    ("no_gradient_at_all", NOTHING, both(steps, **{**BARE, "without_gradient": 1})),
    (  # it may come later
        "no_gradient_at_all",
        Question,
        both(steps, more=steps(0, optimizer="o2"), **BARE),
    ),
    (  # it has come
        "no_gradient_at_all",
        NOTHING,
        both(steps, count=20, each=lambda number: BARE if number < 15 else {}),
    ),
    ("no_gradient_at_all", NOTHING, both(steps, backwards=0, **BARE)),  # it waits for its turn
    ("no_gradient_at_all", NOTHING, both(steps, cleared_after=1, **BARE)),  # said by another rule
    ("no_gradient_at_all", NOTHING, both(steps, more=[Uses(0.0, "shards")], **BARE)),
    ("no_gradient_at_all", NOTHING, both(steps, count=7, **BARE)),
    ("not_finite", Found, both(steps, each=lambda n: {5: BROKEN, 6: LOST, 7: LOST}.get(n, {}))),
    ("not_finite", NOTHING, both(steps, each=from_step(5, **BROKEN))),  # such steps are left out
    ("not_finite", NOTHING, both(steps, each=from_step(6, weights=LOST["weights"]))),
    ("parameters_in_no_optimizer", Found, both(steps, count=7, **OUT)),
    ("parameters_in_no_optimizer", NOTHING, both(steps, count=6, **OUT)),  # too few to tell
    ("parameters_in_no_optimizer", NOTHING, both(steps)),
    ("parameters_in_no_optimizer", NOTHING, both(steps, **OUT, outside_moved=["w"])),
    ("parameters_in_no_optimizer", NOTHING, both(steps, **OUT, **BARE)),  # said by another rule
    (  # a second optimizer comes later
        "parameters_in_no_optimizer",
        NOTHING,
        both(steps, count=12, each=lambda number: OUT if number < 7 else {}),
    ),
    ("exchanged_several_times", Question, both(steps, **TWICE)),
    ("exchanged_several_times", Question, both(steps, more=EVALUATION, **TWICE)),
    ("exchanged_several_times", NOTHING, both(steps)),
    ("exchanged_several_times", NOTHING, both(steps, more=INSIDE, **TWICE)),  # no_sync()
    ("exchanged_several_times", NOTHING, both(steps, exchanged=False, **TWICE)),
    ("exchanged_several_times", NOTHING, both(steps, forwards=1, backwards=2)),  # two losses
    ("exchanged_several_times", NOTHING, both(steps, cleared_after=1, **TWICE)),  # each is used
    ("exchanged_several_times", NOTHING, both(steps, count=7, **TWICE)),
    (
        "exchanged_several_times",
        NOTHING,
        both(steps, each=lambda number: {"forwards": 2 + number % 2, "backwards": 2 + number % 2}),
    ),
    (
        "exchanged_several_times",
        NOTHING,
        both(steps, more=steps(0, optimizer="o2"), **TWICE),  # a GAN
    ),
    ("rest_thrown_away", Question, both(steps, more=[*a_pass(0), *thrown()], backwards=4)),
    ("rest_thrown_away", NOTHING, both(steps, more=[*a_pass(0), *thrown()], backwards=1)),
    (
        "rest_thrown_away",
        NOTHING,
        both(steps, more=[*a_pass(0), *thrown(at_the_end=False)], backwards=4),
    ),
    ("rest_thrown_away", NOTHING, both(steps, more=[*a_pass(0), *thrown(4)], backwards=4)),
    ("rest_thrown_away", NOTHING, both(steps, more=[*a_pass(0), *thrown(0)], backwards=4)),
    ("rest_thrown_away", NOTHING, both(steps, more=[*a_pass(0), *thrown(1, 2)], backwards=4)),
    ("rest_thrown_away", NOTHING, both(steps, more=a_pass(0), backwards=4)),
    (
        "rest_thrown_away",
        NOTHING,
        both(
            steps, more=[*a_pass(0), *thrown(), *steps(0, optimizer="o2", backwards=4)], backwards=4
        ),
    ),
    ("clips_scaled_gradients", Found, both(steps, more=clips(scaled=True))),
    ("clips_scaled_gradients", NOTHING, both(steps, more=clips())),
    ("clips_scaled_gradients", NOTHING, both(steps, more=clips(count=7, scaled=True))),
    ("clips_scaled_gradients", NOTHING, both(steps, count=0, more=clips(scaled=True))),
    ("clips_nothing", Found, both(steps, more=clips(parameters=0, in_an_optimizer=False))),
    ("clips_nothing", NOTHING, both(steps, more=clips())),
    (
        "clips_nothing",
        NOTHING,
        both(steps, more=[*clips(parameters=0, in_an_optimizer=False), *clips(1)]),
    ),
    ("clips_what_is_not_trained", Found, both(steps, more=clips(in_an_optimizer=False))),
    (
        "clips_what_is_not_trained",
        NOTHING,
        both(steps, more=clips(parameters=0, in_an_optimizer=False)),
    ),
    ("clips_what_is_not_trained", NOTHING, both(steps, more=clips())),
    ("summed_again", Question, both(steps, more=calls(4, True))),
    ("summed_again", NOTHING, both(steps, more=calls(3, True))),
    ("summed_again", NOTHING, both(steps, more=calls(4, True, "[0, 2]#over"))),  # DDP: ranks 0, 1
    ("rates_differ", Found, of_trials([(0, 1, 2, 3)] * 4)),
    ("rates_differ", NOTHING, of_trials([(0, 1), (0, 1), (2, 3), (2, 3)])),  # a trial each
    ("summed_again", NOTHING, both(steps, more=calls(9, False))),
]


# ---- Groups that the ranks make ----


def made(*groups):
    """Return the records of a rank that makes some groups, each a list of ranks."""
    return [GroupMade(1.0, "a.py:9", number, ranks) for number, ranks in enumerate(groups)]


STILL = {"cut": True, "stalled": True}
GROUPS = [
    ("groups_differ", Found, run_of(made([0], [0, 1]), made([0, 1]), **STILL)),
    ("groups_differ", Found, run_of(made([0, 1], [0]), made([0, 1]), **STILL)),
    ("groups_differ", NOTHING, run_of(made([0, 1], [0]), made([0, 1]), cut=True)),  # not there yet
    ("groups_differ", NOTHING, run_of(made([0], [0, 1]), made([0], [0, 1]), **STILL)),
]


# ---- Machines: four ranks, two on each of two machines ----

ONE, OTHER = {"train.py": 1, "model.py": 1}, {"train.py": 2, "model.py": 1}
LOCAL, SERVER = ("ext4", "/dev/sda1"), ("nfs4", "server:/home")


def of_machines(records, sources=(ONE, ONE, ONE, ONE), scripts=("train.py",) * 4, clocks="ab"):
    """Return the Run of four ranks, of which the last two run on another machine."""
    ranks = []
    for number, mine in enumerate(records):
        place = "ab"[number // 2]
        machine = Machine(key=place, clock=clocks[number // 2], node=None, address="")
        joined = Joined(0.0, number, 4, 2, f"node-{place}", 0, 2, [], machine, 0.0)
        joined.script, joined.sources = scripts[number], sources[number]
        ranks.append(Rank([joined, *mine]))
    return Run(ranks)


def shared_out(contents, lengths=(64,) * 4, replicas=4):
    """Return the Run of four ranks with a DistributedSampler. contents: a number for each rank."""
    return of_machines(
        [
            a_pass(rank, {"replicas": replicas, "length": length, "contents": {"x": [number]}})
            for rank, (number, length) in enumerate(zip(contents, lengths, strict=True))
        ]
    )


def saved(kinds, path="/data/model.pt", inodes=(7, 7), phases=(0, 0), clocks="ab"):
    """Return the Run of which the first rank of each machine saves. kinds: of file systems."""
    saves = [
        record_of(
            Save,
            time=2.0,
            begin=1.0,
            line="a.py:9",
            path=path,
            phase_begun=phase,
            phase=phase,
            folder=Folder(1, inode, *kind, "/data") if kind else None,
        )
        for kind, inode, phase in zip(kinds, inodes, phases, strict=True)
    ]
    return of_machines([[saves[0]], [], [saves[1]], []], clocks=clocks)


NODES = [
    ("script_differs", Found, of_machines([[]] * 4, (ONE, ONE, OTHER, OTHER))),
    ("script_differs", Question, of_machines([[]] * 4, (ONE, ONE, *[ONE | {"model.py": 2}] * 2))),
    ("script_differs", NOTHING, of_machines([[]] * 4)),
    ("script_differs", NOTHING, of_machines([[]] * 4, (ONE, OTHER, OTHER, OTHER))),  # a change
    ("script_differs", NOTHING, of_machines([[]] * 4, (ONE, ONE, {}, {}))),  # not read
    (  # each role has its script
        "script_differs",
        NOTHING,
        of_machines([[]] * 4, (ONE, ONE, OTHER, OTHER), ("a.py", "a.py", "b.py", "b.py")),
    ),
    ("data_differ_by_machine", Found, shared_out([1, 1, 2, 2])),
    ("data_differ_by_machine", Found, shared_out([1, 1, 1, 1], [64, 64, 60, 60])),
    ("data_differ_by_machine", NOTHING, shared_out([1, 1, 1, 1])),
    ("data_differ_by_machine", NOTHING, shared_out([1, 2, 3, 4])),  # by rank
    ("data_differ_by_machine", NOTHING, shared_out([1, 1, 2, 2], replicas=2)),  # in a machine
    (  # one rank on each may have a set of its own
        "data_differ_by_machine",
        Question,
        of_machines(
            [
                a_pass(0, {"replicas": 4}),
                [],
                a_pass(1, {"replicas": 4, "contents": {"x": [3]}}),
                [],
            ]
        ),
    ),
    ("several_save_one_file", Found, saved([SERVER, SERVER])),
    ("several_save_one_file", Found, saved([LOCAL, LOCAL], clocks="aa")),  # of one computer
    ("several_save_one_file", NOTHING, saved([LOCAL, LOCAL], inodes=(7, 8), clocks="aa")),
    ("several_save_one_file", NOTHING, saved([LOCAL, LOCAL])),
    ("several_save_one_file", NOTHING, saved([SERVER, SERVER], phases=(0, 1))),  # in turn
    ("machines_may_save_one_file", Question, saved([None, None])),
    ("machines_may_save_one_file", Question, saved([("fuse", "x"), ("fuse", "x")])),
    ("machines_may_save_one_file", NOTHING, saved([LOCAL, LOCAL])),
    ("machines_may_save_one_file", NOTHING, saved([None, None], phases=(0, 1))),
]


# ---- Processes that are alone ----


def alone(weights=lambda rank, number: FULL, path="/data/model.pt", begins=(0.0, 0.0), **fields):
    """Return a list of two Ranks, each alone in its group. weights: of a rank before a step."""
    fields = {"world_size": 1, "told": 2, "more": [], "attempts": (0, 0), "clock": "a", **fields}
    ranks = []
    for rank, begin in enumerate(begins):
        name = path.format(rank=rank)
        taken = steps(rank, each=lambda number, rank=rank: {"weights": weights(rank, number)})
        for record in taken:
            record.time += begin
        saved_to = record_of(Save, time=begin + 2, path=name)
        machine = Machine(key="a", clock="a", node=None, address="")
        joined = Joined(
            begin, 0, fields["world_size"], 1, "host", fields["attempts"][rank], 2, [], machine
        )
        started = Started(begin, fields["told"])
        ranks.append(Rank([started, joined, *fields["more"], *taken, saved_to]))
    return ranks


def later(rank, number):
    """Return weights that come apart after the first step."""
    return [Print(rank if number else 1, 0.5), Print(2, 0.5)]


def from_the_first(rank, number):
    """Return weights that are the rank's own."""
    return [Print(rank, 0.5), Print(2, 0.5)]


OWN_FILES = "/data/model_{rank}.pt"
ALONE = [
    ("groups_of_one", Found, alone()),
    ("groups_of_one", Found, alone(path=OWN_FILES)),  # all the same, twice
    ("groups_of_one", Found, alone(later)),
    ("groups_of_one", Question, alone(later, path=OWN_FILES)),  # parts of the data: a sweep
    ("groups_of_one", Question, alone(from_the_first)),
    ("groups_of_one", Question, alone(lambda rank, number: [None, None])),  # they were not read
    ("groups_of_one", NOTHING, alone(told=1)),
    ("groups_of_one", NOTHING, alone(told=None)),
    ("groups_of_one", NOTHING, alone(world_size=2)),  # the other's records are missing
    ("groups_of_one", NOTHING, alone(begins=(0.0, 9.0))),  # one after another
    ("groups_of_one", NOTHING, alone(attempts=(0, 1))),
    ("groups_of_one", NOTHING, alone(more=[Uses(0.0, "to_one")])),  # they meet by RPC
    ("groups_of_one", NOTHING, alone()[:1]),
]


# ---- Clipping before the exchange, gradients that never come, graphs that are held ----


def clipped(
    norms=(1.0, 2.0), most=0.5, in_step=range(1, 12), again=1, key="o1", firsts=(0, 0), **fields
):
    """Return the Run of two ranks that clip by these norms before some steps, so many times.

    firsts: the number of each rank's first call.
    """
    ranks = []
    for rank, (norm, first) in enumerate(zip(norms, firsts, strict=True)):
        taken = steps(rank, **{"count": 12, **fields})
        for record in taken:
            if isinstance(record, Step):
                record.time = 1.0 + record.number
        before = [number + 0.5 for number in in_step for _ in range(again)]
        taken += [
            Clip(time, first + place, "a.py:8", 2, True, False, norm, most, key)
            for place, time in enumerate(before)
        ]
        ranks.append(taken)
    return run_of(*ranks)


def each_second_step():
    """Return the Run of clipped(), of which each second step is noted."""
    run = clipped(count=24, in_step=range(1, 24))
    ranks = []
    for rank in run.ranks.values():
        left_out = rank.records(Step)[1::2]
        ranks.append([each for each in rank.all_records()[1:] if each not in left_out])
    return run_of(*ranks)


def late_clips():
    """Return the Run of two ranks that begin to cut after some steps; each tenth step is noted."""
    run = clipped(count=100, in_step=range(100))
    ranks = []
    for rank in run.ranks.values():
        looked_at = [
            each for each in rank.all_records()[1:] if getattr(each, "number", 0) % 10 == 0
        ]
        for clip in rank.records(Clip):
            clip.norm = clip.norm if clip.number > 50 else 0.1
        ranks.append(looked_at)
    return run_of(*ranks)


def bare(places, count=30, rates=(0.1,), shapes=None, **fields):
    """Return the Run of two ranks. places: of parameters without a gradient, by rank."""
    ranks = [
        steps(rank, count=count, rates=[*rates], bare=[*mine], **fields)
        for rank, mine in enumerate(places)
    ]
    for rank, records in enumerate(ranks if shapes else []):
        for record in records:
            if isinstance(record, Optimizer):
                record.shapes = shapes[rank]
    return run_of(*ranks)


def held(graphs, since_start=None):
    """Return the Run of two ranks that hold so many graphs in each step. graphs: of each step."""
    starts = since_start or [0] * len(graphs)
    figures = [
        {"graphs_held": old, "graphs_since_start": since} for old, since in zip(graphs, starts)
    ]
    return both(steps, count=len(graphs), each=figures.__getitem__)


def own_gradients(number):
    """Return a Step's gradients that no other rank has."""
    own_gradients.calls += 1
    return {"gradients": [Print(own_gradients.calls, 0.5), Print(2, 0.5)]}


own_gradients.calls = 0
STEPS += [
    ("clips_before_the_exchange", Question, clipped()),
    ("clips_before_the_exchange", Question, clipped(again=2)),
    ("clips_before_the_exchange", NOTHING, clipped(norms=(2.0, 2.0001))),  # after the exchange
    ("clips_before_the_exchange", NOTHING, clipped(most=3.0)),  # nothing is cut
    ("clips_before_the_exchange", NOTHING, clipped(most=None)),
    ("clips_before_the_exchange", NOTHING, clipped(in_step=range(1, 4))),  # too few to tell
    ("clips_before_the_exchange", Question, late_clips()),
    ("clips_before_the_exchange", NOTHING, clipped(key="o2")),  # another optimizer's
    ("clips_before_the_exchange", NOTHING, each_second_step()),  # calls of several steps
    ("clips_before_the_exchange", NOTHING, clipped(firsts=(0, 1))),  # other calls by rank
    ("clips_before_the_exchange", NOTHING, clipped(key=None)),
    ("clips_before_the_exchange", NOTHING, clipped(each=own_gradients)),  # experts
    ("clips_before_the_exchange", NOTHING, clipped(more=[Uses(0.0, "shards")])),
    ("clips_before_the_exchange", NOTHING, clipped(more=[Uses(0.0, "to_one")])),
    ("clips_before_the_exchange", NOTHING, clipped(more=[Uses(0.0, "groups")])),
    ("clips_before_the_exchange", NOTHING, clipped(more=[Uses(0.0, "join")])),
    ("parameters_without_gradient", Question, bare([[1], [1]])),
    ("parameters_without_gradient", Question, bare([[0, 1], [1]])),
    ("parameters_without_gradient", NOTHING, bare([[], []])),
    ("parameters_without_gradient", NOTHING, bare([[0], [1]])),  # one rank reaches each
    ("parameters_without_gradient", NOTHING, bare([[0, 1], [0, 1]])),  # said by another rule
    ("parameters_without_gradient", NOTHING, bare([[1], [1]], count=20)),  # too few to tell
    ("parameters_without_gradient", NOTHING, bare([[1], [1]], rates=(0.0,))),  # a warm-up
    ("parameters_without_gradient", NOTHING, bare([[1], [1]], backwards=0)),
    ("parameters_without_gradient", NOTHING, bare([[1], [1]], cleared_after=1)),
    ("parameters_without_gradient", NOTHING, bare([[1], [1]], more=[Uses(0.0, "shards")])),
    (  # an expert whose turn comes in step 25
        "parameters_without_gradient",
        NOTHING,
        both(steps, count=30, each=lambda number: {"bare": [1] if number < 25 else []}),
    ),
    # Each rank has a part of the model: the numbers of parameters mean other ones.
    ("parameters_without_gradient", Question, bare([[1], []], shapes=[[[2], [2]], [[3], [3]]])),
    ("graphs_are_held", Question, held([0] * 9 + [30] * 3)),
    ("graphs_are_held", NOTHING, held([0] * 9 + [30] * 2)),  # it was set back then
    ("graphs_are_held", NOTHING, held([0] * 9 + [3] * 9)),
    ("graphs_are_held", Question, held([0] * 9, since_start=[0] * 6 + [30] * 3)),
    ("graphs_are_held", NOTHING, held([0] * 9, since_start=[0] * 5 + [30] * 3 + [0])),
]


def summed(again, groups=("", ""), lines=("a.py:1", "a.py:1")):
    """Return the Run of two ranks that sum a total. again: of each rank, as Call.again."""
    return run_of(
        *[
            [Call(1.0, "all_reduce", line, 0, group, False, "float32", 1, again=count)]
            for count, group, line in zip(again, groups, lines, strict=True)
        ]
    )


STEPS += [
    ("total_summed_again", Found, summed([4, 4])),
    ("total_summed_again", Found, summed([4, 4], ("[0, 1]#x", "[0, 1]#x"))),
    ("total_summed_again", Question, summed([4, 3])),
    ("total_summed_again", NOTHING, summed([2, 2])),
    ("nobody_waits", Question, run_of([Forgotten(1.0, "all_reduce", "a.py:1", "")] * 4, [])),
    ("nobody_waits", NOTHING, run_of(*[[Forgotten(1.0, "all_reduce", "a.py:1", "")] * 2] * 2)),
    ("nobody_waits", NOTHING, run_of([Forgotten(1.0, "all_reduce", "a.py:1", "barrier")] * 4, [])),
    ("total_summed_again", NOTHING, summed([4, 0])),  # rank 0 alone keeps it
    ("total_summed_again", NOTHING, summed([4, 4], ("[0]#x", "[1]#y"))),  # nothing is summed
]


# ---- Rates of ranks that have other numbers of batches, and what is given to an exchange ----


def own_epochs(begins=(10, 12), joins=(), features=(), **fields):
    """Return the Run of two ranks whose second pass begins before these steps: the rate falls.

    joins: the rates of each rank, each time when it enters Join.
    """
    ranks = []
    for rank, begin in enumerate(begins):
        taken = steps(rank, 20, each=from_step(begin, rates=[0.05]), **fields)
        taken = [
            dataclasses.replace(each, names=[ParameterName(0, "w"), ParameterName(0, "b")])
            if isinstance(each, Optimizer)
            else dataclasses.replace(each, time=each.number + 1.0)
            if isinstance(each, Step)
            else each
            for each in taken
        ]
        for number, time in enumerate((0.1, begin + 0.5)):
            passed = a_pass(rank, {"number": number}, {"pass_number": number}, ddp=False)
            taken += [dataclasses.replace(each, time=time) for each in passed]
        taken += [Uses(0.0, what) for what in features]
        taken += [JoinBegun(0.1, "a.py:3", {"o1": [rates[rank]]}) for rates in joins]
        ranks.append(taken)
    return run_of(*ranks)


def given(norms, count=12, elements=4, **fields):
    """Return the Run of two ranks. norms: {rank: the norm that it gives all_reduce in each step}.

    Where it is a function, of the step's number. fields: of the optimizer.
    """
    ranks = []
    for rank, norm in enumerate(norms):
        taken = steps(rank, count)
        for place, each in enumerate(taken):
            if isinstance(each, Step):
                taken[place] = dataclasses.replace(each, time=each.number + 1.0)
            elif isinstance(each, Optimizer):
                taken[place] = dataclasses.replace(each, **fields)
        for number in range(1, count):
            one = norm(number) if callable(norm) else norm
            call = Call(number + 0.5, "all_reduce", "a.py:4", number, "", False, elements=elements)
            taken.append(dataclasses.replace(call, norm_given=one))
        ranks.append(taken)
    return run_of(*ranks)


JOINS = [(0.1, 0.1), (0.1, 0.05)]
DDPS = {"names": [ParameterName(0, "w"), ParameterName(0, "b")]}
STEPS += [
    ("rates_differ", Found, own_epochs()),
    ("rates_differ", NOTHING, own_epochs(exchanged=False)),  # then the n-th step is another one
    ("rates_differ", NOTHING, own_epochs(features=["join"], joins=JOINS[:1] * 2)),
    ("rates_differ", Found, own_epochs(features=["join"], joins=JOINS)),
    ("rates_differ", NOTHING, own_epochs(features=["join", "groups"], joins=JOINS)),
    ("rates_differ", NOTHING, own_epochs((10, 10))),
    ("clips_by_hand_before_the_exchange", Question, given([1.0, 1.0])),
    ("clips_by_hand_before_the_exchange", NOTHING, given([1.0, 1.0], count=8)),  # too few
    ("clips_by_hand_before_the_exchange", NOTHING, given([1.0, lambda step: 1 + step / 9])),
    ("clips_by_hand_before_the_exchange", NOTHING, given([1.0, 1.0], elements=8)),
    ("clips_by_hand_before_the_exchange", NOTHING, given([1.0, 1.0], **DDPS)),
    ("clips_by_hand_before_the_exchange", NOTHING, given([1.0])),
]


# ---- What workers keep, and labels in their order ----


def epochs(of_dataset, of_workers, bits=lambda number: [number, number + 1, number + 2], **start):
    """Return the Run of two ranks with several passes. of_dataset, of_workers: in each pass."""
    records = []
    for number, (mine, theirs) in enumerate(zip(of_dataset, of_workers, strict=True)):
        begun = {"number": number, "dataset_epoch": mine, "workers_epoch": theirs, **start}
        records += a_pass(0, begun, {"pass_number": number}, bits(number), ddp=False)
    return run_of(records, records)


def labelled(labels, sampler="SequentialSampler", **progress):
    """Return a_pass() of two ranks in order, of batches with these labels."""
    came = {"labels": labels, "rising": True, "sizes_as_labels": 0, **progress}
    return both(a_pass, start={"sampler": sampler}, progress=came)


SORTED = [1, 1, 2, None, 2, 3, 3, 3]
SETS += [
    ("workers_keep_the_epoch", Question, epochs([0, 1, 2], [0, 0, 0])),
    ("workers_keep_the_epoch", Question, epochs([0, 1, 2], [0, 0, 0], is_stream=True)),
    (
        "workers_keep_the_epoch",
        Found,
        epochs([0, 1], [0, 0], lambda number: [1, 2, 3], is_stream=True),
    ),
    ("workers_keep_the_epoch", Question, epochs([0, 1], [0, 0], lambda number: [1, 2, 3])),
    (  # a constant batch shows nothing
        "workers_keep_the_epoch",
        Question,
        epochs([0, 1], [0, 0], lambda number: [1, 1, 1], is_stream=True),
    ),
    ("workers_keep_the_epoch", NOTHING, epochs([0, 1, 2], [0, 1, 2])),  # new workers each time
    ("workers_keep_the_epoch", NOTHING, epochs([0, 1, 2], [None] * 3)),  # no workers
    ("workers_keep_the_epoch", NOTHING, epochs([None] * 3, [None] * 3)),
    ("batches_of_one_label", Question, labelled(SORTED)),
    ("batches_of_one_label", NOTHING, labelled(SORTED[:7])),  # too few to tell
    ("batches_of_one_label", NOTHING, labelled([])),  # texts
    ("batches_of_one_label", NOTHING, labelled([1] * 8)),  # all lengths are the same
    ("batches_of_one_label", NOTHING, labelled([1, 2, *[None] * 6])),  # shuffled when stored
    ("batches_of_one_label", NOTHING, labelled(SORTED, sampler="ByLength")),
    ("batches_of_one_label", NOTHING, labelled(SORTED, rising=False)),
    ("batches_of_one_label", NOTHING, labelled(SORTED, first_items=2)),
    ("batches_of_one_label", NOTHING, labelled(SORTED, sizes_as_labels=7)),  # sorted by length
    ("batches_of_one_label", Question, labelled(SORTED, sizes_as_labels=2)),  # by chance
]
CASES = SETS + STEPS + GROUPS + NODES + ALONE


# (what is seen, {from a machine to another one: (megabytes, seconds under way)}, the slow machine)
LINKS = [
    ("a ring", {"12": (90, 0.2), "23": (90, 9), "31": (90, 8)}, "3"),
    (
        "all to all",
        {"12": (9e2, 1), "21": (9e2, 1), "13": (9e2, 9), "31": (9e2, 9), "32": (9e2, 5)},
        "3",
    ),
    ("of two", {"12": (90, 9), "21": (90, 0.2)}, None),
    ("one pair", {"12": (90, 0.2), "23": (90, 9), "31": (90, 0.2)}, None),
    ("two machines of four", {"12": (90, 0.2), "23": (90, 9), "34": (90, 9), "41": (90, 9)}, None),
    ("short messages, confirmed late", {"12": (90, 0.2), "23": (8, 9), "31": (7, 8)}, None),
    ("alike", {"12": (90, 3), "23": (90, 9), "31": (90, 8)}, None),
]


def run_of_machines(links):
    """Return the Run of a rank on each machine. links: as in LINKS, without addresses."""
    names = sorted({name for pair in links for name in pair})
    ranks = []
    for number, name in enumerate(names):
        machine = Machine(key=name, clock="", node=number, address="")
        joined = Joined(0.0, number, len(names), 1, f"node{name}", 0, 2, [], machine)
        sent = [
            Link(f"10.0.0.{name}", f"10.0.0.{pair[1]}", int(1e6 * size), seconds)
            for pair, (size, seconds) in links.items()
            if pair[0] == name
        ]
        listening = [Link(f"10.0.0.{name}", "10.9.9.9", 0, 0.0)]  # somebody else's address
        ranks.append(Rank([joined, Links(9.0, sent + listening)]))
    return Run(ranks)
