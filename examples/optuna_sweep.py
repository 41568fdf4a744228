"""A sweep with Optuna that searches once for the batch size, and uses the plan in every trial.

A trial that runs out of memory is pruned, and the next one starts with a clean device.

Run it with ``python examples/optuna_sweep.py`` after ``pip install optuna``. It takes about a
minute on two cores, and uses a GPU where there is one.
"""

from __future__ import annotations

import gc
from typing import Any

import optuna
import torch
from lightning.pytorch import Trainer, seed_everything
from quickstart import Classifier, Digits

from lightning_batchmem import BatchFinder, NothingFitsError, find_batch_size

# A plan is used again only where these and the arguments of the Trainer are the same.
OPTIONS: dict[str, Any] = {"memory_limit": "1GiB", "max_batch_size": 64}
TRAINING: dict[str, Any] = {"devices": 1, "max_epochs": 1, "enable_progress_bar": False}


def main() -> None:
    """Search for the batch size, and then for the learning rate."""
    plan = find_batch_size(Trainer(**TRAINING, logger=False), Classifier(8), Digits(), **OPTIONS)

    def train(learning_rate: float) -> float:
        seed_everything(0, verbose=False)
        finder = BatchFinder(plan=plan, **OPTIONS)
        trainer = Trainer(**TRAINING, callbacks=[finder], logger=False, enable_checkpointing=False)
        trainer.fit(Classifier(8, learning_rate), datamodule=Digits())
        return float(trainer.callback_metrics["val/accuracy"])

    def objective(trial: optuna.Trial) -> float:
        try:
            return train(trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True))
        except (NothingFitsError, torch.OutOfMemoryError) as error:
            message = str(error)
        finally:
            # The error, which kept the variables of `train` alive, is gone here. Parts of a Trainer
            # refer to each other, so only a garbage collection frees their tensors.
            gc.collect()
            torch.cuda.empty_cache()
        raise optuna.TrialPruned(message)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=4)
    print(f"accuracy {study.best_value:.3f} with {study.best_params}")


if __name__ == "__main__":
    main()
