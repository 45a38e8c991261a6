"""The trainers, how each is started, and the mistakes that each script can make on demand."""

from dataclasses import dataclass, field


@dataclass
class Trainer:
    name: str  # as the command line takes it
    title: str  # as people call it
    script: str  # in this folder
    packages: tuple[str, ...]  # whose versions are reported
    # Other right ways to start it: {name: environment}. "" is how it is started for mistakes.
    ways: dict[str, dict[str, str]] = field(default_factory=lambda: {"": {}})
    mistakes: dict[str, str] = field(default_factory=dict)  # {MISTAKE: what is wrong then}
    # What check_training says of the right script: patterns. All that it says must match one.
    says: tuple[str, ...] = ()
    why: str = ""  # a killed run is equal, or not, by the trainer's sources


TRAINERS = [
    Trainer(
        "transformers",
        "transformers' Trainer",
        "hf_trainer.py",
        ("transformers", "accelerate"),
        says=(
            "^all ranks draw the same random numbers",  # set_seed(args.seed) on each rank
            "has find_unused_parameters=True, and each",  # ddp_find_unused_parameters's default
        ),
        ways={"": {}, "torch imported first": {"TORCH": "first"}},
        why=(
            "Trainer keeps the optimizer, the schedule and each rank's random states, and "
            "skips the batches that are done. It writes a checkpoint in place: the script "
            "takes the newest one in which no file is missing. (get_last_checkpoint() would "
            "take a half-written one.)"
        ),
        mistakes={
            "own_loader": "a training loader of one's own is not prepared: all ranks take all",
            "bare_model": "compute_loss() calls self.model, which DDP does not see",
            "weights_on_one_rank": "a callback changes weights on rank 0",
            "every_rank_saves": "a callback saves on every rank to one path",
            "own_evaluation": "rank 0 prints the figure of its share of an own evaluation",
            "loss_of_micro_batch": "compute_loss() ignores num_items_in_batch: twice the gradient",
            "same_augmentation": "numpy's state is alike on all ranks, which augment alike",
            "same_augmentation_in_workers": "a generator in the dataset is alike in all workers",
            "unseeded_data": "each process draws a training set of its own",
            "ema_on_rank_0": "an average of the weights is updated on rank 0 only",
            "best_by_rank": "each rank decides by its own share whether it saves the best",
        },
    ),
    Trainer(
        "accelerate",
        "accelerate",
        "accelerate_loop.py",
        ("accelerate",),
        ways={
            "": {},
            "dispatch_batches": {"LOADER": "dispatch"},
            "split_batches": {"LOADER": "split"},
            "even_batches=False": {"LOADER": "uneven"},
        },
        why=(
            "The order comes from data_seed and set_epoch(); skip_first_batches() and "
            "save_state() do the rest. The script renames a folder that is complete. (The "
            "example in accelerate's repository uses a sampler whose generator nobody "
            "saves: it is not equal.)"
        ),
        mistakes={
            "gather": "gather() counts the items twice that fill up the last batch",
            "scheduler_not_prepared": "the schedule takes a step for each micro batch",
            "backward_by_hand": "loss.backward() does not divide by the accumulated batches",
            "loader_not_prepared": "all ranks take all items",
        },
    ),
    Trainer(
        "lightning",
        "Lightning's Trainer",
        "lightning_fit.py",
        ("lightning",),
        ways={
            "": {},
            "plain python": {"START": "python"},
            "two optimizers by hand": {"MANUAL": "1"},
        },
        why=(
            "last.ckpt has no random state: the script seeds by step and rank. save_last "
            "follows the best checkpoint: an epoch that was no better is done again, with "
            "the same result."
        ),
        mistakes={
            "no_sync_dist": "validation figures are those of rank 0's share",
            "list_of_layers": "layers in a plain list are never trained",
            "log_on_rank_0": "self.log() with sync_dist on rank 0 alone waits for ever",
            "no_toggle": "each of two optimizers finds gradients of the other's loss",
            "no_distributed_sampler": "all ranks take all items",
        },
    ),
    Trainer(
        "torchvision",
        "torchvision's reference",
        "torchvision_reference.py",
        ("torchvision",),
        why=(
            "The script seeds the crops by epoch and rank, and moves a whole file into "
            "place. (The reference seeds once, so that a resumed run crops in another way, "
            "and it writes checkpoint.pth in place.)"
        ),
        mistakes={
            "no_set_epoch": "the items come in the same order in each epoch",
            "no_synchronize": "the figures of the evaluation are those of rank 0's share",
        },
    ),
    Trainer(
        "timm",
        "timm's train.py",
        "timm_train.py",
        ("timm",),
        why=(
            "CheckpointSaver moves a whole file into place; the script seeds by epoch and "
            "rank. (timm's own train.py seeds at its start alone: dropout and augmentation "
            "begin anew.)"
        ),
        mistakes={
            "no_set_epoch": "the items come in the same order in each epoch",
            "no_reduce": "the figures of the evaluation are those of rank 0's share",
        },
    ),
    Trainer(
        "nanogpt",
        "nanoGPT's train.py",
        "nanogpt_loop.py",
        ("torch",),
        why=(
            "ckpt.pt has the model, the optimizer and the step; the script draws batches "
            "from a seed of step and rank. (nanoGPT's own train.py seeds at its start "
            "alone: a resumed run draws other batches.)"
        ),
        mistakes={
            "sync_at_wrong_step": "gradients are exchanged at the first micro step, not the last",
            "same_seed": "seed_offset is 0: all ranks draw the same batches",
        },
    ),
    Trainer(
        "mingpt",
        "minGPT-ddp",
        "mingpt_trainer.py",
        ("torch",),
        why=(
            "The snapshot has the model, the optimizer and the scaler. The order comes from "
            "set_epoch(), and dropout is seeded by epoch and rank."
        ),
        mistakes={
            "unseeded_split": "random_split() without a generator: tests on what others train on",
            "clip_before_unscale": "gradients are clipped that GradScaler still multiplies",
        },
    ),
    Trainer(
        "fsdp2",
        "FSDP2 by hand",
        "fsdp2_loop.py",
        ("torch",),
        why=(
            "torch.distributed.checkpoint writes the shards first and .metadata last; the "
            "script takes the newest folder that has one, and seeds by step and rank."
        ),
    ),
]
