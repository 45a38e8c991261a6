"""transformers' Trainer: evaluates, saves, keeps the best model, and resumes.

    torchrun --standalone --nproc-per-node=2 tests/trainers/hf_trainer.py

A GPT-2 of two layers, made from a config, learns to count by equal strides. The mistakes are in
hf_mistakes.py. With TORCH=first, torch is imported first; else datasets and transformers look
whether it is there (importlib.util.find_spec) before they import it.
"""

import os
import pathlib

if os.environ.get("TORCH") == "first":
    import torch  # noqa: F401

import numpy as np
from datasets import Dataset
from shared import MISTAKE, print_checksum
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

OUT = pathlib.Path("out")


def counting(count, seed):
    """So many rows of 32 tokens: a start, and then always the same stride, modulo 64."""
    if MISTAKE == "unseeded_data" and seed == 0:
        seed = None  # each process makes another training set
    numbers = np.random.default_rng(seed)
    start, stride = numbers.integers(0, 64, (count, 1)), numbers.integers(1, 5, (count, 1))
    rows = ((start + stride * np.arange(32)) % 64).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def accuracy(prediction):
    logits, labels = prediction
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def last_complete_checkpoint(world_size):
    """The newest checkpoint in which no file is missing. (get_last_checkpoint() takes the newest,
    also if a kill has left a part of it only: Trainer writes it in place, file by file.)"""
    complete = []
    for state in OUT.glob("checkpoint-*/trainer_state.json"):  # rank 0 writes this file last
        random = [state.parent / f"rng_state_{rank}.pth" for rank in range(world_size)]
        if all(path.exists() for path in random):
            complete.append(state.parent)
    return max(complete, default=None, key=lambda folder: int(folder.name.split("-")[1]))


def main():
    args = TrainingArguments(
        output_dir=str(OUT),
        use_cpu=True,
        ddp_backend="gloo",
        seed=42,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=5,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        dataloader_num_workers=2 if MISTAKE == "same_augmentation_in_workers" else 0,
        report_to="none",
    )
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    kind, callbacks, train_set = Trainer, [], counting(320, seed=0)
    if MISTAKE:
        import hf_mistakes

        kind, callbacks, train_set = hf_mistakes.parts(train_set)
    trainer = kind(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=train_set,
        eval_dataset=counting(101, seed=1),
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        callbacks=callbacks,
    )
    for callback in callbacks:
        callback.trainer = trainer
    last = last_complete_checkpoint(args.world_size)
    if last and trainer.is_world_process_zero():
        print(f"resuming from {last}", flush=True)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"eval_loss {metrics['eval_loss']:.6f}", flush=True)
    print_checksum(trainer.model.state_dict())


if __name__ == "__main__":
    main()
