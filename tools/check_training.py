"""Watch any training script, unchanged: is it right, where does its time go, who waits for whom?

    python tools/check_training.py [--seconds 60] [--picture steps.svg] [--json found.json] \
        -- torchrun --standalone --nproc-per-node=2 train.py

Nothing to import, no line to change: check_training_recorder.py comes into each Python process of
the command by PYTHONPATH, and notes there what torch is asked to do. Afterwards the rules below
compare the ranks. What is wrong is "found". What may be meant so is a "question". Then come the
parts of a step. Status 0: nothing found; 1: found, or the script fails or stands still; 2: a wrong
call. "Nothing found" is no proof: it says what was looked at, and what was not seen.
"""

import argparse
import collections
import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import textwrap
import time

import foreign_command

SAME_SIZE = "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"
CLIP, SHARE = "recipes/clip_and_scale.py", "exercises/01_share_the_data.py"
WRONG = "pitfalls/README.md#no-error-and-a-wrong-result"
HOUSE = pathlib.Path(__file__).absolute().parent.parent  # where the pages are
PARTS = {
    "l": "loading",
    "f": "forward",
    "b": "backward",
    "wait": "waiting",
    "x": "exchange",
    "o": "optimizer",
    "s": "saving",
    "rest": "rest",
}
COLOURS = {
    "l": "#5fa55a",
    "f": "#4f8fd0",
    "b": "#1f4e8c",
    "w": "#f0b64a",
    "c": "#e0813a",
    "o": "#8461a8",
    "s": "#b5473c",
}
NAMES = {
    "l": "loading",
    "f": "forward",
    "b": "backward",
    "w": "waiting and exchange in backward()",
    "c": "collective calls",
    "o": "optimizer",
    "s": "saving",
}


class Rank:
    """What one process noted between joining a group and leaving it."""

    def __init__(self, events):
        self.events = events
        first = next((e for e in events if e["k"] == "joined"), {})
        self.rank, self.world = first.get("rank"), first.get("world", 1)
        self.host, self.attempt = first.get("host"), first.get("attempt", 0)
        self.local, self.cores = int(first.get("local") or self.world), first.get("cores", 1)
        self.debug, self.begin = first.get("debug", ()), first.get("t", events[0]["t"])
        self.kinds = collections.defaultdict(list)
        for event in events:
            self.kinds[event["k"]].append(event | {"r": self.rank})
        self.steps = collections.defaultdict(dict)
        for event in self.kinds["step"]:
            self.steps[event["o"]][event["i"]] = event
        self.optimizers = {event["o"]: event for event in self.kinds["optimizer"]}
        self.passes = {
            event["p"]: {**event, "crcs": [], "count": 0, "backs": 0, "rows": 0}
            for event in self.kinds["pass"]
        }
        for event in self.kinds["passed"]:
            self.passes[event["p"]].update(event, t=self.passes[event["p"]]["t"], end=event["t"])
        for event in self.kinds["after"]:
            self.passes[event["p"]]["after"] = event["backs"]
        self.has = {event["what"] for event in self.kinds["has"]}
        self.left = self.kinds["left"] + self.kinds["exit"]
        self.count = max(
            [e["i"] + 1 for e in self.kinds["spans"]]
            + [e["steps"] for e in self.left if e["steps"]],
            default=0,
        )

    def training(self):
        """Its passes over loaders in which there was a backward(), by the lines that made them."""
        return self.by_key(lambda p: p["backs"])

    def evaluations(self):
        """Its passes without a backward(), with gradients off or the model in eval mode."""
        return self.by_key(
            lambda p: (
                p.get("over")
                and p["count"]
                and not p["backs"]
                and p.get("after", 0) < 2
                and (not p["grad"] or any(not m[0] for m in p["modes"][1]))
            )
        )

    def by_key(self, wanted):
        found = collections.defaultdict(list)
        for each in self.passes.values():
            if wanted(each):
                found[each["key"]].append(each)
        return found


class Run:
    """The ranks of one group, from its start to its end; found and asked: what is said of them."""

    def __init__(self, ranks, before=None):
        self.ranks = {rank.rank: rank for rank in ranks}
        self.world, self.first = ranks[0].world, ranks[0]
        self.before, self.cut, self.said, self.causes, self.keys = before, False, [], set(), set()
        self.has = set().union(*(rank.has for rank in ranks))
        self.all = sorted(self.ranks)
        self.ddp = {}  # {number of the DDP object: its note}, of those that the ranks agree on
        for rank in ranks:
            self.ddp |= {e["number"]: e for e in rank.kinds["ddp"]}
        self.whole = not self.has & {"shards", "to_one", "groups"}

    def __getitem__(self, kind):
        """{rank: what it noted of this kind}"""
        return {r: rank.kinds[kind] for r, rank in self.ranks.items()}

    def trained(self):
        """Seconds from the first to the last step."""
        return max(
            (rows[-1]["t"] - rows[0]["t"] for rows in self["spans"].values() if rows), default=0
        )

    def any(self, kind):
        return [event for events in self[kind].values() for event in events]

    def lined(self, kind):
        """Yield (line, {rank: its passes}) for each place that begins passes of a kind."""
        found = {r: getattr(rank, kind)() for r, rank in self.ranks.items()}
        for key in {key: 0 for passes in found.values() for key in passes}:
            have = {r: passes[key] for r, passes in found.items() if key in passes}
            yield next(iter(have.values()))[0]["at"], have

    def optimizers(self):
        """Yield (key, {rank: its steps by number}, those that all noted) of each optimizer."""
        for key in {key: 0 for rank in self.ranks.values() for key in rank.steps}:
            have = {r: rank.steps[key] for r, rank in self.ranks.items() if key in rank.steps}
            yield key, have, sorted(set.intersection(*({*steps} for steps in have.values())))

    def forwards(self):
        """Yield (its note, {rank: its forwards with gradients by number}) of each DDP object."""
        for number, note in self.ddp.items():
            yield (
                note,
                {
                    r: {
                        e["i"]: e
                        for e in self.ranks[r].kinds["forward"]
                        if e["ddp"] == number and e["grad"]
                    }
                    for r in note["group"]
                    if r in self.ranks
                },
            )

    def say(self, level, what, cost="", read="", cause="", once=""):
        """level: found, or asked. once: of all with this key, the first alone is said. cause: what
        other rules ask for, in order to leave out its consequences."""
        if (once or what) not in self.keys:
            self.keys.add(once or what)
            self.said.append((level, what, cost, read))
        self.causes |= {cause} - {""}

    found, asked = functools.partialmethod(say, "found"), functools.partialmethod(say, "asked")


def those(ranks, run=None):
    ranks = sorted(ranks)
    if run and len(ranks) == len(run.ranks) > 1:
        return "all ranks"
    text = ", ".join(map(str, ranks[:-1]))
    return f"ranks {text} and {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def differ(rows):
    return len({json.dumps(row) for row in rows}) > 1


def most(count, total, least=8):
    return total >= least and count > total / 2


def on_each(numbers):
    """{rank: number} in words."""
    return ", ".join(f"{number} on rank {r}" for r, number in [*numbers.items()][:4])


# ---- Do the ranks train one model? ----


def no_group(alone):
    """W processes that never meet train W models. A sweep looks alike, if RANK chooses a setting:
    then the weights differ from the first step on."""
    firsts = [
        next(iter(rank.steps.values()))[0]["v"]
        for rank in alone
        if rank.steps and int(rank.kinds["begin"][0]["world"] or 1) > 1
    ]
    if len(firsts) > 1:
        yield (
            "asked" if differ(firsts) else "found",
            (f"{len(firsts)} processes train, and none calls init_process_group(): so many models"),
            "the last one that writes the file wins",
            "docs/how_a_job_starts.md#six-steps",
        )


def alone(run):
    """The DDP object is called by some ranks only: its forward broadcasts buffers, and pairs with
    another call of the others. Alike: models without buffers."""
    for number, note in run.ddp.items():
        lines = {
            r: collections.Counter(
                e["at"] for e in run.ranks[r].kinds["forward"] if e["ddp"] == number
            )
            for r in note["group"]
            if r in run.ranks
        }
        for at in sorted({at for line in lines.values() for at in line}):
            have = [r for r, line in lines.items() if at in line]
            totals = [sum(line.values()) for line in lines.values()]
            if (
                len(have) < len(lines)
                and note["buffers"]
                and "join" not in run.has
                and (run.stalled or differ(totals))
                and min(totals) > 1
            ):
                run.found(
                    f"{those(have)} alone calls the DDP object at {at}",
                    "it broadcasts "
                    "buffers there, which the others take for another call: call model.module",
                    "pitfalls/wrapper_on_rank_0.py",
                    "calls",
                )


def calls(run):
    """The i-th collective call of a group is another one on some rank: they are paired by their
    order. Left out: sizes that may differ by rank (objects, scatter, all_to_all), calls of a test
    that time out and are caught, and point to point."""
    for group in sorted({e["group"] for e in run.any("call")} if not run.causes else ()):
        made = {
            r: {e["i"]: e for e in run.ranks[r].kinds["call"] if e["group"] == group}
            for r in (json.loads(group.partition("#")[0]) if group else run.all)
            if r in run.ranks
        }
        if (
            len(made) < 2
            or all(r.left for r in run.ranks.values())
            and any(e.get("error") for m in made.values() for e in m.values())
        ):
            continue
        for i in range(min(max(max(m, default=-1) for m in made.values()) + 1, 3000)):
            row = {r: m.get(i) for r, m in made.items()}
            same = {
                (e["name"], *([e.get("dtype"), e.get("n")] if e["name"] in SAME_SIZE else []))
                for e in row.values()
                if e
            }
            missing = [r for r, e in row.items() if not e]
            short = missing and (
                run.stalled or not run.cut and all(run.ranks[r].left for r in missing)
            )
            if len(same) > 1 or short:
                lines = [
                    f"rank {r} {e['name']} of {e.get('n', '?')} {e.get('dtype', 'objects')} "
                    f"at {e['at']}"
                    if e
                    else f"rank {r} {run.ranks[r].stands or 'no such call'}"
                    for r, e in row.items()
                ]
                other = short or len({name for name, *_ in same}) > 1
                run.found(
                    f"the ranks' collective calls differ, from number {i + 1} on",
                    "; ".join(lines[:3]),
                    "pitfalls/collective_on_one_rank.py"
                    if other
                    else "pitfalls/mismatched_shapes.py",
                    "calls",
                )
            if len(same) > 1 or missing:
                break


def wrappers(run):
    """DDP pairs parameters by their order: the ranks' models have other names, or an order of their
    own; or a DDP object averages with nobody. Alike: stages of a pipeline (in other groups)."""
    for number, note in run.ddp.items():
        rows = [
            e
            for r in note["group"]
            if r in run.ranks
            for e in run.ranks[r].kinds["ddp"]
            if e["number"] == number
        ]
        if differ(e["names"] for e in rows) and not differ(e["group"] for e in rows):
            run.found(
                f"the ranks' models are not alike ({note['at']}): DDP pairs parameters by "
                "their order, and the names differ",
                "sort what the layers are made from",
                WRONG,
                "weights",
            )
        if len(note["group"]) == 1 < run.world and not run.has & {"shards", "to_one"}:
            run.asked(
                f"DDP() of {note['at']} is given a group of one rank: it averages with nobody"
            )


def buffers(run):
    """Buffers other than BatchNorm's differ between the ranks in the ninth step: codebooks, queues,
    running figures. Asked: a rank may have some of its own (a cache, its number)."""
    for number, note in run.ddp.items():
        if note["norm"] and not note["buffers"] and len(note["group"]) > 1:
            run.asked(
                f"DDP() of {note['at']} has broadcast_buffers=False: each rank's BatchNorm "
                "has means of its own",
                "rank 0's are saved: average them before, or SyncBatchNorm",
                "pitfalls/small_batch_norm.py",
            )
        rows = [
            e["bits"] for e in run.any("buffers") if e["ddp"] == number and e["r"] in note["group"]
        ]
        odd = [name for name in (rows or [{}])[0] if differ(row.get(name) for row in rows)]
        if odd and "weights" not in run.causes:
            run.asked(
                f"buffers of the model ({note['at']}) differ between the ranks in step 9: "
                f"{', '.join(odd[:3])}",
                "each rank fills its own"
                + (
                    "; DDP sends rank 0's before each forward, but none that forward() replaces"
                    if note["buffers"]
                    else ""
                ),
                WRONG,
            )


def numbers(run):
    """The learning rate, or GradScaler's scale, differs by rank at the same step, or will: a
    schedule goes by figures that differ. Alike: stages of a split model (its ranks' optimizers have
    other parameters)."""
    for key, have, common in run.optimizers():
        notes = [run.ranks[r].optimizers[key] for r in have]
        if not any(notes[0]["names"]) or differ([n["shapes"], n["names"]] for n in notes):
            continue
        for what, name, cure, read in (
            (
                "rate",
                "learning rates differ",
                ("decide by a figure that all ranks share: all_reduce the loss before"),
                "recipes/agree.py",
            ),
            ("scale", "scales of GradScaler differ", "one rank skips steps that others take", CLIP),
        ):
            odd = [i for i in common if differ(s[i][what] for s in have.values())]
            if odd:
                row = {r: s[odd[0]] for r, s in have.items()}
                run.found(
                    f"the {name} from step {odd[0] + 1} on ({row[min(row)]['at']}): "
                    + "; ".join(
                        ", ".join(f"{n:.3g}" for n in e[what]) + f" on rank {r}"
                        for r, e in [*row.items()][:4]
                    ),
                    cure,
                    read,
                    once=name,
                )
    rows = [[e["value"] for e in row] for row in zip(*run["plateau"].values(), strict=False)]
    far = [row for row in rows if max(row) - min(row) > 1e-3 * max(map(abs, row))]
    if run.ddp and run.whole and most(len(far), len(rows), 2):
        run.asked(
            f"ReduceLROnPlateau ({run.any('plateau')[0]['at']}) is given another figure on "
            "each rank: "
            + on_each({r: f"{n:.4g}" for r, n in zip(run.ranks, far[0], strict=False)}),
            "it will lower the rate on some ranks before others: all_reduce the figure before",
            "recipes/agree.py",
            once="learning rates differ",
        )


def apart(run):
    """The weights of ranks that should hold one model differ. Right scripts that look alike: local
    SGD (they are equal again from time to time), averaging by hand (they stay equal), sharded or
    split models (other groups, DTensors: not compared), sums in another order (last bits only)."""
    for key, have, _ in run.optimizers():
        note = run.ranks[min(have)].optimizers[key]
        wrapper = run.ddp.get(next((n[0] for n in note["names"] if n), None))
        members = [r for r in (wrapper["group"] if wrapper else run.all) if r in run.ranks]
        absent = [r for r in members if r not in have and run.ranks[r].kinds["forward"]]
        if wrapper and absent and len(have[min(have)]) > 7:
            run.found(
                f"{those(absent)} never takes a step with the optimizer of {note['at']}",
                "the weights come apart",
                "",
                "weights",
            )
        alike = [
            r
            for r in members
            if r in have
            and not differ([n["shapes"], n["names"]] for n in (note, run.ranks[r].optimizers[key]))
        ]
        if len(alike) < 2 or not wrapper and not run.whole or "join" in run.has:
            continue
        steps = {r: have[r] for r in alike}
        common = sorted(set.intersection(*({*s} for s in steps.values())))
        bad = [i for i in common if unlike(steps, i, "v")]
        if not bad or not any(
            gap(steps, i, "v") > 1e-5 or gap(steps, i, "g") > 1e-3 for i in common
        ):
            continue
        first, one = bad[0], steps[alike[0]]
        if any(
            i > first and i not in bad and all(v and v[1] - v[1] == 0 for v in one[i]["v"])
            for i in common
        ):
            continue  # they meet again: local SGD
        if first == 0 and any("all_to_all" in e["name"] for e in run.any("call")):
            continue  # each rank has experts of its own, and rows travel to them
        since = max([i for i in common if i < first], default=0)
        why, read = cause(run, steps, key, since, first, note, wrapper)
        if not why:
            continue
        size = max(map(math.prod, note["shapes"]), default=0)
        large = [e for e in run.any("call") if e.get("n", 0) >= size]
        every = [e for e in run.any("call") if one[common[0]]["t"] < e["t"] < one[common[-1]]["t"]]
        by_hand = (
            not wrapper
            and len(common) > 9
            and len(every) >= max(one)
            and (first > 0 or "broadcast" in why)
        )  # in each step
        sure = (
            len(bad) > 2
            and (not large or by_hand)
            and (run.ddp or every and ("by hand" not in why or len(every) > max(one) / 2))
            and ("no_sync" not in why or len(common) > 40 or not run.cut)
        )
        names = [
            note["names"][j][1] if note["names"][j] else f"number {j + 1}"
            for j in unlike(steps, first, "v")
        ]
        run.say(
            "found" if sure else "asked",
            f"the weights of {those(alike, run)} come apart at "
            f"step {since + 1} ({one[since]['at']}): {why}",
            f"{len(names)} of "
            f"{len(note['shapes'])} parameters ({', '.join(names[:3])}"
            f"{', ...' * (len(names) > 3)})"
            + (
                "; each rank trains a model of its own"
                if sure
                else "; is that meant so (averaged later, split over the ranks)?"
            ),
            read,
            "weights",
        )


def unlike(steps, i, what="g"):
    """The places of the parameters whose gradients (or values) differ between ranks in step i."""
    rows = zip(*(s[i][what] for s in steps.values()), strict=False)
    return [
        j
        for j, row in enumerate(rows)
        if len({print_ and print_[0] for print_ in row}) > 1 and (what == "g" or all(row))
    ]


def gap(steps, i, what):
    """The largest relative difference between the ranks' norms of a parameter (or gradient)."""
    return max(
        (
            abs(a[1] - b[1]) / (abs(a[1]) + abs(b[1]) + 1e-30)
            for row in zip(*(s[i][what] for s in steps.values()), strict=False)
            for a in row
            for b in row[:1]
            if a and b and a != b
        ),
        default=0,
    )


def cause(run, steps, key, since, first, note, wrapper):
    """Why weights come apart, and what to read: a reason counts only where its own record is there.
    ("", "") if that is said already."""
    at = {r: s[since] for r, s in steps.items()}
    one, gradients = next(iter(at.values())), unlike(steps, since)
    names = {note["names"][j][1] if note["names"][j] else None for j in gradients}
    if not run.ddp:
        if not any(e.get("n", 0) > 16 for e in run.any("call")):
            return "no model is wrapped in DDP()", "README.md#from-one-process-to-many"
        common = set.intersection(*({*s} for s in steps.values()))
        if first == 0 and not any(unlike(steps, i) for i in common):
            return "they begin with other weights: broadcast rank 0's before", ""
        return "not all is averaged by hand, or at the wrong moment", "04_collectives.py"
    if first == 0:
        took = {
            r: [e["at"] for e in run.ranks[r].kinds["took"] if e["ddp"] and not e["steps"]]
            for r in steps
        }
        if some := [r for r in took if took[r]] if not all(took.values()) else []:
            return (
                f"{those(some)} alone loads weights after DDP(), at {took[some[0]][0]}",
                "recipes/README.md",
            )
        return "they begin with other weights", ""
    if gradients:
        for holds, why, read in (
            (
                wrapper and not run.any("forward"),
                ("DDP() of {wrapper} is never called, but the bare model"),
                "pitfalls/wrapper_not_kept.py",
            ),
            (
                names == {None},
                ("these parameters are not DDP's: added or exchanged after it, or outside"),
                "",
            ),
            (
                one["cut"],
                ("its parameters were cast, moved or exchanged after DDP(), which has lost them"),
                WRONG,
            ),
            (
                wrapper and names - {None} <= {*wrapper["frozen"]},
                ("frozen when DDP() was made ({wrapper}), trained later: wrap again"),
                WRONG,
            ),
            (not one["backs"], "the gradients do not come from backward(), which DDP follows", ""),
            (
                not one["forwards"],
                "the bare model is trained ({line}), not the DDP object",
                "pitfalls/method_of_the_model.py",
            ),
            (
                one["sync"] is False,
                ("the last forward before the step was inside no_sync()"),
                "recipes/accumulate.py",
            ),
            (
                one["twice"],
                ("two forwards of the DDP object, then two backwards: one is not averaged"),
                "",
            ),
            (
                wrapper and len(wrapper["group"]) < run.world,
                ("DDP averages in the group {group} alone"),
                "",
            ),
        ):
            if holds:
                return why.format(
                    wrapper=wrapper and wrapper["at"],
                    line=one["line"],
                    group=wrapper and wrapper["group"],
                ), read
    if any(differ([e[i]["scale"], e[i]["rate"]] for e in steps.values()) for i in (since, first)):
        return "", ""  # by the rule before
    loads = {r: [e["at"] for e in run.ranks[r].kinds["resumed"] if e["o"] == key] for r in steps}
    if some := [r for r in loads if loads[r]] if not all(loads.values()) else []:
        return (
            f"{those(some)} alone loads the optimizer's state, at {loads[some[0]][0]}",
            "02_torchrun_elastic.py",
        )
    clips = {r: {e["i"]: e["norm"] for e in run.ranks[r].kinds["clip"]} for r in steps}
    if some := [r for r in clips if clips[r]] if not all(clips.values()) else []:
        return f"{those(some)} alone clips the gradients", CLIP
    if all(clips.values()) and differ(c.get(since) for c in clips.values()):
        return "each rank clips by a norm of its own", CLIP
    if any(differ(s[i]["batches"] for s in steps.values()) for i in (since, first)):
        return "a rank has left out a batch alone, and is a step ahead of the others", CLIP
    return (
        "their gradients differ, and no reason was seen"
        if gradients
        else "their optimizers take other steps from equal gradients"
    ), ""


# ---- Does each rank get its share of the data? ----


def same_batches(run):
    """All ranks train on the same batches. Alike: ranks that split the model (compared is what goes
    into one DDP object, else it is asked), and one constant batch."""

    def alike(rows):
        """How many of the batches of all ranks that were compared are the same."""
        kinds = len({str(batch) for row in rows for batch in row})
        same = sum(not differ(row) for row in rows)
        return kinds > 2 and most(same, len(rows)) and f"{same} of {len(rows)} that were compared"

    for note, have in run.forwards():
        i = set.intersection(*({*row} for row in have.values())) if len(have) > 1 else ()
        same = alike(
            [
                [row[n]["batch"] for row in have.values()]
                for n in i
                if all(row[n].get("batch") for row in have.values())
            ]
        )
        if same and "data" not in run.causes:
            at = next(e["at"] for row in have.values() for e in row.values())
            run.found(
                f"{those(have, run)} train on the same batches: {same} ({at})",
                "the others add nothing: a DistributedSampler (or your own split by rank) is "
                "missing",
                SHARE,
                "data",
            )
    for at, have in run.lined("training"):
        crcs = [[c for p in passes for c in p["crcs"]] for passes in have.values()]
        same = alike([*zip(*crcs, strict=False)])
        if same and not run.ddp and len(have) == len(run.ranks) > 1:
            run.asked(
                f"all ranks draw the same batches ({at}): {same}",
                "right where the ranks split the model; else the others add nothing",
                SHARE,
                "data",
            )


def whole_set(run):
    """Each rank goes through the whole set in an order of its own: an epoch is W epochs. Alike: the
    set was split before (its contents differ), draws with replacement: then it is asked."""
    for at, have in run.lined("training"):
        firsts = [passes[0] for passes in have.values()]
        one = firsts[0]
        if (
            run.causes & {"data", "split"}
            or len(have) < len(run.ranks)
            or one.get("num_replicas")
            or (one["iterable"])
            or not one["length"]
            or differ([p["length"], p["data"]] for p in firsts)
            or not all(p["share"] == p["length"] and p["batches"] for p in firsts)
        ):
            continue
        same = (
            str(one["data"]).strip("{}[], ")
            or one["content"]
            and all(
                p.get("done") and abs(p["content"] - one["content"]) <= 1e-6 * abs(one["content"])
                for p in firsts
            )
        )
        drawn = all(
            p.get("done") and p["drawn"] == p["length"] and p["sum"] == one["sum"] for p in firsts
        )
        sure = same and drawn and run.ddp and one["count"] < 300
        run.say(
            "found" if sure else "asked",
            f"each rank goes through all {one['length']} items ({at}, {one['sampler']})",
            f"an epoch is {run.world} epochs"
            + ("" if sure else ", unless each rank has a set of its own"),
            SHARE,
        )


def told_wrong(run):
    """A DistributedSampler in training has another number of replicas than there are ranks, or two
    ranks have one number. Alike: tensor x data parallel: compared with the group of DDP."""
    sizes = {len(note["group"]) for note in run.ddp.values()} or {run.world}
    for at, have in run.lined("training"):
        told = {r: (p[0].get("num_replicas"), p[0].get("rank")) for r, p in have.items()}
        wrong = {n for n, _ in told.values()} - sizes
        twice = len({*told.values()}) < len(told) == len(run.ranks) and sizes == {run.world}
        if (wrong or twice) and run.whole and None not in {n for n, _ in told.values()}:
            run.found(
                f"the sampler of {at} was told a wrong "
                f"{'number of ranks' if wrong else 'rank'}: "
                + "; ".join(f"rank {r} is {rank} of {n}" for r, (n, rank) in [*told.items()][:4]),
                f"there are {run.world} ranks: some take the same items",
                SHARE,
                "data",
            )


def order_again(run):
    """The order of the items comes again in each epoch. Alike: no shuffle (rising numbers), one
    batch, and a pass that was broken off and is done again on purpose."""
    for at, have in run.lined("training"):
        for r, passes in have.items():
            done = [p for p in passes if p.get("done") and p["drawn"] > 1 and p["count"] > 1]
            if (
                len(done) < 2
                or differ(p["order"] for p in done)
                or done[0]["rising"]
                or (done[0].get("shuffle") is False)
            ):
                continue
            sampler, calls = "num_replicas" in done[0], run.ranks[r].kinds["epoch"]
            other = [e for e in calls if e["id"] not in {p["id"] for p in passes}]
            why = (
                f"set_epoch at {other[0]['at']} is called on another sampler"
                if other
                else f"set_epoch at {calls[0]['at']} always gets the same number"
                if calls and not differ(e["epoch"] for e in calls)
                else "set_epoch(epoch) is not called"
                if sampler
                else "its sampler draws the same again"
            )
            run.found(
                f"the items come in the same order in each epoch ({at}, {len(done)} passes): {why}",
                "",
                "pitfalls/no_set_epoch.py",
            )
            break


def splits(run):
    """Ranks that split one set split it unlike: what one trains on, another may test on; or the
    items stand in another order. Alike: shards by rank (nothing in common), sets of their own."""
    notes = collections.defaultdict(dict)
    for r, events in run["subset"].items():
        for e in events:
            notes[e["key"]][r] = e
    for have in notes.values():
        rows = [*have.values()]
        sets = [{*e["sketch"]} for e in rows]
        if (
            len(rows) < 2
            or differ((e["of"], e["data"]) for e in rows)
            or not differ(e["order"] for e in rows)
        ):
            continue
        common, least = set.intersection(*sets), min(map(len, sets))
        if least and all(s == sets[0] for s in sets) and not differ(e["n"] for e in rows):
            run.found(
                f"the items of Subset ({rows[0]['at']}) stand in another order on each rank",
                "shares by place overlap, and leave items out: sort them, or seed it",
                "pitfalls/unseeded_dataset.py",
                "split",
            )
        elif least and len(common) / least > 0.02:
            run.found(
                f"each rank splits the set in its own way ({rows[0]['at']}): "
                f"{len(common) / least:.0%} of the items are in all ranks' parts",
                "one tests on "
                "what another trains on: pass generator=torch.Generator().manual_seed(0)",
                "pitfalls/unseeded_dataset.py",
                "split",
                once=f"split {rows[0]['at']}",
            )
    for at, have in run.lined("training"):
        texts = [p[0]["data"] for p in have.values()]
        for name in texts[0] if all(isinstance(t, dict) for t in texts) else ():
            pairs = [t.get(name) for t in texts]
            if (
                all(p and len(p) == 2 for p in pairs)
                and differ(p[0] for p in pairs)
                and not differ(p[1] for p in pairs)
            ):
                run.found(
                    f"the dataset's {name!r} has the same entries in another order on each "
                    f"rank ({at})",
                    "sort it: labels or shares mean different things",
                    WRONG,
                    "split",
                )


def overlap(run):
    """Shares overlap: samplers shuffle by other seeds. Or they are shares of other sets: asked, as
    each rank's set may be its own. Alike: padding, draws with replacement."""
    for at, have in run.lined("training"):
        firsts = [p[0] for p in have.values()]
        known = {str(p["data"]) for p in firsts if str(p["data"]).strip("{}[], ")}
        if (
            len(have) < 2
            or run.causes & {"data", "split"}
            or any(p.get("num_replicas") != run.world for p in firsts)
        ):
            continue
        if len(known) == len(run.ranks) and not differ(p["length"] for p in firsts):
            run.asked(
                f"each rank has another dataset ({at}), and a DistributedSampler takes 1 of "
                f"{run.world} items of it",
                "is it made of random numbers without a seed, or "
                "shared out twice? The rest is never seen",
                "pitfalls/unseeded_dataset.py",
                once="other sets",
            )
        if differ((p["data"], p.get("epoch")) for p in firsts) or not all(
            p.get("done") for p in firsts
        ):
            continue
        sets = [{*p["sketch"]} for p in firsts]
        common = len(set.intersection(*sets))
        if common > max(run.world, 0.02 * len(sets[0])):
            run.found(
                f"the ranks' shares overlap ({at}): {common / len(sets[0]):.0%} of one "
                "rank's items are also another's",
                "the samplers shuffle by other seeds, or sets "
                "in another order: some items are never seen",
                SHARE,
            )


def batches_again(run):
    """Each batch comes several times: every worker of a loader reads a whole stream, or a new
    iterator is made for each batch. Alike: one constant batch."""
    for at, have in run.lined("training"):
        passes = next(iter(have.values()))
        crcs, workers = passes[0]["crcs"], passes[0]["workers"]
        again = sum(a == b for a, b in itertools.pairwise(crcs))
        if (
            passes[0]["iterable"]
            and workers > 1
            and len({*crcs}) > 1
            and (again >= len(crcs) * (1 - 1 / workers) * 0.8 > 2)
        ):
            run.found(
                f"each batch of the stream comes {workers} times ({at}): once from each worker",
                "share it out by torch.utils.data.get_worker_info(), too",
                "recipes/stream.py",
            )
        single = [p for p in passes if p["count"] == 1 and not p.get("done") and p["batches"] != 1]
        if len(single) > 7 and len(single) == len(passes):
            first = [p["crcs"][0] for p in single if p["crcs"]]
            run.say(
                "found" if first and len({*first}) < len(first) / 2 else "asked",
                f"each step begins a new pass over the loader ({at}), and takes its first batch",
                f"{len(first)} such batches, {len({*first})} different ones: make the iterator "
                "once, before the steps",
            )


def shares(run):
    """Ranks train on other numbers of items, or of batches. Alike: a loss that is weighed by hand
    (a small sum over the ranks comes before each backward), Join, a run that was cut."""
    if run.causes & {"calls"} or "join" in run.has:
        return
    small = [
        e["small"] for _, have, _ in run.optimizers() for s in have.values() for e in s.values()
    ]
    for _, have in run.forwards():
        i = sorted(set.intersection(*({*row} for row in have.values()))) if len(have) > 1 else []
        rows = [{r: row[n].get("rows") for r, row in have.items()} for n in i]
        uneven = [row for row in rows if differ(row.values())]
        if most(len(uneven), len(i)) and statistics.median(small or [0]) < 1:
            run.asked(
                f"the ranks' batches differ in size in {len(uneven)} of {len(i)} steps: "
                + on_each(uneven[0]),
                "DDP's mean weighs ranks alike, not items: weigh the loss, "
                "unless each rank's batch is meant to count the same",
                "pitfalls/mean_of_unequal_shards.py",
            )
    for at, have in run.lined("training"):
        counts = {r: [p["backs"] for p in passes if "over" in p] for r, passes in have.items()}
        for n, row in enumerate(zip(*counts.values(), strict=False)):
            if (
                len(have) == len(run.ranks) > 1
                and not run.cut
                and max(row) - min(row) > 1
                and (max(row) > 1.02 * min(row))
            ):
                run.say(
                    "found" if run.ddp and "weights" not in run.causes else "asked",
                    f"in pass {n + 1} over the loader ({at}) the ranks train on other numbers of "
                    "batches: " + on_each(dict(zip(counts, row, strict=True))),
                    "",
                    "pitfalls/uneven_inputs.py",
                )
                break
    for _, have, common in run.optimizers():
        odd = [i for i in common if differ(s[i]["batches"] for s in have.values())]
        if len(have) > 1 and run.ddp and 0 < len(odd) < len(common) / 2 and max(common) > 7:
            i = odd[0]
            run.asked(
                f"before step {i + 1} ({have[min(have)][i]['at']}) the ranks took "
                "different numbers of batches: "
                + on_each({r: s[i]["batches"] for r, s in have.items()}),
                "a rank that skips a batch alone is a step ahead: gradients of different steps are "
                "averaged",
                CLIP,
            )
            break


def empty(run):
    """A loader yields nothing, and nothing is trained. Alike: evaluation (some steps are taken)."""
    for rank in run.ranks.values():
        for p in rank.passes.values():
            if p.get("done") and not p["count"] and not rank.steps:
                run.found(
                    f"the loader of {p['at']} yields no batch: nothing is trained",
                    f"{p['length']} items, drop_last: {p['drop']}",
                )


# ---- Modes, random numbers ----


def modes(run):
    """Training in eval mode after an evaluation, or on some ranks alone. Alike: fine-tuning in eval
    mode from the start, frozen BatchNorm (the whole model is still in train mode)."""
    for note, have in run.forwards():
        rows = {r: [*row.values()] for r, row in have.items()}
        off = {r: next((e for e in row if not e["training"]), None) for r, row in rows.items()}
        for r, row in rows.items() if note["draws"] or note["norm"] else ():
            trains = [q for q in rows if rows[q] and not off[q]]
            if (
                off[r]
                and off[r]["i"]
                and row[-1]["i"] - off[r]["i"] > 7
                and not any(e["training"] for e in row if e["i"] >= off[r]["i"])
            ):
                run.found(
                    f"from forward {off[r]['i'] + 1} on, training goes on in eval mode "
                    f"({off[r]['at']}, {those([q for q in off if off[q]], run)}): no dropout, and "
                    "BatchNorm stands still",
                    "call model.train() after each evaluation",
                    "01_single_node_multi_gpu.py",
                )
                break
            if len(row) > 7 and trains and not any(e["training"] for e in row):
                run.found(
                    f"rank {r} trains in eval mode, {those(trains)} in train mode", row[0]["at"]
                )


def draws(run):
    """Ranks draw the same dropout masks, or a rank the same in each step. Asked: one seed on all
    ranks weakens dropout, and is no error. Alike: nothing is drawn (the state does not move)."""
    for _, have in run.forwards():
        rows = {
            r: {i: e["random"] for i, e in row.items() if e.get("moved") and e["training"]}
            for r, row in have.items()
        }
        for r, row in rows.items():
            seen = collections.Counter(row.values()).most_common(1)
            twins = [
                q
                for q in rows
                if q >= r
                and {*row} & {*rows[q]}
                and most(sum(rows[q].get(i) == state for i, state in row.items()), len(row))
            ]
            if seen and most(seen[0][1], len(row)):
                run.found(
                    f"rank {r} draws the same random numbers in {seen[0][1]} of {len(row)} "
                    "steps: the seed is set again in the loop",
                    "dropout drops the same places",
                    "recipes/randomness.py",
                    "random",
                )
            elif len(twins) > 1 and "random" not in run.causes:
                run.asked(
                    f"{those(twins, run)} draw the same random numbers (dropout, noise) in "
                    "their forward passes",
                    "seed by rank after the model is built, unless they must draw alike",
                    "recipes/randomness.py",
                    "random",
                )


def evaluations(run):
    """What goes wrong between two trainings: items counted twice or not at all, the model in train
    mode, BatchNorm's values that differ by rank, a rank's figures that are never put together."""
    for at, have in run.lined("evaluations"):
        for r, passes in have.items():
            p, rank = passes[0], run.ranks[r]
            gather = any(
                "gather" in e["name"] and p["t"] < e["t"] < p["end"] + 5 for e in rank.kinds["call"]
            )
            trains = {q["loader"] for q in rank.passes.values() if q["backs"]}
            extra, rest = (
                (p.get("total_size") or 0) - (p["length"] or 0),
                (p["share"] or 0) - p["rows"],
            )
            if p.get("done") and not p["drop"] and p["length"] and extra > 0:
                run.say(
                    "asked" if gather else "found",
                    f"the evaluation ({at}) counts {extra} of "
                    f"{p['length']} items twice: DistributedSampler pads the shares",
                    "unless you drop them after the gather" if gather else "",
                    "pitfalls/padded_evaluation.py",
                )
            if p.get("done") and p["drop"] and rest > 0 and p["loader"] not in trains and p["rows"]:
                run.found(
                    f"the evaluation ({at}) leaves out {rest} of {p['share']} items: drop_last",
                    "",
                    "recipes/metrics.py",
                )
            if rank.training() and any(
                before[2] < after[2]
                for q in passes
                for before, after in zip(*(q.get("modes") or [[], []]), strict=False)
            ):
                run.asked(
                    f"the evaluation ({at}) runs in train mode: BatchNorm learns from it",
                    "model.eval(), unless that is meant so",
                )
        if len(have) < len(run.ranks) or len(have) == 1:
            continue
        last = [[q["modes"][1] for q in passes if q.get("modes")][-1:] for passes in have.values()]
        values = [m[0] for m in last if m and m[0] and m[0][0][1] and not m[0][0][0]]
        if differ(m[0][1] for m in values) and "weights" not in run.causes:
            run.found(
                f"BatchNorm's running values differ between the ranks in the evaluation ({at})",
                "each rank evaluates a model of its own: broadcast rank 0's buffers before",
                "01_single_node_multi_gpu.py",
            )
        met = False
        for r, passes in have.items():
            for p in passes:
                end = min([e["t"] for e in run["spans"][r] if e["t"] > p["end"]], default=1e99)
                met = met or any(
                    p["end"] < e["t"] < end and e["name"] != "barrier" for e in run["call"][r]
                )
        if not met and differ(p[0]["crcs"] for p in have.values()) and run.whole and not run.cut:
            run.asked(
                f"each rank evaluates a share ({at}), and nothing puts the ranks' figures together",
                "rank 0's is that of its share: all_reduce sums and counts",
                "recipes/metrics.py",
            )
        crcs = [[c for p in passes for c in p["crcs"]] for passes in have.values()]
        took = sum(p["end"] - p["t"] for passes in have.values() for p in passes) / len(have)
        if all(crcs) and not differ(crcs) and took > run.trained() / 30 > 0:
            run.asked(
                f"every rank evaluates the whole set ({at}): {took / run.trained():.0%} of "
                "the time",
                "a share each, and one sum over the ranks, takes a part of it",
                "recipes/metrics.py",
            )


# ---- Gradients, optimizer, schedule ----


def gradients(run):
    """What a step finds in .grad: never cleared, cleared too early, not finite, none. Alike:
    accumulation, GANs (an optimizer's own gradients count), networks that wait for their turn."""
    for rank in run.ranks.values():
        for key, steps in rank.steps.items():
            note, rows = rank.optimizers[key], [*steps.values()]
            have = [r for r in run.ranks if key in run.ranks[r].steps]
            at = f"({rows[0]['at']}, {those(have, run)})"
            bare = [e for e in rows if e["backs"] and e["none"] == len(note["shapes"])]
            late = [
                e for e in rows if e["late"] and e["backs"] and not any(g and g[1] for g in e["g"])
            ]
            broken = [e["i"] for e in rows if any(g and g[1] - g[1] != 0 for g in e["g"])]
            free = [e["free"] for e in rows if e["free"] and e["i"] > 2]
            several = [
                e["backs"]
                for e in rows
                if e["backs"] > 1 and e["sync"] and (e["forwards"] == e["backs"])
            ]
            if most(sum(bool(e["stale"]) for e in rows[1:]), len(rows) - 1):
                run.found(
                    f"gradients are never cleared {at}: each step adds to all before it",
                    "call optimizer.zero_grad() once a step",
                    "",
                    "stale",
                    once="stale",
                )
            if most(len(late), len(rows)):
                run.found(
                    f"gradients are cleared between backward() and step() {at}: the step "
                    "does nothing",
                    "call zero_grad() before backward()",
                )
            elif most(len(bare), len(rows)) and "shards" not in run.has:
                run.found(
                    f"none of the optimizer's {len(note['shapes'])} parameters "
                    f"({note['at']}) ever has a gradient: it is not the model that is trained",
                    "make the optimizer from the parameters of the model that you call",
                )
            if broken and not run.causes & {"weights", "stale"}:
                run.found(
                    f"from step {broken[0] + 1} on, gradients are nan or inf, and the step "
                    f"is taken {at}",
                    "the weights are lost from there on",
                    CLIP,
                    once="nan",
                )
            if most(len(free), len([e for e in rows if e["i"] > 2]), 4) and not bare:
                run.found(
                    f"{len(free[0])} trained parameters are in no optimizer, and stay as "
                    f"they are: {', '.join(free[0][:3])}",
                    f"the optimizer was made at {note['at']}",
                )
            if (
                most(len(several), len(rows))
                and run.ddp
                and not differ(several)
                and (len(rank.steps) == 1)
                and all(e["sync"] for e in rank.kinds["forward"] if e["grad"])
            ):
                run.asked(
                    f"gradients are exchanged {several[0]} times for one step {at}",
                    "no_sync() around the forward of all but the last saves the others",
                    "recipes/accumulate.py",
                )
        windows = collections.Counter(e["backs"] for s in rank.steps.values() for e in s.values())
        usual = windows.most_common(1)[0][0] if windows else 1
        lost = [e for e in rank.kinds["thrown"] if 0 < e["backs"] < usual]
        if usual > 1 and lost and len(lost) <= len(rank.passes) and len(rank.steps) == 1:
            run.asked(
                f"at {lost[0]['at']}, zero_grad() throws away {lost[0]['backs']} of {usual} "
                "accumulated backward passes, at the end of each epoch",
                "take a last step with them, or leave these batches out knowingly",
                "recipes/accumulate.py",
            )


def clipping(run):
    """Clipping that does nothing, or meets gradients that GradScaler still multiplies."""
    for rank in run.ranks.values():
        clips = rank.kinds["clip"]
        for wrong, what in (
            (
                lambda e: e["scaled"],
                (
                    "clips gradients that GradScaler still "
                    "multiplies: call scaler.unscale_(optimizer) before"
                ),
            ),
            (
                lambda e: not e["n"],
                (
                    "clips nothing: no gradient is in what it is given (another model's parameters,"
                    " a generator that was read before)"
                ),
            ),
            (lambda e: e["n"] and not e["owned"], "clips parameters of no optimizer"),
        ):
            if most(len([e for e in clips if wrong(e)]), len(clips)) and rank.steps:
                run.found(f"clip_grad_norm_ at {clips[0]['at']} {what}", "", CLIP)


def summed(run):
    """all_reduce of a gradient that DDP has averaged already. Asked: harmless if it is divided."""
    calls = [e for e in run.any("call") if e.get("grad")]
    if len(calls) > 7:
        run.asked(
            f"all_reduce at {calls[0]['at']} adds up gradients that DDP has averaged",
            f"it sends all twice, and makes them {run.world} times as large unless you divide",
        )


def schedules(run):
    """A schedule that is never stepped, counts in another unit, or runs back up; an average that is
    never updated. Asked, but for the first. Alike: parts of a SequentialLR, which wait."""
    for rank in run.ranks.values():
        last = {e["id"]: e for e in rank.kinds["schedule"]}
        inside = {i for e in last.values() for i in e["of"]}
        training = sum(map(len, rank.training().values()))
        for e in last.values():
            if e["id"] in inside or not e["steps"]:
                continue
            what = f"{e['type']} ({e['at']})"
            if e["n"] == 1 and (e["steps"] > 20 and training > 1 or e["steps"] > 1000):
                run.found(
                    f"the schedule {what} is never stepped: the rate stays", "call its step()"
                )
            elif e["type"] == "CosineAnnealingLR" and e["last"] > e["total"]:
                run.asked(
                    f"{what} was made for {e['total']} steps, and its step() was called "
                    f"{e['last']} times: the rate rises again",
                    "is its length counted in epochs, and step() called for each batch?",
                )
            elif (
                e["total"]
                and run.world > 1
                and not run.cut
                and e["steps"] == e["last"]
                and abs(e["total"] / max(1, e["last"]) / run.world - 1) < 0.1
            ):
                run.asked(
                    f"{what} was made for {e['total']} steps, and the run ends after "
                    f"{e['last']}, {run.world} times fewer",
                    "was its length counted before the data were shared out?",
                    "pitfalls/learning_rate_and_world_size.py",
                )
        for e in {e["id"]: e for e in rank.kinds["average"]}.values():
            if e["n"] == 0 and e["steps"] > 19:
                run.asked(
                    f"AveragedModel ({e['at']}) is never updated: after {e['steps']} steps "
                    "it holds the first weights",
                    "call update_parameters(model) after each step",
                )


def made_anew(run):
    """An optimizer is made again over the same parameters: momentum begins at 0. Asked."""
    for rank in run.ranks.values():
        made = collections.defaultdict(set)
        for e in rank.kinds["optimizer"]:
            made[e["at"], e["ids"], e["keeps"]].add(e["o"])
        for (at, _, keeps), found in made.items():
            if len(found) > 2 and keeps:
                run.asked(
                    f"the optimizer is made anew {len(found)} times, over the same "
                    f"parameters ({at})",
                    "its momentum is lost each time: make it once, before the epochs",
                    once=f"anew {at}",
                )


# ---- Files, and what comes after a restart ----


def files(run):
    """Several ranks write one file, or one reads what another is writing. Alike: files by rank,
    ranks that take turns, other machines' disks, an order by a store (then it is only asked)."""
    saves = collections.defaultdict(lambda: collections.defaultdict(list))
    for rank in run.ranks.values():
        for e in rank.kinds["save"]:
            if e["path"] and not e["path"].startswith("/dev/"):
                saves[rank.host, e["path"]][rank.rank].append(e)
    for (host, path), by in saves.items():
        name, one = os.path.basename(path), next(iter(by.values()))[0]
        if any(
            a["r"] != b["r"] and a["begun"] <= b["phase"] and b["begun"] <= a["phase"]
            for a, b in itertools.combinations(itertools.chain(*by.values()), 2)
        ):
            run.found(
                f"{those(by, run)} save to one file, {name} ({one['at']})",
                "they write over each other: rank 0 alone saves, or each to a name of its own",
                "pitfalls/every_rank_saves.py",
                "save",
                once=f"save {one['at']}",
            )
        paths = {path} | {
            e["path"] for q in by for e in run.ranks[q].kinds["move"] if e["source"] == path
        }
        for load, e in itertools.product(run.any("load"), itertools.chain(*by.values())):
            r, q = load["r"], e["r"]
            if (
                r != q
                and run.ranks[r].host == host
                and load["path"] in paths
                and ("save" not in run.causes)
                and e["begun"] <= load["phase"]
                and (load["begun"] <= e["phase"])
            ):
                inside = load["start"] < e["t"] and e["start"] < load["t"]
                run.say(
                    "found" if inside else "asked",
                    f"rank {r} loads {name} ({load['at']}) "
                    f"while rank {q} saves it ({e['at']}), and nothing lets it wait",
                    "dist.barrier() between them",
                    "pitfalls/README.md#it-was-killed-and-something-is-lost",
                    once=f"race {r} {path}",
                )
    copy = "keep a copy: copy.deepcopy(model.state_dict())"
    for rank in run.ranks.values():
        for e in rank.kinds["save"]:
            if e["wrapper"]:
                run.asked(
                    f'{e["at"]} saves the state of the DDP object: its names begin with "module."',
                    "another script cannot load it: save model.module.state_dict()",
                    "pitfalls/keys_with_module.py",
                )
            if e["old"]:
                run.found(
                    f"{e['at']} saves a state_dict() that was taken {e['old']} steps before, "
                    "and has changed with the model since",
                    copy,
                    once=f"old {e['at']}",
                )
        for e in rank.kinds["took"]:
            if e["old"]:
                run.found(
                    f"{e['at']} loads a state_dict() of {e['old']} steps before, which has "
                    "changed with the model since: nothing happens",
                    copy,
                )
            if e["n"] > 3 and e["fit"] < e["n"] / 10:
                run.found(
                    f"{e['at']} loads {e['n']} entries, of which {e['fit']} fit the model: "
                    "it stays as it was",
                    e["prefix"] and f"their names differ by {e['prefix']!r}",
                    "pitfalls/keys_with_module.py",
                )
        paths = collections.Counter(e["path"] for e in rank.kinds["save"] if e["optimizer"])
        for path in {f["path"] for f in run.any("load")} - {
            e["source"] for e in rank.kinds["move"]
        }:
            if paths[path] > 1 and path:
                run.found(
                    f"{os.path.basename(path)}, from which the job goes on, is written over "
                    f"in place {paths[path]} times",
                    "a kill meanwhile leaves none: write beside it, then os.replace",
                    "pitfalls/snapshot_in_place.py",
                )


def resumes(run):
    """What a resumed run forgets: the optimizer's state or rate, epochs, the order of the data, or
    everything. Alike: fine-tuning (then it is asked), a rate that a schedule has changed."""
    before = run.before
    moves, saves = (before.any(kind) if before else [] for kind in ("move", "save"))
    loads = [e for e in run.any("load") if e["path"] and not e["steps"]]
    ours = [e for e in loads if e["path"] in {e["path"] for e in moves + saves}]
    trains = any(rank.count for rank in run.ranks.values())
    keeps = any(n["keeps"] for rank in run.ranks.values() for n in rank.optimizers.values())
    if trains and run.first.attempt and saves and not ours:
        run.asked(
            f"attempt {run.first.attempt} begins anew: it loads no file that the attempt "
            "before has saved",
            "all is trained again",
            "02_torchrun_elastic.py",
        )
    for e in loads if trains and keeps and not run.any("resumed") else ():
        if e["optimizer"] or e in ours:
            run.say(
                "found" if e in ours else "asked",
                f"{e['at']} loads "
                f"{os.path.basename(e['path'])}, and training goes on without the optimizer's "
                "state",
                "its momentum begins at 0 after each resume"
                if e in ours
                else "right for fine-tuning; after a crash the momentum is lost",
                "pitfalls/optimizer_not_saved.py",
            )
            break
    for e in run.first.kinds["resumed"]:
        step = run.first.steps.get(e["o"], {}).get(e["i"])
        if (
            step
            and step["rate"] != e["rate"]
            and not any(
                s.get("n", 0) > 1 + e["i"] and s["t"] < step["t"]
                for s in run.first.kinds["schedule"]
            )
        ):
            run.asked(
                f"the optimizer's state ({e['at']}) was loaded with rate {e['rate'][0]:.3g}, "
                f"and the next step takes {step['rate'][0]:.3g}",
                "a schedule made after the load sets it back: load it last",
                once="rate",
            )
        if not step and run.first.steps and e["o"] not in run.first.steps:
            run.found(
                f"{e['at']} loads the state of an optimizer that never takes a step",
                "the one that trains was made afterwards",
                "pitfalls/optimizer_not_saved.py",
            )
    trained = {
        r: [p for p in rank.passes.values() if p["count"] > 1 < p["backs"] and "num_replicas" in p]
        for r, rank in run.ranks.items()
    }
    firsts = [passes[0].get("epoch") for passes in trained.values() if passes]
    if len(firsts) == len(run.ranks) and differ(firsts) and None not in firsts:
        run.found(
            f"the ranks begin in different epochs: {', '.join(map(str, firsts))}",
            "some go on from a file that others do not have",
            "02_torchrun_elastic.py",
        )
    if not ours or "weights" in run.causes:
        return
    paths = {e["path"] for e in ours}
    paths |= {e["source"] for e in moves if e["path"] in paths}
    until = max((e["t"] for e in saves if e["path"] in paths), default=0)
    finished = {
        r: [
            p
            for p in rank.passes.values()
            if p["count"] > 1 < p["backs"]
            and p.get("done")
            and "num_replicas" in p
            and p["end"] < until
        ]
        for r, rank in before.ranks.items()
    }
    # Of all ranks: one may end its pass only after another has saved.
    lasts = [e[-1]["epoch"] for e in finished.values() if e and e[-1].get("epoch") is not None]
    for r, passes in trained.items():
        ends = finished.get(r)
        if not passes or not ends:
            continue
        last, next_ = max(lasts, default=None), passes[0].get("epoch")
        begin = [p["crcs"][:2] for p in (passes[0], *ends[:2])]
        if len(ends) > 1 and len(begin[0]) > 1 and begin[0] == begin[1] != begin[2]:
            run.found(
                f"after the resume the data begin anew ({passes[0]['at']}): the first "
                "batches are those of the first epoch",
                "set_epoch by the number of the epoch over all attempts",
                "recipes/resume_mid_epoch.py",
            )
        elif last is not None and next_ not in (last + 1, None) and ends[-1].get("shuffle"):
            run.found(
                f"epoch {last} was finished and saved, and the resumed run begins with epoch "
                f"{next_}",
                "one is trained twice, or left out",
                "pitfalls/off_by_one_epoch.py",
            )


# ---- Calls and settings ----


def settings(run):
    """Debugging that was left on, threads that fight for the cores, double precision."""
    one, notes = run.first, [n for rank in run.ranks.values() for n in rank.optimizers.values()]
    debug = [*one.debug, *["torch.autograd.set_detect_anomaly"] * any(n["anomaly"] for n in notes)]
    if debug:
        run.found(
            f"debugging is on: {', '.join(debug)}",
            "it slows each step down; switch it off for a long job",
        )
    if any(n["double"] for n in notes) and one.count > 7:
        run.asked(
            "the weights are in double precision (float64)",
            "twice the memory and the exchange; is it meant so?",
        )
    threads = max((n["threads"] for n in notes if n["device"] == "cpu"), default=0)
    if threads * one.local > 2 * one.cores and threads > 1 and one.count > 7:
        run.found(
            f"{one.local} ranks with {threads} threads each share {one.cores} cores: they "
            "wait for each other",
            f"torch.set_num_threads({max(1, one.cores // max(1, one.local))})",
            "benchmarks/README.md",
        )
    lost = collections.defaultdict(set)
    for e in run.any("call"):
        if "lost" in e:
            lost[e["at"], e["r"]].add(e["lost"])
        if e.get("one"):
            run.found(
                f"all_gather at {e['at']} is given one tensor under {run.world} names: all "
                "slots hold the last rank's",
                "make them by a comprehension, not by [t] * n",
            )
    for (at, _), values in lost.items():
        if len(values) > 2 and notes:  # no warm-up, no barrier, no trial of the network
            run.asked(
                f"nothing holds the tensor that all_reduce at {at} is given: its sums are lost",
                "they come in the tensor itself, and it returns None: give it a name",
            )


RULES = [
    no_group,
    alone,
    calls,
    wrappers,
    buffers,
    numbers,
    apart,
    told_wrong,
    splits,
    same_batches,
    whole_set,
    order_again,
    overlap,
    batches_again,
    shares,
    empty,
    modes,
    draws,
    evaluations,
    gradients,
    clipping,
    summed,
    schedules,
    made_anew,
    files,
    resumes,
    settings,
]


# ---- Where the time goes ----


def parts(run):
    """{rank: {step: {part: seconds}}}, of steps that all ranks have noted and, if there are enough,
    that were not looked into. Waiting is what a rank stays longer in the calls that all are in than
    the one that comes last: that one's time there is the exchange's."""
    raw, own = {}, {}
    for r, rank in run.ranks.items():
        rows = {e["i"]: e for e in rank.kinds["spans"]}
        own[r] = rows
        raw[r] = {}
        for i, e in rows.items():
            if e["spans"] and i > 2:
                start = (
                    rows[i - 1]["end"] + rows[i - 1]["own"] if i - 1 in rows else e["spans"][0][1]
                )
                each = dict.fromkeys("lfbwcos", 0.0)
                for kind, a, b in e["spans"]:
                    each[kind] += max(0, b - max(a, start))
                raw[r][i] = each | {"all": e["end"] - start}
    common = set.intersection(*({*row} for row in raw.values())) if raw else set()
    calm = {i for i in common if i >= 30 and i % 10}
    common = sorted(calm if len(calm) > 19 else common)
    out = {r: {} for r in raw}
    for i in common:
        least = {k: min(raw[r][i][k] for r in raw) for k in "wc"}
        for r in raw:
            each = raw[r][i]
            waits = each["w"] + each["c"] - sum(least.values())
            out[r][i] = {k: each[k] for k in "lfbos"} | {
                "wait": waits,
                "x": sum(least.values()),
                "all": each["all"],
            }
            out[r][i]["rest"] = max(
                0.0, each["all"] - sum(v for k, v in out[r][i].items() if k != "all")
            )
    return out


def align(run):
    """Number the steps of all ranks alike, by the clock: one may take some alone (a warm-up) before
    the others do."""
    ends = {r: {e["i"]: e["end"] for e in rows} for r, rows in run["spans"].items() if rows}
    few = min(ends, key=lambda r: max(ends[r]), default=None)
    for r, mine in ends.items():

        def away(shift, mine=mine):
            return statistics.median(
                [abs(mine[i + shift] - end) for i, end in ends[few].items() if i + shift in mine]
                or [math.inf]
            )

        more = max(mine) - max(ends[few])
        shift = min(0, more - 1, more, more + 1, key=away)
        for e in run.ranks[r].kinds["spans"] if away(shift) < away(0) / 2 else ():
            e["i"] -= shift


def times(run):
    """Yield the lines of the time, 100 columns at most; say where it is lost."""
    align(run)
    table = parts(run)
    count = len(next(iter(table.values()), {}))
    if count < 10:
        yield f"too few steps to tell the time ({count} that all ranks have noted)"
        return
    median = {
        r: {k: statistics.median(row[k] for row in rows.values()) for k in (*PARTS, "all")}
        for r, rows in table.items()
    }
    yield "milliseconds of a step, medians; range: of nine steps in ten"
    yield "rank    step           range" + "".join(f"  {name}" for name in PARTS.values())
    for r, rows in sorted(table.items()):
        totals = sorted(1e3 * row["all"] for row in rows.values())
        few = len(totals) // 20
        spread = f"{totals[few]:.1f} to {totals[-1 - few]:.1f}"
        yield f"{r:4} {statistics.median(totals):7.1f} {spread:>15}" + "".join(
            f"{1e3 * median[r][k]:{2 + len(name)}.1f}" for k, name in PARTS.items()
        )
    if (load := os.getloadavg()[0]) > 3 * run.first.cores:
        yield (
            f"the machine is busy (load {load:.0f} on {run.first.cores} cores): on an idle one, "
            "the parts may be others"
        )
    for r, rows in table.items():
        whole = sum(row["all"] for row in rows.values())
        for k, least, what, cost, read in (
            (
                "l",
                0.5,
                "waits for its loader",
                ("more workers, or less work for each item"),
                "benchmarks/README.md#throughput",
            ),
            (
                "s",
                0.2,
                "saves",
                "save more rarely, or from a thread's copy",
                "recipes/checkpoint_any_world_size.py",
            ),
        ):
            share = sum(row[k] for row in rows.values()) / whole
            if share > least:
                run.say(
                    "found", f"rank {r} {what} for {share:.0%} of the time of its steps", cost, read
                )
        typical = statistics.median(row["wait"] / row["all"] for row in rows.values())
        last = collections.Counter(
            min(table, key=lambda q, i=i: table[q][i]["wait"])
            for i, row in rows.items()
            if row["wait"] > 0.1 * row["all"]
        )
        other, times_last = (last.most_common(1) or [(r, 0)])[0]
        if other != r and typical > 0.3 and len(rows) > 19 and times_last > 0.8 * len(rows):
            more = {k: median[other][k] - median[r][k] for k in ("l", "f", "b", "o", "s", "rest")}
            k = max(more, key=more.get)
            run.say(
                "found",
                f"rank {r} waits for rank {other} in {typical:.0%} of the time of a step",
                f"rank {other} takes {1e3 * more[k]:.1f} ms longer in "
                + (PARTS[k] if k != "rest" else "its own code, between the other parts"),
                "pitfalls/slow_rank.py",
            )
    one = median[min(median)]
    for k, least, what, cost in (
        (
            "x",
            5e-4,
            "the exchange takes",
            ("a larger batch on each rank, or accumulation, makes fewer of them"),
        ),
        (
            "rest",
            5e-3,
            ("the script's own code between the other parts takes"),
            "preparing batches, printing, metrics?",
        ),
    ):
        if one[k] > max(0.6 * one["all"], least) and one["f"]:
            run.say(
                "asked",
                f"{what} {one[k] / one['all']:.0%} of a step of {1e3 * one['all']:.1f} ms",
                cost,
                "benchmarks/README.md",
            )


def picture(run):
    """An SVG: some steps around the median, a row for each rank, one clock."""
    rows = {r: {e["i"]: e for e in rank.kinds["spans"]} for r, rank in run.ranks.items()}
    common = sorted(set.intersection(*({*row} for row in rows.values())))
    steps = [i for i in common if i > 2 and {i - 1, i + 3} <= {*common}] or common[1:]
    first = next(iter(rows.values()))

    middle = sorted(steps, key=lambda i: first[i]["end"] - first.get(i - 1, first[i])["end"])[
        len(steps) // 2
    ]
    shown = [i for i in range(middle, middle + 4) if i in common]
    start = min(row[middle - 1]["end"] for row in rows.values() if middle - 1 in row)
    end = max(row[shown[-1]]["end"] for row in rows.values())
    scale, high = 860 / (end - start), 34 * len(rows)
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {high + 110}" '
            f'font-size="13" font-family="sans-serif"><rect width="960" height="{high + 110}" '
            'fill="white"/>'
        )
    ]
    for y, (r, row) in enumerate(sorted(rows.items())):
        out.append(
            f'<text x="8" y="{34 * y + 40}">rank {r}</text><rect x="80" y="{34 * y + 22}" '
            'width="860" height="26" fill="#eeeeee"/>'
        )
        for i in [*shown, shown[-1] + 1]:
            for kind, a, b in row[i]["spans"] if i in row else ():
                a, b = max(a, start), min(b, end)
                if b > a:
                    out.append(
                        f'<rect x="{80 + scale * (a - start):.1f}" y="{34 * y + 22}" '
                        f'width="{max(0.4, scale * (b - a)):.1f}" height="26" '
                        f'fill="{COLOURS[kind]}">'
                        f"<title>{NAMES[kind]}: {1e3 * (b - a):.2f} "
                        "ms</title></rect>"
                    )
            if i in shown and i in row:
                x = 80 + scale * (row[i]["end"] - start)
                out.append(f'<path d="M{x:.1f} {34 * y + 18}v34" stroke="black"/>')
    tick = 10 ** len(str(int(1e3 * (end - start) / 2))) / 1e4
    tick = next(t for t in (tick, 2 * tick, 5 * tick, 10 * tick) if (end - start) / t < 12)
    for n in range(int((end - start) / tick) + 1):
        x = 80 + scale * n * tick
        out.append(
            f'<path d="M{x:.1f} {high + 24}v6" stroke="black"/><text x="{x:.1f}" '
            f'y="{high + 44}" text-anchor="middle">{1e3 * n * tick:g}</text>'
        )
    out.append(f'<text x="8" y="{high + 44}">ms</text>')
    x = 80
    for kind, name in NAMES.items():
        out.append(
            f'<rect x="{x}" y="{high + 64}" width="12" height="12" '
            f'fill="{COLOURS[kind]}"/><text x="{x + 17}" y="{high + 75}">{name}</text>'
        )
        x += 34 + 7 * len(name)
    out.append(
        f'<text x="80" y="{high + 98}">steps {shown[0] + 1} to {shown[-1] + 1}; a black '
        "line ends"
        " a step; grey: none of these</text></svg>"
    )
    return "\n".join(out)


# ---- The command ----


def read(folder):
    """Return (runs, oldest first; processes that trained without a group; failures)."""
    pieces, failures = [], []
    for name in sorted(os.listdir(folder)):
        path = f"{folder}/{name}"
        if name.endswith(".failed"):
            failures.append(pathlib.Path(path).read_text().strip().splitlines()[-1])
        if name.endswith(".jsonl"):
            events, now = [], path[:-5] + "now"
            for line in pathlib.Path(path).read_text().splitlines(True):
                if line.endswith("}\n"):
                    event = json.loads(line)
                    if event["k"] == "joined" and any(e["k"] == "joined" for e in events):
                        pieces.append(Rank(events))
                        events = []
                    events.append(event)
            stands = pathlib.Path(now).read_text(errors="replace").split("|")
            if events:
                pieces.append(Rank(events))
                pieces[-1].stands = (
                    f"in {stands[1]} at {stands[2].strip()}"
                    if (len(stands) > 2 and stands[1].strip())
                    else ""
                )
    groups = []
    for piece in sorted((p for p in pieces if p.rank is not None), key=lambda p: p.begin):
        piece.stands = getattr(piece, "stands", "")
        group = next(
            (
                g
                for g in groups
                if piece.rank not in {p.rank for p in g}
                and (piece.world, piece.attempt) == (g[0].world, g[0].attempt)
                and len(g) < piece.world
                and piece.begin - g[0].begin < 60
            ),
            None,
        )
        groups.append([piece]) if group is None else group.append(piece)
    runs = []
    for group in groups:
        runs.append(Run(group, runs[-1] if runs else None))
    return runs, [p for p in pieces if p.rank is None], failures


def judge(runs, alone=(), cut=False, stalled=False, rules=RULES):
    """Apply the rules. Return what is said: [(level, what, cost, read), ...]."""
    said = [*no_group(alone)] if not runs and no_group in rules else []
    for run in runs:
        last = run is runs[-1]
        run.cut = cut if last else not all(rank.left for rank in run.ranks.values())
        run.stalled = stalled and last
        for rule in rules if len(run.ranks) > 1 else ():
            if rule is not no_group:
                rule(run)
        said += [s for s in run.said if s not in said]
    return said


def seen(runs, alone):
    """What was looked at, and what was not seen, in a line each."""
    ranks = [rank for run in runs for rank in run.ranks.values()] + [*alone]
    steps, looked, passes, saves = (
        max(map(count, ranks), default=0)
        for count in (
            lambda r: r.count,
            lambda r: max(map(len, r.steps.values()), default=0),
            lambda r: len(r.passes),
            lambda r: len(r.kinds["save"]),
        )
    )
    yield (
        f"looked at: ranks {max((len(r.ranks) for r in runs), default=0)}, starts {len(runs)}; "
        f"of a rank: steps {steps} ({looked} bit by bit), passes over loaders {passes}, saves "
        f"{saves}"
    )
    has = set().union(*(run.has for run in runs)) if runs else set()
    unseen = [
        text
        for key, text in (
            ("shards", ("the weights of DTensors or FSDP (their ranks hold parts)")),
            ("to_one", "what ranks send to each other one by one (a pipeline)"),
            ("groups", "which groups should hold the same weights, where DDP does not say so"),
            ("join", "weights and unequal shares, as Join is used"),
        )
        if key in has
    ]
    if not any(rank.passes for rank in ranks):
        unseen.append("the data: no DataLoader was used (only what goes into DDP is compared)")
    elif not any(p.get("over") and p["backs"] for rank in ranks for p in rank.passes.values()):
        unseen.append("whole epochs: none was finished")
    if not any(rank.kinds["buffers"] for rank in ranks):
        unseen.append("buffers (those of DDP's models are compared in step 9)")
    if len(runs) < 2:
        unseen.append("a restart")
    if any(n["device"] != "cpu" for rank in ranks for n in rank.optimizers.values()):
        unseen.append("weights on GPUs after the first 20 steps")
    yield "not seen: " + "; ".join([*unseen, "whether loss, rates and masks are as you mean"])


def cpu(command):
    """Seconds of CPU time that the command's living processes have used."""
    total = 0
    for pid in command.processes():
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def watch(args, records):
    """Run the command. Return (its status or None, why it was ended, its error)."""
    site = f"{records}/site-packages"  # so error() takes the recorder for a package
    os.mkdir(site)
    here = os.path.dirname(os.path.abspath(__file__))
    os.symlink(f"{here}/check_training_recorder.py", f"{site}/sitecustomize.py")
    path = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        command = foreign_command.start(
            args.command,
            stdin=None,
            prefix="check",
            env={**os.environ, "CHECK_TRAINING": records, "PYTHONPATH": path},
        )
    except OSError as error:
        stop(f"cannot start the command: {error}")
    begun = moved = time.monotonic()
    state, why, used, joined = None, "", None, False

    def echo(data):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()

    while command.poll() is None:
        lines = command.read(0.2, echo=echo)
        new = {
            name: os.path.getsize(f"{records}/{name}")
            if name.endswith("jsonl")
            else pathlib.Path(f"{records}/{name}").read_bytes()
            for name in os.listdir(records)
            if name != "site-packages"
        }
        if not joined and any(name.endswith("jsonl") for name in new):
            joined, begun = True, time.monotonic()  # its start is not counted
        still = time.monotonic() - moved
        if lines or new != state or not new:
            state, moved, used = new, time.monotonic(), None
        elif used is None and still > 1:
            used = cpu(command)
        if time.monotonic() - begun > args.seconds:
            why = "seconds"
        elif used is not None and still > args.stall:
            calls = [
                (text.split(b"|") + [b""])[1].strip()
                for name, text in new.items()
                if name.endswith(".now") and os.path.exists(f"/proc/{name.split('-')[0]}")
            ]
            waits = [call not in (b"", b"the loader", b"forward", b"a file") for call in calls]
            if any(waits) and (all(waits) or cpu(command) - used < 0.1 * args.stall):
                why = "stall"
        if why:
            break
    status = command.poll()
    if why == "seconds":  # a script that saves on SIGTERM may do so
        command.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 15
        while command.poll() is None and time.monotonic() < until:
            command.read(0.2, echo=echo)
    command.read(0.2, echo=echo)
    error = command.error()
    command.end()
    return status, why, error


def stop(message, status=2):
    print(f"check_training.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def main():
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- torchrun [options] SCRIPT ...",
        description=__doc__.partition("\n")[0],
    )
    parser.error = stop
    parser.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="end the command so long after the ranks have met; default 60",
    )
    parser.add_argument(
        "--stall",
        type=float,
        default=30,
        help="or when it stands still for so many seconds; default 30",
    )
    parser.add_argument("--picture", help="write some steps to this SVG")
    parser.add_argument("--json", help="write all that is said to this file")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.command = sys.argv[at + 1 :]
    if not args.command:
        stop(
            "the command is missing. For example: python tools/check_training.py -- torchrun "
            "--standalone --nproc-per-node=2 train.py"
        )
    if min(args.seconds, args.stall) <= 0:
        stop("--seconds and --stall must be more than 0")
    for path in filter(None, (args.picture, args.json)):
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            stop(f"cannot write {path}: there is no such folder")
    records = tempfile.mkdtemp(prefix="check_training_")
    with foreign_command.cleaning_up(records):
        status, why, error = watch(args, records)
        sys.exit(report(args, records, status, why, error))


def report(args, records, status, why, error):
    """Print what was found; return the exit status."""
    runs, alone, failures = read(records)
    said = judge(runs, alone, cut=bool(why) or status != 0, stalled=why == "stall")
    last = max(
        (run for run in runs if len(run.ranks) > 1),
        default=None,
        key=lambda run: (run.first.count, run.first.begin),
    )
    lines = [*times(last)] if last else []
    said += [s for s in (last.said if last else ()) if s not in said]
    if why == "stall":
        ranks = sorted(runs[-1].ranks.items()) if runs else [*enumerate(alone)]
        cause = bool(runs) and "calls" in runs[-1].causes  # that stands before it
        said.insert(
            len(said) * cause,
            (
                "found",
                f"it stands still for {args.stall:g} s: "
                + "; ".join(
                    f"rank {r} {rank.stands or 'in no call of torch'}" for r, rank in ranks[:8]
                ),
                "",
                "pitfalls/README.md#it-hangs-or-a-timeout-ends-it",
            ),
        )
    elif status and not why:
        said.insert(0, ("found", f"the script fails, with status {status}", error, ""))
    trained = any(rank.steps for rank in (*alone, *(r for run in runs for r in run.ranks.values())))
    if not runs and not alone:
        lines.append(
            f"no process came to training within {args.seconds:g} s: --seconds gives it more"
            if why == "seconds"
            else "no process came to training"
            if status
            else "no "
            "process of the command was seen to train: python -I and -E, and a PYTHONPATH that the "
            "script sets anew, keep the recorder out"
        )
    elif not trained:
        lines.append(
            "no optimizer of torch took a step, so there was nothing to judge. Does "
            "it find a finished checkpoint? Then start it in a new folder"
        )
    elif not said:
        lines.append("nothing found" if last else "one rank alone: there was nothing to compare")
    lines += [
        f"the recorder failed in a process, which ran on without it: {f}" for f in {*failures}
    ]
    if why == "seconds":
        lines.append(f"ended after {args.seconds:g} s (--seconds): what comes later was not seen")
    lines += seen(runs, alone)
    if args.picture and last and last.first.count > 4:
        pathlib.Path(args.picture).write_text(picture(last))
        lines.append(f"the picture: {args.picture}")
    print(f"\n{'-' * 20} check_training {'-' * 20}")
    said.sort(key=lambda each: each[0] != "found")
    if os.path.isdir(HOUSE / "pitfalls") and HOUSE != pathlib.Path.cwd():
        said = [(*each, page and f"{HOUSE}/{page}") for *each, page in said]
    for level, what, cost, page in said:
        word = "found: " if level == "found" else "question: "
        for i, text in enumerate(filter(None, (what, cost, page and f"read {page}"))):
            wrapped(text, word if i == 0 else " " * len(word), " " * len(word))
    for line in lines:
        wrapped(line, "", "    ")
    result = int(any(s[0] == "found" for s in said) or not (runs or alone))
    if args.json:
        pathlib.Path(args.json).write_text(
            json.dumps(
                {
                    "status": result,
                    "script_status": status,
                    "ended": why,
                    "lines": lines,
                    "said": [
                        dict(zip(("level", "what", "cost", "read"), s, strict=True)) for s in said
                    ],
                },
                indent=1,
            )
            + "\n"
        )
    return result


def wrapped(text, first, then):
    """Print a line, 100 columns wide at most where it has spaces. A table's rows stay."""
    print(
        text
        if not first and len(text) <= 100
        else textwrap.fill(
            text,
            100,
            initial_indent=first,
            subsequent_indent=then,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
