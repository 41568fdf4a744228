"""MemoryProfiler never waits for the device."""

import warnings
from pathlib import Path

import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

import lightning_batchmem
from lightning_batchmem import MemoryProfiler
from tests.helpers.lawful import quiet_trainer


def test_no_synchronization_begins_in_the_profiler(tmp_path):
    options = {"accelerator": "gpu", "devices": 1, "max_steps": 30, "log_every_n_steps": 1}
    trainer = quiet_trainer(
        MemoryProfiler(), logger=CSVLogger(tmp_path), default_root_dir=tmp_path, **options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Lightning itself waits for the device, so waiting must not be an error.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.fit(BoringModel())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 30
    waits = [one for one in caught if "synchroniz" in str(one.message)]
    # A folder above the environment may have the name of the package.
    package = Path(lightning_batchmem.__file__).parent
    assert [one for one in waits if Path(one.filename).is_relative_to(package)] == []
