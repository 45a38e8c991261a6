"""Files that ranks save and load."""

import collections
import itertools
import os
import re
from dataclasses import dataclass

from ..findings import Found, Question, rule
from ..records.files import Load, Move, Save
from ..records.model import LoadedIntoModel
from ..words import in_words, on_each
from .pages import AGREE

COPY = "keep a copy: copy.deepcopy(model.state_dict())"
KEYS = "pitfalls/keys_with_module.py"


# File systems whose files are those of all machines that mount the same source, "server:/home".
SHARED = {"nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "gpfs", "beegfs"}
OF_ONE_MACHINE = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "tmpfs",
    "ramfs",
    "overlay",
}


@dataclass(slots=True)
class SavedFile:
    """One file, and who has saved it."""

    machines: set[str]  # keys of those on which it was saved
    path: str  # as the first of them calls it
    identity: tuple | None  # as of identity_of(), of the first save
    saves: dict[int, list[Save]]  # {rank: its saves}

    @property
    def name(self):
        """Its name without the folders."""
        return os.path.basename(self.path)


def saved_files(run):
    """Return the SavedFile of all files that ranks have saved.

    On one machine, a path is a file. The same path on another one may be another file.
    """
    found = {}
    for number, rank in run.ranks.items():
        for save in rank.records(Save):
            if not save.path or save.path.startswith("/dev/"):
                continue
            key = rank.machine.key, save.path
            if key not in found:
                found[key] = SavedFile({key[0]}, save.path, identity_of(rank, save), {})
            found[key].saves.setdefault(number, []).append(save)
    return with_those_of_other_machines([*found.values()])


def with_those_of_other_machines(files):
    """Return the SavedFile objects, of which those of one file on several machines are one."""
    whole = []
    for file in files:
        same = [
            each
            for each in whole
            if file.identity is not None
            and each.identity == file.identity
            and not each.machines & file.machines
        ]
        if same:
            same[0].machines |= file.machines
            same[0].saves |= file.saves
        else:
            whole.append(file)
    return whole


def identity_of(rank, record):
    """Return what is equal for one file on all machines, and for no other; None: it is not known.

    record: a Save or a Load of a rank, with a path. Machines with one clock are parts of one
    computer: they know its disks by the same numbers.
    """
    folder, name = record.folder, os.path.basename(record.path)
    if folder is None:
        return None
    if folder.file_system in SHARED:
        return folder.source, folder.inner, name
    return rank.machine.clock, folder.device, folder.inode, name


def nothing_keeps_apart(one, other):
    """Return whether two ranks may do these at once. one, other: Save or Load, of two ranks."""
    return one.phase_begun <= other.phase and other.phase_begun <= one.phase


@rule("save")
def several_save_one_file(run):
    """Several ranks write one file.

    Looks alike, and is right: files by rank, ranks that take turns, other machines' disks, and a
    rank that adds to what it has read of the other's save, as with a lock.
    """
    for file in saved_files(run):
        first = next(iter(file.saves.values()))[0]
        at_once = any(
            nothing_keeps_apart(save, other_save) and not adds_to_the_other(run, save, other_save)
            for mine, others in itertools.combinations(file.saves.values(), 2)
            for save, other_save in itertools.product(mine, others)
        )
        if at_once:
            yield Found(
                f"{in_words(file.saves, run)} save to one file, {file.name} ({first.line})",
                "they write over each other: rank 0 alone saves, or each to a name of its own",
                "pitfalls/every_rank_saves.py",
                once=f"save {first.line}",
            )


def adds_to_the_other(run, one, other):
    """Return whether the later of two saves of a path came after a load of the earlier one."""
    earlier, later = sorted([one, other], key=lambda save: save.begin)
    return any(
        load.path == later.path and earlier.time <= load.begin and load.time <= later.begin
        for rank in run.ranks.values()
        if later in rank.records(Save)
        for load in rank.records(Load)
    )


@rule(unless={"save"})
def machines_may_save_one_file(run):
    """A rank of each machine saves to one path, and it cannot be told whether it is one file.

    Looks alike, and is right: a disk of each machine's own, which is known by its file system.
    """
    by_path = collections.defaultdict(list)
    for file in saved_files(run):
        by_path[file.path].append(file)
    for path, files in by_path.items():
        firsts = {min(file.saves): next(iter(file.saves.values()))[0] for file in files}
        pairs = itertools.combinations(firsts.values(), 2)
        at_once = any(nothing_keeps_apart(one, other) for one, other in pairs)
        if not at_once or any(is_on_own_disk(save) for save in firsts.values()):
            continue
        yield Question(
            f"{in_words(firsts)}, each on a machine of its own, save to {path}"
            f" ({firsts[min(firsts)].line}): is that one file, on a disk that they share?",
            "then they write over each other: let rank 0 alone save, or each to a name of its own",
            "pitfalls/every_rank_saves.py",
            once=f"shared {firsts[min(firsts)].line}",
        )


def is_on_own_disk(save):
    """Return whether a file is known to be on a disk that other machines do not have."""
    folder = save.folder
    return folder is not None and folder.file_system in OF_ONE_MACHINE


@rule()
def saved_by_own_decision(run):
    """All ranks save at a line, and at times some of them alone: each decides by its own figure.

    Looks alike, and is right: ranks that take turns; a helper by which all save one file, and
    rank 0 another; one rank that saves now and then, and all that save at the end.
    """
    if run.cut:
        return
    for line, saves in saves_of_several(run).items():
        partners = [
            sum(
                any(nothing_keeps_apart(save, other) for other in others)
                for others in saves.values()
            )
            for mine in saves.values()
            for save in mine
        ]
        once = sum(len(mine) == 1 for mine in saves.values())
        one_decides = once >= len(saves) - 1
        if max(partners) == len(saves) and min(partners) < len(saves) and not one_decides:
            counts = {rank: len(mine) for rank, mine in sorted(saves.items())}
            yield Question(
                f"each rank decides for itself whether it saves ({line}): {on_each(counts)}, and"
                " not at the same steps",
                "by a figure of its own share? all_reduce it before, or let rank 0 decide for all,"
                " unless each saves a model of its own",
                AGREE,
                once=f"decides {line}",
            )


def saves_of_several(run):
    """Return {line: {rank: its saves there}} of the files that several ranks save alike.

    Their names may differ by numbers: of the rank, of the step.
    """
    found = collections.defaultdict(dict)
    for number, rank in run.ranks.items():
        for save in rank.records(Save):
            if save.path:
                name = re.sub(r"\d+", "", os.path.basename(save.path))
                found[save.line, name].setdefault(number, []).append(save)
    return {line: saves for (line, _), saves in found.items() if len(saves) > 1}


@rule(unless={"save"})
def loaded_while_it_is_saved(run):
    """A rank reads what another is writing, and nothing lets it wait.

    Looks alike, and is right: an order by a store, or by the clock. So it is only asked where the
    two did not happen at the same time.
    """
    for file in saved_files(run):
        moves = [move for rank in file.saves for move in run.ranks[rank].records(Move)]
        paths = {file.path} | {move.path for move in moves if move.source == file.path}
        for reader, loads in run.records_by_rank(Load).items():
            rank = run.ranks[reader]
            is_there = rank.machine.key in file.machines
            for load in loads:
                if load.path in paths if is_there else is_the_file(rank, load, file):
                    yield from races(file, reader, load)


def is_the_file(rank, load, file):
    """Return whether a rank on another machine loads a SavedFile."""
    return bool(load.path) and identity_of(rank, load) == file.identity is not None


def races(file, reader, load):
    """Yield a finding for each save of another rank that a rank's load may meet."""
    for writer, saves in file.saves.items():
        for save in saves:
            if writer == reader or not nothing_keeps_apart(load, save):
                continue
            at_once = load.begin < save.time and save.begin < load.time
            name = os.path.basename(load.path) if load.path else file.name
            kind, doubt = Found if at_once else Question, ""
            if name != file.name:  # the file gets this name when all is there
                kind, doubt = Question, ", unless an older one will do"
            yield kind(
                f"rank {reader} loads {name} ({load.line}) while rank {writer} saves it"
                f" ({save.line}), and nothing lets it wait",
                f"dist.barrier() between them{doubt}",
                "pitfalls/README.md#it-was-killed-and-something-is-lost",
                once=f"race {reader} {file.path}",
            )


@rule()
def saves_the_wrapper(run):
    """The state of the DDP object is saved, whose names a model without DDP does not have.

    It is a question: the same script loads it into a DDP object.
    """
    for save in run.records(Save):
        if save.names_of_wrapper:
            yield Question(
                f'{save.line} saves the state of the DDP object: its names begin with "module."',
                "a model without DDP has other names: save model.module.state_dict(), and load that"
                " into model.module",
                KEYS,
            )


@rule()
def saves_what_has_changed(run):
    """A state_dict() is saved that was taken before, and shares its memory with the model.

    It is a question where that is saved again and again: the present weights may be meant.
    """
    for rank in run.ranks.values():
        ages = collections.defaultdict(list)
        for save in rank.records(Save):
            if save.age:
                ages[save.line].append(save.age)
        for line, mine in ages.items():
            kind, doubt = Found, ""
            if len(mine) > 1 and mine == sorted({*mine}):  # the dict was made once
                kind, doubt = Question, ", unless the present weights are meant"
            yield kind(
                f"{line} saves a state_dict() that was taken {mine[0]} steps before, and has"
                " changed with the model since",
                f"{COPY}{doubt}",
                once=f"old {line}",
            )


@rule()
def loads_what_has_changed(run):
    """A state_dict() is loaded that was taken before, and shares its memory with the model."""
    for load in run.records(LoadedIntoModel):
        if load.age:
            yield Found(
                f"{load.line} loads a state_dict() of {load.age} steps before, which has changed"
                " with the model since: nothing happens",
                COPY,
            )


@rule()
def loads_other_names(run):
    """What is loaded has other names than the model, which stays as it was (strict=False).

    Looks alike, and is right: a part of a model, which takes its own entries out of a whole file.
    """
    for load in run.records(LoadedIntoModel):
        if load.missing is not None and load.missing <= 9 * load.fitting:
            continue
        if load.entries > 3 and load.fitting < load.entries / 10:
            yield Found(
                f"{load.line} loads {load.entries} entries, of which {load.fitting} fit the model:"
                " it stays as it was",
                f"their names differ by {load.prefix!r}" if load.prefix else "",
                KEYS,
            )


def paths_to_go_on_from(run):
    """Return the paths of the files that a rank loads before it takes more steps, sorted."""
    paths = {
        load.path
        for rank in run.ranks.values()
        for load in rank.records(Load)
        if load.path and load.steps < rank.steps_taken
    }
    return sorted(paths)


@rule()
def saved_in_place(run):
    """The file from which the job goes on is written over in place: a kill meanwhile leaves none.

    Looks alike, and is right: a file that is moved to its name afterwards, and one that is loaded
    when the last step is done, to evaluate it. It is a question where there are others beside it,
    one for each save (numbered files, two in turn), and where it is loaded between steps alone, as
    the best state is when the loss no longer falls.
    """
    loaded = paths_to_go_on_from(run)
    at_the_start = {load.path for load in run.records(Load) if load.steps == 0}
    for rank in run.ranks.values():
        saves = collections.Counter(save.path for save in rank.records(Save) if save.has_optimizer)
        moved = {move.source for move in rank.records(Move)}
        for path in loaded:
            is_read_between = path not in at_the_start
            if is_read_between and len(saves) > 1:  # the job may go on from another one
                continue
            if saves[path] > 1 and path not in moved:
                has_others = saves.total() - saves[path] >= saves[path] - 1
                kind, doubt = Found, ""
                if has_others or is_read_between:
                    kind, doubt = Question, ", unless it then takes one beside it"
                yield kind(
                    f"{os.path.basename(path)}, from which the job goes on, is written over in"
                    f" place {saves[path]} times",
                    f"a kill meanwhile leaves none: write beside it, then os.replace{doubt}",
                    "pitfalls/snapshot_in_place.py",
                )
