"""Datasets, and passes over loaders."""

from dataclasses import dataclass, field

from .base import Moment, Record


@dataclass(slots=True)
class Mode:
    """In which state a DDP object's module was."""

    training: bool
    norms: list[int]  # bits of each BatchNorm's running mean
    norm_updates: int  # how often the first BatchNorm has updated its running mean


@dataclass(slots=True)
class Listed:
    """An attribute of a dataset that is a list or a dict of texts, such as its files or classes."""

    order: int  # a checksum of the entries as they stand; of a dict, with their whole numbers
    entries: int  # a checksum of the same entries, sorted


@dataclass(slots=True)
class Drawn:
    """Random numbers that were drawn in the main process while a loader made a batch.

    Its items drew them, or what puts a batch together; not its sampler.
    """

    library: str  # "torch", "numpy" or "random": whose own generator
    batch: int  # number of the batch in its pass
    state: int  # a hash of the generator's state before


@dataclass(slots=True)
class Pass(Record):
    """A pass over a DataLoader begins: iter(loader), or its workers begin anew."""

    number: int  # of all passes of this process
    loader: str  # key: the lines that made it, so a loader that is made anew keeps its key
    loader_object: int  # a number for the DataLoader object, in this process
    line: str
    sampler: str  # name of its class
    sampler_object: int  # a number for this object, in this process
    length: int | None  # items of the dataset; None: it does not say
    share: int | None  # items that the sampler gives this rank; None: it does not say
    total_size: int | None  # of a DistributedSampler: items of all ranks, with padding
    batches: int | None  # that the loader promises; None: it does not say
    replicas: int | None  # of a DistributedSampler: of so many ranks
    replica: int | None  # of a DistributedSampler: this is the share of that one
    epoch: int | None  # of a DistributedSampler: as set_epoch has set it
    shuffle: bool | None  # as the sampler was told; None: it does not say
    drop_last: bool
    is_stream: bool  # the dataset is an IterableDataset
    workers: int
    workers_seed: int | None  # of all of them, as torch seeds them; None: none, or the script does
    contents: dict[str, list[int]]  # {attribute of the dataset: bits of its tensors}
    listed: dict[str, Listed]  # {attribute of the dataset: a list of texts}
    # Of each Subset that the dataset is, or that is in it: bits of its indices, in their order.
    chosen: list[int] = field(default_factory=list)
    dataset_epoch: int | None = None  # the dataset's attribute `epoch`; None: it has none
    # The same when its workers began, with a copy of the dataset; None: no workers, or as above.
    workers_epoch: int | None = None
    # The dataset never reads the index that it is asked for: it draws its items by itself. Then
    # neither its length nor the sampler says anything, and no indices are noted.
    draws_its_items: bool = False
    reads_epoch: bool = True  # code of the dataset's class may read that number
    # When the first DataLoader over this dataset was made; None: it was made by another way.
    dataset_seen: Moment | None = None
    dataset_object: int | None = None  # a number for this object, in this process; None: unknown


@dataclass(slots=True)
class Progress(Record):
    """How far a pass has come: after 4, 8, 16, ... batches, and when it is over."""

    pass_number: int  # Pass.number
    batches: int  # that were taken
    last_batch: Moment | None  # when the last of them was taken
    rows: int  # of the first tensor of each batch, in all
    items: int  # that the sampler drew, in this process
    order: int  # a hash of the indices in the order in which they were drawn
    first_items: int  # in the first batch of indices; 0: no indices were drawn
    first_orders: list[int]  # the same of the first batch, of the first two, ... of the first eight
    index_sum: int  # of the indices
    sketch: list[int]  # the drawn indices that 1/2000 of the set divides: equal on all ranks
    rising: bool  # the indices of each batch rise: no shuffle, or one of batches that are sorted
    batch_bits: list[int]  # of the first tensors of the first 32 batches
    content: float  # a sum over the first values of all rows: equal if the items are the same
    drawn: list[Drawn]  # for the second to fifth batch; of the first passes over a loader
    backwards: int  # backward passes until another loader gave a batch
    no_grad_forwards: int  # calls of DDP objects with gradients off, as above
    gradients: bool  # they were on when a batch was taken
    over: bool = False  # the pass has ended, or another one has begun in its place
    exhausted: bool = False  # no batch was left, or all that the loader promises were taken
    modes_before: list[Mode] = field(default_factory=list)  # of each DDP object, as it began
    modes_after: list[Mode] = field(default_factory=list)  # and as it was over
    # Of each of the first 32 batches that have labels, and of some later ones, the label that all
    # of its items have; None: they have several. Labels are whole numbers in a tensor, one for each
    # item. Of two such tensors, that in which they have several counts.
    labels: list[int | None] = field(default_factory=list)
    sizes_as_labels: int = 0  # batches whose one label is a size of their items: their length?
    tensor_bits: list[int] = field(default_factory=list)  # of each of them, of the first 8 batches
    # When another loader gave a batch, after which it gave none; None: it was over before.
    left: Moment | None = None
    steps: int = 0  # of any optimizer until another loader gave a batch


@dataclass(slots=True)
class AfterPass(Record):
    """What came between a pass that was over and the next one."""

    pass_number: int  # Pass.number
    backwards: int  # passes that no other loader has fed: the batches were kept in a list
    steps: int = 0  # as Progress.steps, also of those that came when the pass was over


@dataclass(slots=True)
class SetEpoch(Record):
    """DistributedSampler.set_epoch()."""

    line: str
    sampler_object: int  # as in Pass
    epoch: int | None


@dataclass(slots=True)
class SubsetMade(Record):
    """A Subset was made, also by random_split()."""

    key: str
    line: str
    length: int  # items in the subset
    of_length: int  # items of the whole set; 0: it does not say
    order: int  # a hash of the indices in their order
    sketch: list[int]  # the indices that 1/2000 of the set divides
    contents: dict[str, list[int]]  # of the whole set, as in Pass
    listed: dict[str, Listed]
