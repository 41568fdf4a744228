"""Batches and loaders of other libraries: graphs and streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.ecosystem.twice import MARKS, MISSING, train_twice
from tests.profiled import csv_rows

pytestmark = MARKS


def fit(module: LightningModule, loader: Any, callbacks: list[Any], tmp_path: Path) -> LightningModule:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = Trainer(accelerator="cpu", callbacks=callbacks, default_root_dir=tmp_path, **defaults)
    trainer.fit(module, loader)  # loaders or a datamodule
    return module


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize("in_datamodule", [False, True])
def test_graphs_of_torch_geometric_are_counted(tmp_path: Path, in_datamodule: bool) -> None:
    data = pytest.importorskip("torch_geometric.data", reason=MISSING)
    lightning_data = pytest.importorskip("torch_geometric.data.lightning", reason=MISSING)
    loaders = pytest.importorskip("torch_geometric.loader", reason=MISSING)
    layers = pytest.importorskip("torch_geometric.nn", reason=MISSING)
    seed_everything(0)
    graphs = []
    for nodes in range(5, 69):  # of different sizes, so that no two tensors of a batch agree
        edges = torch.randint(0, nodes, (2, 3 * nodes))
        graphs.append(data.Data(x=torch.randn(nodes, 4), edge_index=edges, y=torch.randn(1)))

    class Graphs(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = layers.GCNConv(4, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            nodes = self.convolution(batch.x, batch.edge_index).relu()
            return nn.functional.mse_loss(self.layer(layers.global_mean_pool(nodes, batch.batch))[:, 0], batch.y)

    def train(size: int, callbacks: list[Any]) -> nn.Module:
        seed_everything(0)
        if in_datamodule:
            return fit(
                Graphs(),
                lightning_data.LightningDataset(graphs, batch_size=size, pin_memory=False),
                callbacks,
                tmp_path,
            )
        return fit(Graphs(), loaders.DataLoader(graphs, batch_size=size, shuffle=True), callbacks, tmp_path)

    path = "kwargs.batch_size" if in_datamodule else "batch_size"
    plan, summary = train_twice(train, BatchFinder, MemoryProfiler, batch_arg_name=path)
    assert (summary.batch_size, summary.steps) == (16, 8)
    assert "train_dataloader: Samples differ in size" in " ".join(plan.notes)


def test_molecules_of_chemprop_are_counted(tmp_path: Path) -> None:
    data = pytest.importorskip("chemprop.data", reason=MISSING)
    models = pytest.importorskip("chemprop.models", reason=MISSING)
    layers = pytest.importorskip("chemprop.nn", reason=MISSING)
    smiles = ["C" * (1 + i % 9) + "O" * (i % 2) for i in range(64)]
    points = [data.MoleculeDatapoint.from_smi(one, np.array([len(one) / 9])) for one in smiles]

    def train(size: int, callbacks: list[Any]) -> nn.Module:
        seed_everything(0)
        model = models.MPNN(
            layers.BondMessagePassing(d_h=16), layers.MeanAggregation(), layers.RegressionFFN(input_dim=16)
        )
        loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=size, seed=0)
        return fit(model, loader, callbacks, tmp_path)

    train_twice(train, BatchFinder, MemoryProfiler)
    sizes = [row["batch_size"] for row in csv_rows(tmp_path)]
    assert sizes == ["16", "16", "16", ""] * 2  # tensors of a batch disagree; its last one may be smaller


def shards(webdataset: Any, tmp_path: Path) -> Any:
    path = tmp_path / "shard.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for i in range(64):
            writer.write({"__key__": f"{i:03}", "x.npy": np.full(4, i / 64, dtype=np.float32)})
    return webdataset.WebDataset(str(path), shardshuffle=False).decode().to_tuple("x.npy")


def test_a_stream_of_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason=MISSING)

    def train(size: int, callbacks: list[Any]) -> nn.Module:
        seed_everything(0)
        return fit(Linear(), DataLoader(shards(webdataset, tmp_path), batch_size=size), callbacks, tmp_path)

    train_twice(train, BatchFinder, MemoryProfiler)


def test_a_loader_of_webdataset_is_refused(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason=MISSING)
    loader = webdataset.WebLoader(shards(webdataset, tmp_path).batched(4), batch_size=None)
    with pytest.raises(ValueError, match="train_dataloader must be torch DataLoaders for BatchFinder, got WebLoader"):
        fit(Linear(), loader, [BatchFinder(max_batch_size=16)], tmp_path)
