"""Is the result of a round on several machines that of the undisturbed run?"""

import math
import pathlib
from dataclasses import replace
from typing import NamedTuple

from .comparing import difference_of_files, difference_of_lines
from .disks import is_new
from .distance import ENDINGS, Distance, distance, files_with_tensors

ROUNDING = 1e-5  # so far apart are results that differ by rounding alone
TIMES = 10  # so much further than a run on fewer machines may a round be
COARSE = 1e-3  # what is further off is not called equal


class Equality(NamedTuple):
    text: str  # what was compared, and how far off it is
    fault: str = ""  # why the result is wrong; "" if it is not
    note: str = ""  # what this comparison does not show


def compare_results(test, run, measure):
    """Return the Equality of a round with the undisturbed run."""
    options, reference = test.options, test.reference
    missed = [event for event in run.kills if event.restarted]
    heard = replace(run, kills=missed)
    printed = difference_of_lines(reference, heard)
    if printed and said_by_fewer(reference, run):
        printed = None
    filed = difference_of_files(options.file, reference.run, run)
    if not printed and not filed:
        what = "bits" if "sha256" in reference.result or options.file else "what was printed"
        return Equality(f"equal ({what})")
    if printed and not printed.judged:
        return Equality("not compared", printed.text)
    different = printed or filed
    world = reference.run.worlds[-1].size
    changed = sorted({each.size for each in run.worlds} - {world, 0})
    if not changed or not trained_by_others(run, world):
        rounded = by_another_order(test, run, world)
        return rounded or Equality("", f"not equal: {different.text}")
    return by_distance(test, run, measure, changed)


def said_by_fewer(reference, run):
    """Return whether the last results are those of the undisturbed run, if said by fewer ranks."""
    expected = {text for texts in reference.finals.values() for each in texts for text in each}
    last = run.results[-1:]
    return bool(last) and bool(expected) and set(last[0].texts) <= expected


def trained_by_others(run, world):
    """Return whether steps were done by another number of ranks than the undisturbed run had."""
    for number, each in enumerate(run.worlds):
        later = [other.seconds for other in run.worlds[number + 1 :]]
        end = min(later, default=math.inf)
        if each.size != world and any(each.seconds < one.seconds <= end for one in run.printed_by):
            return True
    return False


def by_another_order(test, run, world):
    """Return the Equality of a round that only rounding keeps from equal bits; None: more does.

    After a restart, DDP adds gradients up in another order. On three ranks or more, bits differ by
    it, unless the script lets DDP lay out its buckets before. world: ranks.
    """
    is_anew = len([each for each in run.worlds if each.size]) > 1
    has_text = any(pathlib.Path(name).suffix not in ENDINGS for name in test.options.file)
    if world < 3 or not is_anew or has_text:
        return None
    undisturbed = test.reference.run.machines[0].work
    names = files_with_tensors(undisturbed, test.options.file)
    found = distance(run.machines[0].work, undisturbed, names) if names else Distance()
    look_at_other_machines(test, run, found)
    if not found.name or found.others or found.far > ROUNDING:
        return None
    return Equality(
        f"equal up to rounding: on {world} ranks, a start anew may add in another order;"
        f" {found.name} is off by {found.far:.1g} (relative norm)"
    )


def by_distance(test, run, measure, changed):
    """Return the Equality of a round in which another number of ranks has trained."""
    undisturbed = f"{test.reference.run.folder}/work"
    ranks = f"with {' and '.join(map(str, changed))} of {test.reference.run.worlds[-1].size} ranks"
    names = files_with_tensors(undisturbed, test.options.file)
    fewer = (measure() or Distance()) if names else Distance()
    # A file that fewer machines do not leave is that of a machine, perhaps of one that was away.
    names = [name for name in names if name not in fewer.others] or names
    found = distance(run.machines[0].work, undisturbed, names) if names else Distance()
    if not found.name and not found.others:
        return Equality(
            f"not compared: it trained {ranks} for a while, and its checksum says only whether all"
            " bits are equal. Give --file with the snapshot that it leaves"
        )
    look_at_other_machines(test, run, found)
    wrong = [text for key, text in found.others.items() if key not in fewer.others]
    if wrong:
        return Equality("", f"not equal: {wrong[0]}")
    measured = f"{found.name} is off by {found.far:.1g} (relative norm)"
    where = "one machine alone" if test.fewest == 1 else f"{test.fewest} machines"
    scale = f"an undisturbed run on {where} by {fewer.far:.1g}"
    if found.far > max(ROUNDING, TIMES * fewer.far):
        return Equality("", f"not equal: it trained {ranks} for a while, but {measured}, {scale}")
    seen = f"it trained {ranks} for a while; {measured}, {scale}"
    if found.far <= COARSE:
        how = "rounding" if found.far <= ROUNDING else "the number of ranks"
        return Equality(f"equal up to {how}: {seen}")
    return Equality(
        f"not equal, as the result depends on the number of ranks: {seen}",
        note="has each rank a batch of a fixed size, or dropout of its own? Then another number of"
        " ranks trains something else, and what is wrong beside that cannot be seen",
    )


def look_at_other_machines(test, run, found):
    """Put into a Distance a file of another machine than the first, if it is further away.

    It must have been written since ranks were last started: a machine that was away may have an
    old one.
    """
    before = {machine.name: machine for machine in test.reference.run.machines}
    for machine in run.at_the_end:
        there = before.get(machine.name)
        if there is None or machine.work == run.machines[0].work:
            continue
        names = files_with_tensors(there.work, test.options.file)
        names = [name for name in names if is_new(run, machine, name)]
        far = distance(machine.work, there.work, names) if names else Distance()
        if far.name and far.far > found.far:
            found.far, found.name = far.far, f"{far.name} of {machine.name}"
