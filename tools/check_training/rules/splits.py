"""Do the ranks split a set alike, and list its entries in one order?"""

import collections

from ..findings import Found, Question, rule
from ..records.data import SubsetMade
from ..words import differ
from .apart import places_that_differ
from .pages import SILENT


@rule("split")
def subsets_differ(run):
    """Ranks that split one set split it unlike: what one trains on, another may test on.

    Looks alike, and is right: shards by rank (nothing in common), sets of their own, models of
    their own (cross-validation), and a part that each rank draws, of which nobody has the rest.
    """
    if not train_one_model(run):
        return
    for subsets in subsets_by_key(run):
        one = subsets[0]
        if differ((each.of_length, each.contents, each.listed) for each in subsets):
            continue
        if not differ(each.order for each in subsets):
            continue
        sketches = [set(each.sketch) for each in subsets]
        common, least = len(set.intersection(*sketches)), min(map(len, sketches))
        same_items = not differ(each.length for each in subsets) and not differ(
            sorted(sketch) for sketch in sketches
        )
        if least and same_items:
            if not shares_out(run):
                continue
            yield Found(
                f"the items of Subset ({one.line}) stand in another order on each rank",
                "shares by place overlap, and leave items out: sort them, or seed it",
                "pitfalls/unseeded_dataset.py",
            )
        elif least and common / least > 0.02 and has_the_rest(run.first, one):
            kind, doubt = Found, ""
            if not goes_through_the_rest(run.first, one):
                kind, doubt = Question, "if the rest is tested on, "
            yield kind(
                f"each rank splits the set in its own way ({one.line}): {common / least:.0%} of"
                " the items are in all ranks' parts",
                f"{doubt}one tests on what another trains on: pass"
                " generator=torch.Generator().manual_seed(0)",
                "pitfalls/unseeded_dataset.py",
                once=f"split {one.line}",
            )


def train_one_model(run):
    """Return whether DDP holds the ranks' weights together, or they may be equal after a step."""
    if run.may_split_the_model or any(len(each.group) > 1 for each in run.wrapped.values()):
        return True
    rows = [
        [*steps.at(number).values()]
        for steps in run.optimizers()
        if len(steps.of) > 1
        for number in steps.common
        if number
    ]
    return not rows or any(not places_that_differ(row, "weights") for row in rows)


def shares_out(run):
    """Return whether a sampler may give each rank a part of a set, by its places."""
    firsts = [each for loader in run.training_loaders() for each in loader.firsts]
    if not firsts:
        return True
    return any(each.start.replicas or each.takes_a_share_of(run.world_size) for each in firsts)


def has_the_rest(rank, one):
    """Return whether a rank has made another Subset of the set, which has no item of this one."""
    return any(
        (each.of_length, each.contents, each.listed) == (one.of_length, one.contents, one.listed)
        and set(each.sketch).isdisjoint(one.sketch)
        for each in rank.records(SubsetMade)
        if each.sketch
    )


def goes_through_the_rest(rank, one):
    """Return whether a rank evaluates on a Subset with as many items as the set has beside one."""
    return any(
        each.evaluates and each.start.chosen and each.start.length == one.of_length - one.length
        for each in rank.passes
    )


def subsets_by_key(run):
    """Return lists of the SubsetMade of the ranks that have made the same Subset."""
    found = collections.defaultdict(dict)
    for rank, subsets in run.records_by_rank(SubsetMade).items():
        for each in subsets:
            found[each.key][rank] = each
    return [[*subsets.values()] for subsets in found.values()]


@rule("split")
def entries_in_another_order(run):
    """A list of the dataset, its files or classes, has the same entries in another order on ranks.

    Looks alike, and is right: other entries on each rank, which are shards. It is a question for a
    stream: each rank may read all of it in an order of its own.
    """
    for loader in run.training_loaders():
        lists = [each.start.listed for each in loader.firsts]
        for name in lists[0]:
            if not all(name in each for each in lists):
                continue
            order = differ(each[name].order for each in lists)
            if order and not differ(each[name].entries for each in lists):
                of_stream = any(each.start.is_stream for each in loader.firsts)
                kind, doubt = Found, ""
                if of_stream or not shares_out(run):
                    kind, doubt = Question, ", unless each rank means to read all in its own order"
                yield kind(
                    f"the dataset's {name!r} has the same entries in another order on each rank"
                    f" ({loader.line})",
                    f"sort it: labels or shares mean different things{doubt}",
                    SILENT,
                )
