"""Lightning's Trainer: ddp on two CPU processes, validation, ModelCheckpoint, resume.

torchrun --standalone --nproc-per-node=2 tests/trainers/lightning_fit.py
python tests/trainers/lightning_fit.py    # Lightning starts the second process itself
MANUAL=1 torchrun ...                     # two optimizers, stepped by hand
"""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from shared import MISTAKE, print_checksum
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def points(count, seed):
    numbers = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, (numbers[:, :4].sum(1) > numbers[:, 4:8].sum(1)).long())


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 32)]
        # The mistake: the layers of a plain list are in no parameters() and on no device.
        self.layers = layers if MISTAKE == "list_of_layers" else nn.ModuleList(layers)
        self.head = nn.Linear(32, 2)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.relu(layer(inputs))
        return self.head(inputs)

    def on_train_batch_start(self, batch, batch_index):
        # Other dropout on each rank, and the same again after a resume. (Once an epoch does not
        # do: the loader's iterator, which draws a number, is made after that, or before, if the
        # epoch is the first of a resumed run.)
        torch.manual_seed(self.global_step * self.trainer.world_size + self.global_rank)

    def training_step(self, batch, batch_index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_index):
        logits = self(batch[0])
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        loss = nn.functional.cross_entropy(logits, batch[1])
        sync = MISTAKE != "no_sync_dist"
        if MISTAKE == "log_on_rank_0" and not self.trainer.is_global_zero:
            return
        self.log_dict({"val_loss": loss, "val_accuracy": accuracy}, sync_dist=sync, prog_bar=True)

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch} step {self.global_step} ended", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


class ByHand(Classifier):
    """Two optimizers: the head learns the labels, and the layers below, noisy ones."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_index):
        losses = []
        for optimizer, noise in zip(self.optimizers(), (0.0, 0.1), strict=True):
            if MISTAKE != "no_toggle":  # else each loss leaves gradients in the other's weights
                self.toggle_optimizer(optimizer)
            inputs = batch[0] + noise * torch.randn_like(batch[0])
            loss = nn.functional.cross_entropy(self(inputs), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if MISTAKE != "no_toggle":
                self.untoggle_optimizer(optimizer)
            losses.append(loss.detach())
        self.log("train_loss", sum(losses), prog_bar=True)

    def configure_optimizers(self):
        parts = self.head, self.layers
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]


def main():
    L.seed_everything(1)
    by_hand = os.environ.get("MANUAL") or MISTAKE == "no_toggle"
    model = ByHand() if by_hand else Classifier()
    # The last epoch's state, and the best one's. Lightning writes each beside and renames it.
    saver = ModelCheckpoint("saved", monitor="val_loss", save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_find_unused_parameters_true" if by_hand else "ddp",
        max_epochs=3,
        log_every_n_steps=5,
        callbacks=[saver],
        logger=CSVLogger("logs"),
        use_distributed_sampler=MISTAKE != "no_distributed_sampler",
    )
    train_loader = DataLoader(points(320, 0), batch_size=8, shuffle=True)
    validation_loader = DataLoader(points(200, 1), batch_size=8)
    trainer.fit(model, train_loader, validation_loader, ckpt_path="last")
    print_checksum(model.state_dict())


if __name__ == "__main__":
    main()
