"""Mistakes of those who extend transformers' Trainer, one class each."""

import numpy as np
import torch
from shared import MISTAKE
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback


def parts(train_set):
    """Return (the Trainer's class, callbacks, the training set) with the mistake."""
    kind = {"own_loader": OwnLoader, "bare_model": BareModel, "loss_of_micro_batch": MicroLoss}
    callback = {
        "weights_on_one_rank": WeightsOnOneRank,
        "every_rank_saves": EveryRankSaves,
        "own_evaluation": OwnEvaluation,
        "ema_on_rank_0": AverageOnRank0,
        "best_by_rank": BestByRank,
    }
    augmented = {
        "same_augmentation": Augmented,
        "same_augmentation_in_workers": AugmentedByOwnNumbers,
    }
    return (
        kind.get(MISTAKE, Trainer),
        [callback[MISTAKE]()] if MISTAKE in callback else [],
        augmented[MISTAKE](train_set) if MISTAKE in augmented else train_set,
    )


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        # The mistake: accelerator.prepare() is missing, so each rank goes through the whole set.
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            collate_fn=self.data_collator,
        )


class BareModel(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # The mistake: self.model is the bare model; the argument is the DDP object.
        outputs = self.model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class MicroLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # The mistake: the mean over this micro batch. The Trainer adds the gradients of all of
        # them up, and does not divide, as it takes num_items_in_batch to be used.
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Augmented(torch.utils.data.Dataset):
    """The mistake: numpy's generator is seeded alike on all ranks, which augment alike."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def draw(self):
        return np.random.randint(0, 32, 3), np.random.randint(0, 64, 3)

    def __getitem__(self, index):
        item = self.inner[index]
        tokens = np.array(item["input_ids"])
        places, others = self.draw()
        tokens[places] = others
        return {"input_ids": tokens.tolist(), "labels": item["labels"]}


class AugmentedByOwnNumbers(Augmented):
    """The mistake: each worker of each rank has a copy of one generator, in each epoch anew."""

    def __init__(self, inner):
        super().__init__(inner)
        self.numbers = np.random.RandomState(0)

    def draw(self):
        return self.numbers.randint(0, 32, 3), self.numbers.randint(0, 64, 3)


class WeightsOnOneRank(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:  # the mistake
            torch.nn.init.constant_(self.trainer.model.transformer.ln_f.weight, 0.5)


class EveryRankSaves(TrainerCallback):
    def on_evaluate(self, args, state, control, model=None, **kwargs):
        # The mistake: no "if state.is_world_process_zero".
        torch.save(self.trainer.model.state_dict(), f"{args.output_dir}/mine.pt")


class OwnEvaluation(TrainerCallback):
    def share(self):
        """Return this rank's mean loss over its share of the evaluation set."""
        model, loader = self.trainer.model, self.trainer.get_eval_dataloader()
        model.eval()
        total = count = 0
        with torch.no_grad():
            for batch in loader:
                rows = len(batch["input_ids"])
                total += float(model(**batch).loss) * rows
                count += rows
        model.train()
        return total / count

    def on_epoch_end(self, args, state, control, **kwargs):
        loss = self.share()
        if state.is_world_process_zero:
            print(f"loss of the evaluation set: {loss:.4f}", flush=True)  # the mistake: a half


class BestByRank(OwnEvaluation):
    best = float("inf")

    def on_epoch_end(self, args, state, control, **kwargs):
        loss = self.share()
        if loss < self.best:  # the mistake: each rank decides by its own share
            self.best = loss
            torch.save(self.trainer.model.state_dict(), "best.pt")


class AverageOnRank0(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        model = self.trainer.model
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:  # the mistake
            self.average.update_parameters(self.trainer.model)

    def on_evaluate(self, args, state, control, **kwargs):
        self.average.eval()
        loss = 0.0
        with torch.no_grad():
            for batch in self.trainer.get_eval_dataloader():
                loss += float(self.average(**batch).loss)
        total = self.trainer.accelerator.reduce(torch.tensor(loss))
        if state.is_world_process_zero:
            print(f"sum of the average's losses: {total:.4f}", flush=True)
