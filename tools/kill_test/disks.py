"""Do the disks of the machines have the same snapshots?"""

import os

from .distance import compare, content_or_fault, files_with_tensors, flattened


def disks_differ(reference, run):
    """Return in words that machines which ended together have different snapshots, or "".

    (If those of the undisturbed run were alike, and one was written since ranks were last started:
    a machine that was away keeps its old one until the script saves again.)
    """
    found = []
    for each in (reference.run, run):
        first, *others = each.at_the_end or each.machines[:1]
        found.append({})
        for name in files_with_tensors(first.work, []):
            content = content_or_fault(first.work, name)
            for other in others:
                if isinstance(content, str) or first.work == other.work:
                    continue
                if not (is_new(each, first, name) or is_new(each, other, name)):
                    continue
                fault = content_or_fault(other.work, name)
                if not isinstance(fault, str):
                    far, unlike = compare(flattened(fault, name), flattened(content, name))
                    fault = "is another" if far or unlike else ""
                if fault and fault != "is missing":  # about_disks() says that
                    text = (
                        f"the {name} of {other.name} {fault}, compared to that of {first.name}:"
                        " which of them counts? Is the other one good enough, too?"
                    )
                    found[-1].setdefault(name, text)
    undisturbed, of_round = found
    return next((text for name, text in of_round.items() if name not in undisturbed), "")


def is_new(run, machine, name):
    """Return whether a file of a Machine was written since ranks were last started."""
    try:
        written = os.stat(f"{machine.work}/{name}").st_mtime - run.clock
    except FileNotFoundError:
        return False
    return written > max((world.seconds for world in run.worlds), default=0.0)


def about_disks(run):
    """Yield which machine has no file that another has: what starts there finds nothing."""
    disks = {machine.name: names_on(machine) for machine in run.at_the_end}
    if len({machine.work for machine in run.at_the_end}) < 2:
        return
    missing = {}  # {names of machines: the files that are on no disk of theirs, but on another's}
    for file in sorted(set().union(*disks.values())):
        without = tuple(name for name, files in disks.items() if file not in files)
        missing.setdefault(without, []).append(file)
    for machines, files in missing.items():
        if machines:
            yield (
                f"{' and '.join(machines)} has no {in_short(files)}, as another machine has:"
                " does a rank there get the content from another one when it starts?"
            )


def in_short(files):
    """Return "a.pt and no b.pt" for names of files, of three at most."""
    more = f", nor {len(files) - 3} others" if len(files) > 3 else ""
    return " and no ".join(files[:3]) + more


def names_on(machine):
    """Return the names of the files in the working directory of a Machine."""
    return set(files_with_tensors(machine.work, []))
