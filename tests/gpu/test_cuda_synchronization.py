"""MemoryProfiler never waits for the device."""

import warnings

import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

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
    places = [f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    assert [place for place in places if "/lightning_batchmem/" in place] == []
