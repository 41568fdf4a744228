"""A sweep with Ray Tune that searches once for the batch size, and uses the plan in every trial.

Each trial is a process of its own, so one that runs out of memory leaves nothing behind.

Run it with ``python examples/ray_tune.py`` after ``pip install "ray[tune]"``. It takes about a
minute on two cores, and writes to ``logs/ray``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from quickstart import Classifier, Digits
from ray import tune

from lightning_batchmem import BatchFinder, Plan, find_batch_size

# A plan is used again only where these and the arguments of the Trainer are the same.
OPTIONS: dict[str, Any] = {"memory_limit": "1GiB", "max_batch_size": 64}
TRAINING: dict[str, Any] = {"devices": 1, "max_epochs": 1, "enable_progress_bar": False}


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train with the size of the plan, if a rehearsal at it passes; return the accuracy."""
    seed_everything(0, verbose=False)
    finder = BatchFinder(plan=Plan.from_json(settings["plan"]), **OPTIONS)
    trainer = Trainer(**TRAINING, callbacks=[finder], logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(8, settings["learning_rate"]), datamodule=Digits())
    assert finder.plan is not None
    accuracy = float(trainer.callback_metrics["val/accuracy"])
    return {"accuracy": accuracy, "reason": finder.plan.reason}


def main() -> None:
    """Search for the batch size, and then for the learning rate."""
    plan = find_batch_size(Trainer(**TRAINING, logger=False), Classifier(8), Digits(), **OPTIONS)
    share = {"cpu": 1, "gpu": 1 if torch.cuda.is_available() else 0}
    tuner = tune.Tuner(
        tune.with_resources(train, share),
        param_space={"learning_rate": tune.grid_search([1e-3, 1e-2]), "plan": plan.to_json()},
        run_config=tune.RunConfig(storage_path=str(Path("logs/ray").resolve())),
    )
    results = tuner.fit()
    for result in results:
        # A trial that has failed has no metrics.
        reason = (result.metrics or {}).get("reason")
        print(f"trial: {reason or result.error}")
    best = results.get_best_result("accuracy", mode="max")
    assert best.metrics is not None
    assert best.config is not None
    print(f"accuracy {best.metrics['accuracy']:.3f} with {best.config['learning_rate']}")


if __name__ == "__main__":
    main()
