"""Passes over loaders, and the batches that they give: notes Pass, Progress, AfterPass.

A pass is over when its iterator says that no batch is left. Not every script asks for that: some
count the batches, and stop after as many as the loader promises. Such a pass is over when another
loader is asked for a batch, as its last batch has been used by then.
"""

import itertools
import sys
import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader
from torch.utils.weak import WeakIdKeyDictionary

from ..records.data import AfterPass, Pass, Progress
from . import generators, labels, model, optimizer, schedules
from .counters import counters
from .datasets import (
    chosen_in,
    data_in,
    draws_its_items,
    epoch_in,
    number_of,
    reads_its_epoch,
    sampler_of,
    samplers_of,
    seen_at,
    size_of,
)
from .fingerprints import bits, readable, tensors_in
from .hooks import RAISED, after, around, at_start, safely
from .known_passes import EndedPass, KnownPass
from .notebook import count, note, now, site, stand
from .script_lines import where
from .state import kept
from .times import span

TENSORS = 4  # of a batch that are compared, at most


@dataclass
class Passes:
    """The loaders of this process, and the passes over them."""

    of_iterators: weakref.WeakKeyDictionary = field(  # {a loader's iterator: KnownPass}
        default_factory=weakref.WeakKeyDictionary
    )
    loaders: weakref.WeakKeyDictionary = field(  # {loader: its number}
        default_factory=weakref.WeakKeyDictionary
    )
    datasets: WeakIdKeyDictionary = field(  # {dataset: its number}
        default_factory=WeakIdKeyDictionary
    )
    recent: dict[str, KnownPass] = field(default_factory=dict)  # {Pass.loader: its last one}
    ended: EndedPass | None = None  # None: what came after it is noted


state = kept(Passes())


@at_start
def follow_steps():
    """Count the steps of all optimizers."""
    torch_optimizer.register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer, args, kwargs):
    safely(_count_step)


def _count_step():
    counters.all_steps += 1


class DrawnIndices:
    """The iterator of a loader's sampler, which adds up what is drawn."""

    def __init__(self, inner, known):
        self.inner, self.known = inner, known

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.inner)
        safely(_add_up, self.known, batch)
        return batch


def _add_up(known, batch):
    """Add the indices of a batch, or one index, to what is known of its pass."""
    if known.states:  # what a sampler draws must be alike on all ranks: it does not count
        known.states = generators.states()
    indices = batch if isinstance(batch, (list, tuple)) else [batch]
    if not indices or not isinstance(indices[0], int):
        return
    known.first_items = known.first_items or len(indices)
    known.items += len(indices)
    known.order = hash((known.order, *indices))  # of numbers: alike in all processes
    if len(known.first_orders) < 8:
        known.first_orders.append(known.order)
    known.index_sum += sum(indices)
    known.rising = known.rising and list(indices) == sorted(indices)
    # An endless sampler goes on with its next epoch.
    is_next_epoch = known.share is not None and known.items > known.share
    if known.pass_of_loader < 4 and len(known.sketch) < 2000 and not is_next_epoch:
        known.sketch += [index for index in indices if index % known.every == 0]


@after(dataloader._BaseDataLoaderIter, "__init__")
@after(dataloader._BaseDataLoaderIter, "_reset")
def begin_pass(result, args, kwargs):
    """Note a new pass: a loader's iterator was made, or begins anew."""
    iterator, loader = args[:2]
    known = state.of_iterators.get(iterator)
    if known is None or known.items or known.batches:
        # Else an iterator with workers sets itself back while it is made: it is the same pass.
        _end_if_complete(counters.feeding)
        key, pass_of_loader = site("p")
        before = state.recent.get(key)
        _end(before, stopped=False)
        _note_after_pass()
        known = KnownPass(
            number=count("pass"),
            pass_of_loader=pass_of_loader,
            every=max(1, (size_of(loader.dataset) or 0) // 2000),
            workers=loader.num_workers,
            promised=size_of(loader),
            share=size_of(sampler_of(loader)),
            backwards_before=counters.backwards,
            no_grad_forwards_before=counters.no_grad_forwards,
            steps_before=counters.all_steps,
            modes_before=model.modes(optimizer.steps()),
            workers_epoch=_workers_epoch(loader, known),
            draws_its_items=draws_its_items(loader.dataset),
        )
        if before is not None:  # what it gave goes into the same step
            known.batches_at_step = before.batches_at_step - before.batches
        state.of_iterators[iterator] = state.recent[key] = known
        _note_pass(iterator, loader, key, known)
    if not known.draws_its_items:
        iterator._sampler_iter = DrawnIndices(iterator._sampler_iter, known)


def _note_pass(iterator, loader, key, known):
    """Note how a pass begins: its loader, sampler and dataset.

    A sampler says nothing of what comes, if the dataset draws its items by itself.
    """
    samplers = [None] if known.draws_its_items else samplers_of(loader)
    sampler = None if known.draws_its_items else sampler_of(loader)
    # Of the first two passes alone: it takes time, and a dataset stays what it is.
    contents, listed = data_in(loader.dataset) if known.pass_of_loader < 2 else ({}, {})
    note(
        Pass,
        number=known.number,
        loader=key,
        loader_object=_number_of_object(state.loaders, loader),
        line=where(),
        sampler=type(sampler).__name__,
        sampler_object=id(sampler),
        length=None if known.draws_its_items else size_of(loader.dataset),
        share=size_of(sampler),
        total_size=number_of(sampler, "total_size"),
        batches=known.promised,
        replicas=number_of(sampler, "num_replicas"),
        replica=number_of(sampler, "rank"),
        epoch=number_of(sampler, "epoch"),
        shuffle=number_of(sampler, "shuffle"),
        drop_last=any(getattr(each, "drop_last", None) is True for each in (*samplers, loader)),
        is_stream=iterator._dataset_kind == dataloader._DatasetKind.Iterable,
        workers=loader.num_workers,
        workers_seed=_workers_seed(iterator, loader),
        contents=contents,
        listed=listed,
        chosen=chosen_in(loader.dataset) if known.pass_of_loader < 2 else [],
        dataset_epoch=epoch_in(loader.dataset),
        workers_epoch=known.workers_epoch,
        draws_its_items=known.draws_its_items,
        reads_epoch=reads_its_epoch(loader.dataset),
        dataset_object=_number_of_object(state.datasets, loader.dataset),
        dataset_seen=seen_at(loader.dataset),
    )


def _number_of_object(numbers, thing):
    """Return a number for an object, which no other one has had; None: it cannot be followed.

    numbers: those of objects that are still there.
    """
    try:
        if thing not in numbers:
            numbers[thing] = count("loaders and datasets")
    except TypeError:  # a list, of which there are no weak references
        return None
    return numbers[thing]


def _workers_epoch(loader, before):
    """Return Pass.workers_epoch. before: the KnownPass of the same workers; None: they begin."""
    if not loader.num_workers:
        return None
    return epoch_in(loader.dataset) if before is None else before.workers_epoch


def _workers_seed(iterator, loader):
    """Return Pass.workers_seed."""
    if not loader.num_workers or loader.worker_init_fn is not None:
        return None
    return iterator._base_seed


@around(dataloader._MultiProcessingDataLoaderIter, "__init__")
def start_workers(args, kwargs):
    """Note how long it takes to start the workers of a pass."""
    begin = now()
    yield
    span("workers", begin, now())


@around(dataloader._BaseDataLoaderIter, "__next__", even_if_it_fails=True)
def next_batch(args, kwargs):
    """Follow the batches of a pass."""
    stand("the loader", where())
    known = state.of_iterators.get(args[0])
    if known is not counters.feeding:
        _end_if_complete(counters.feeding)
    if known is not None and _draws_are_looked_at(known):
        known.states = generators.states()
    begin = now()
    batch = yield
    span("loading", begin, now())
    stand("")
    if batch is RAISED:
        _end(known, stopped=isinstance(sys.exc_info()[1], StopIteration))
        return
    counters.batches += 1
    generators.note_batch()
    if known is None:
        return
    if known.states:
        known.drawn += generators.moved(known.states, known.batches)
        known.states = {}
    _feed_by(known)
    _take(known, batch)


def _draws_are_looked_at(known):
    """Return whether to look which generators the next batch of a pass draws from."""
    first_passes = known.pass_of_loader < generators.PASSES
    return not known.workers and first_passes and known.batches in generators.LOOKED_AT


def _feed_by(known):
    """Remember which pass has given the last batch. What the model does counts for that one."""
    before = counters.feeding
    if before is not None and before is not known:
        before.count()
        if not before.backwards and not before.over and before.times_left < 3:
            before.times_left += 1
            before.left, before.modes_after = now(), model.modes(optimizer.steps())
    if known.left is not None:
        known.left = known.modes_after = None
    counters.feeding = known


def _take(known, batch):
    """Add a batch to what is known of its pass; note that after 4, 8, 16, ... batches."""
    place, known.batches = known.batches, known.batches + 1
    known.last_batch, known.thread = now(), threading.get_ident()
    known.gradients = known.gradients or torch.is_grad_enabled()
    first = _first_tensor(batch)
    if first is not None and first.dim() and readable(first):
        known.rows += len(first)
        if known.pass_of_loader < 20 and place < 32:
            _add_bits(known, batch, place)
        if known.pass_of_loader < 20 and labels.are_looked_at(place):
            labels.look_at(known, batch, first)
        if known.pass_of_loader < 2 and place < 300 and first.numel():
            known.content += float(first.reshape(len(first), -1)[:, :8].double().sum())
    if known.complete and known.modes_after is None:
        known.modes_after = model.modes(optimizer.steps())
    if place > 2 and (known.batches & place) == 0 and not known.over:  # a power of two
        _note_progress(known)


def _first_tensor(batch):
    """Return the first tensor of a batch, also of one that is an object of the script's own."""
    return next(_tensors_of(batch), None)


def _tensors_of(batch):
    """Yield the tensors of a batch, also of one that is an object of the script's own."""
    several = list(itertools.islice(tensors_in(batch), TENSORS))
    yield from several or tensors_in(getattr(batch, "__dict__", None))


def _add_bits(known, batch, place):
    """Add the bits of a batch. Its first tensor may be a mask, which is the same in many."""
    tensors = itertools.islice(_tensors_of(batch), TENSORS)
    found = [bits(each) for each in tensors if readable(each)]
    known.batch_bits.append(found[0] if len(found) == 1 else hash(tuple(found)))
    if place < 8:
        known.tensor_bits += found


def _note_progress(known, **fields):
    """Note how far a pass has come; fields: what only its end has."""
    if known is counters.feeding:
        known.count()
    note(
        Progress,
        pass_number=known.number,
        batches=known.batches,
        last_batch=known.last_batch,
        rows=known.rows,
        items=known.items,
        order=known.order,
        first_items=known.first_items,
        first_orders=known.first_orders,
        index_sum=known.index_sum,
        sketch=known.sketch,
        rising=known.rising,
        batch_bits=known.batch_bits,
        tensor_bits=known.tensor_bits,
        content=known.content,
        drawn=known.drawn,
        backwards=known.backwards,
        no_grad_forwards=known.no_grad_forwards,
        steps=known.steps,
        gradients=known.gradients,
        labels=known.labels,
        sizes_as_labels=known.sizes_as_labels,
        **fields,
    )


def _end_if_complete(known):
    """Note that a pass is over, if it has given all batches that its loader promises."""
    if known is not None and known.complete:
        _end(known, stopped=False)


def _end(known, stopped):
    """Note that a pass is over, unless it was before, and how schedules stand by then.

    stopped: its iterator has said that no batch is left.
    """
    if known is None or known.over:
        return
    known.over = True
    state.ended = EndedPass(known, counters.backwards, counters.batches)
    if stopped or known.modes_after is None:
        known.modes_after = model.modes(optimizer.steps())
    _note_progress(
        known,
        over=True,
        exhausted=stopped or known.complete,
        modes_before=known.modes_before,
        modes_after=known.modes_after,
        left=known.left,
    )
    schedules.note_all()


def _note_after_pass():
    """Note the backward passes since the last pass that no other loader has fed."""
    ended, state.ended = state.ended, None
    if ended is not None:
        fed = counters.batches - ended.batches
        backwards = counters.backwards - ended.backwards - fed
        if ended.known is counters.feeding:
            ended.known.count()
        note(
            AfterPass,
            pass_number=ended.known.number,
            backwards=backwards,
            steps=ended.known.steps,
        )


def end_all():
    """Note that all passes are over: the process leaves its group, or ends."""
    for known in list(state.recent.values()):
        _end(known, stopped=False)
    _note_after_pass()
