"""Batches and loaders of other libraries: graphs and streams."""

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.ecosystem.twice import MARKS, MISSING, train_twice
from tests.helpers.lawful import quiet_trainer
from tests.helpers.plans import search_notes
from tests.helpers.profiled import csv_rows

pytestmark = MARKS


def fit(module, loader, callbacks, tmp_path):
    trainer = quiet_trainer(*callbacks, max_epochs=2, default_root_dir=tmp_path)
    # The second argument is a loader or a data module.
    trainer.fit(module, loader)
    return module


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def graphs_of(sizes):
    """Random graphs with these numbers of nodes."""
    data = pytest.importorskip("torch_geometric.data", reason=MISSING)
    seed_everything(0)
    graphs = []
    for nodes in sizes:
        edges = torch.randint(0, nodes, (2, 3 * nodes))
        graphs.append(data.Data(x=torch.randn(nodes, 4), edge_index=edges, y=torch.randn(1)))
    return graphs


class Graphs(Linear):
    def __init__(self):
        super().__init__()
        layers = pytest.importorskip("torch_geometric.nn", reason=MISSING)
        self.convolution = layers.GCNConv(4, 4)
        self.pool = layers.global_mean_pool
        self.losses = []

    def training_step(self, batch, batch_idx):
        nodes = self.convolution(batch.x, batch.edge_index).relu()
        pooled = self.pool(nodes, batch.batch)
        loss = nn.functional.mse_loss(self.layer(pooled)[:, 0], batch.y)
        self.losses.append(float(loss.detach()))
        return loss


@pytest.mark.parametrize("in_datamodule", [False, True])
def test_graphs_of_torch_geometric_are_counted(tmp_path, in_datamodule):
    lightning_data = pytest.importorskip("torch_geometric.data.lightning", reason=MISSING)
    loaders = pytest.importorskip("torch_geometric.loader", reason=MISSING)
    # The graphs differ in size, so that no two tensors of a batch have the same length.
    graphs = graphs_of(range(5, 69))

    def train(size, callbacks):
        seed_everything(0)
        if in_datamodule:
            dataset = lightning_data.LightningDataset(graphs, batch_size=size, pin_memory=False)
            return fit(Graphs(), dataset, callbacks, tmp_path)
        loader = loaders.DataLoader(graphs, batch_size=size, shuffle=True)
        return fit(Graphs(), loader, callbacks, tmp_path)

    path = "kwargs.batch_size" if in_datamodule else "batch_size"
    plan, summary = train_twice(train, BatchFinder, MemoryProfiler, batch_arg_name=path)
    assert (summary.memory.batch_size, summary.steps) == (16, 8)
    assert "train_dataloader: Samples differ in size" in " ".join(search_notes(plan))


def test_molecules_of_chemprop_are_counted(tmp_path):
    data = pytest.importorskip("chemprop.data", reason=MISSING)
    models = pytest.importorskip("chemprop.models", reason=MISSING)
    layers = pytest.importorskip("chemprop.nn", reason=MISSING)
    smiles = ["C" * (1 + i % 9) + "O" * (i % 2) for i in range(64)]
    points = [data.MoleculeDatapoint.from_smi(one, np.array([len(one) / 9])) for one in smiles]

    def train(size, callbacks):
        seed_everything(0)
        model = models.MPNN(
            layers.BondMessagePassing(d_h=16),
            layers.MeanAggregation(),
            layers.RegressionFFN(input_dim=16),
        )
        loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=size, seed=0)
        return fit(model, loader, callbacks, tmp_path)

    train_twice(train, BatchFinder, MemoryProfiler)
    sizes = [row["batch_size"] for row in csv_rows(tmp_path)]
    # The tensors of a batch differ in length, and the last batch of an epoch may be smaller.
    assert sizes == ["16", "16", "16", ""] * 2


def test_a_stream_of_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset", reason=MISSING)
    path = str(tmp_path / "shard.tar")
    with webdataset.TarWriter(path) as writer:
        for i in range(64):
            writer.write({"__key__": f"{i:03}", "x.npy": np.full(4, i / 64, dtype=np.float32)})

    def train(size, callbacks):
        seed_everything(0)
        stream = webdataset.WebDataset(path, shardshuffle=False).decode().to_tuple("x.npy")
        return fit(Linear(), DataLoader(stream, batch_size=size), callbacks, tmp_path)

    train_twice(train, BatchFinder, MemoryProfiler)


def train_within_budget(train, **arguments):
    """Return the plan of a search over a budget, after which training is that with this budget."""
    finder = BatchFinder(budget=True, **arguments, objective="memory")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="lightning.pytorch|torch_geometric|lhotse")
        searched = train(40, [finder])
    expected = train(finder.plan.batch_size, [])
    assert searched.losses == expected.losses
    assert len(searched.losses) > 1
    torch.testing.assert_close(
        dict(searched.state_dict()), dict(expected.state_dict()), rtol=0, atol=0
    )
    assert finder.plan.verified
    return finder.plan


def test_a_budget_of_nodes_of_torch_geometric(tmp_path):
    loaders = pytest.importorskip("torch_geometric.loader", reason=MISSING)
    graphs = graphs_of([*range(5, 37)] * 8)

    def train(max_num, callbacks):
        seed_everything(0)
        # Without num_steps the sampler has no length, and Lightning raises its error.
        sampler = loaders.DynamicBatchSampler(
            graphs, max_num=max_num, mode="node", shuffle=True, num_steps=12
        )
        loader = loaders.DataLoader(graphs, batch_sampler=sampler)
        return fit(Graphs(), loader, callbacks, tmp_path)

    plan = train_within_budget(
        train, batch_arg_name="max_num", max_batch_size=300, min_steps_per_epoch=None
    )
    assert (plan.batch_size, plan.budget_name) == (300, "max_num")


def test_a_budget_of_seconds_of_lhotse(tmp_path):
    lhotse = pytest.importorskip("lhotse", reason=MISSING)
    sampling = pytest.importorskip("lhotse.dataset.sampling", reason=MISSING)
    cuts = []
    for index in range(200):
        seconds = 1.0 + index % 9
        cuts.append(
            lhotse.MonoCut(
                f"cut-{index}",
                start=0.0,
                duration=seconds,
                channel=0,
                recording=lhotse.Recording(
                    f"recording-{index}", [], 16_000, int(16_000 * seconds), seconds
                ),
            )
        )
    cuts = lhotse.CutSet.from_cuts(cuts)

    class Seconds(torch.utils.data.Dataset):
        """A waveform of four samples a second for each of the cuts."""

        def __getitem__(self, batch):
            longest = max(cut.duration for cut in batch)
            return [torch.ones(len(batch), int(4 * longest))]

    class Voices(Linear):
        def __init__(self):
            super().__init__()
            self.losses = []

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch[0].unfold(1, 4, 4)).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

    def train(max_duration, callbacks):
        seed_everything(0)
        sampler = sampling.SimpleCutSampler(cuts, max_duration=float(max_duration), shuffle=True)
        # Lhotse's data sets take a whole batch of cuts.
        loader = DataLoader(Seconds(), sampler=sampler, batch_size=None)
        return fit(Voices(), loader, callbacks, tmp_path)

    # The sampler keeps its limits in this object.
    plan = train_within_budget(
        train, batch_arg_name="time_constraint.max_duration", max_batch_size=100
    )
    assert (plan.batch_size, plan.budget_name) == (100, "max_duration")
