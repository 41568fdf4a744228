"""The gate of issue 58: batches made of samples (today) against batches read from the loader.

    tests/cuda_stub/run PYTHON -m benchmarks.gate_of_batches ragged [--seeds 5] [--gib 1.5]
    tests/cuda_stub/run PYTHON -m benchmarks.gate_of_batches speed
"""
import argparse, contextlib, ctypes, io, math, multiprocessing, os, random, sys, time, warnings, logging
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from lightning.pytorch import Callback, LightningModule, seed_everything
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from benchmarks.common import trainer_for, silence
from benchmarks.cuda_networks import Gpt
from benchmarks.cuda_search import counter, in_fork
from lightning_batchmem import BatchFinder
from lightning_batchmem._lightning.data_source import discard_train_loader
from lightning_batchmem.devices.out_of_memory import is_out_of_memory

SAMPLES = 20_000
VOCAB = 1000

class Texts(Dataset):
    def __init__(self, lengths): self.lengths = lengths
    def __len__(self): return len(self.lengths)
    def __getitem__(self, i): return torch.full((self.lengths[i],), i % VOCAB)

def padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)

def lognormal(generator):
    return min(512, max(8, round(generator.lognormvariate(4.0, 0.7))))
def rare(generator):
    # One in two thousand has 512 tokens, the others at most 128.
    return 512 if generator.random() < 1 / 2000 else generator.randint(16, 128)
def uniform(generator):
    return generator.randint(16, 256)

class Encoder(LightningModule):
    def __init__(self, batch_size, lengths):
        super().__init__()
        self.batch_size = batch_size
        self.embed = nn.Embedding(VOCAB, 256)
        self.body = nn.ModuleList([nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)])
        self.head = nn.Linear(256, VOCAB)
        self.texts = Texts(lengths)
    def loss(self, tokens):
        x = self.embed(tokens)
        for layer in self.body: x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
    def training_step(self, batch, i): return self.loss(batch)
    def validation_step(self, batch, i): self.loss(batch)
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
    def train_dataloader(self): return DataLoader(self.texts, batch_size=self.batch_size, shuffle=True, collate_fn=padded)
    def val_dataloader(self): return DataLoader(Texts(self.texts.lengths[:4000]), batch_size=self.batch_size, collate_fn=padded)

class GraphData(Dataset):
    def __init__(self, sizes): self.sizes = sizes
    def __len__(self): return len(self.sizes)
    def __getitem__(self, i):
        n = self.sizes[i]
        return torch.zeros(n, 16), torch.zeros(2, 4 * n, dtype=torch.int64)

def concatenated(samples):
    nodes = torch.cat([s[0] for s in samples]); edges = torch.cat([s[1] for s in samples], 1)
    return nodes, edges

class Graphs(LightningModule):
    def __init__(self, batch_size, sizes):
        super().__init__()
        self.batch_size = batch_size
        self.embed = nn.Linear(16, 128)
        self.body = nn.ModuleList([nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)) for _ in range(4)])
        self.graphs = GraphData(sizes)
    def loss(self, batch):
        x, edges = batch
        x = self.embed(x)
        for layer in self.body:
            messages = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
            x = x + layer(messages)
        return x.square().mean()
    def training_step(self, batch, i): return self.loss(batch)
    def validation_step(self, batch, i): self.loss(batch)
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
    def train_dataloader(self): return DataLoader(self.graphs, batch_size=self.batch_size, shuffle=True, collate_fn=concatenated)
    def val_dataloader(self): return DataLoader(GraphData(self.graphs.sizes[:4000]), batch_size=self.batch_size, collate_fn=concatenated)

def even_graph(generator): return generator.randint(10, 40)
def tailed_graph(generator): return min(2000, max(4, round(generator.lognormvariate(3.0, 1.2))))

RAGGED = {
    "text, lognormal": (Encoder, lognormal), "text, uniform": (Encoder, uniform), "text, one in 2000 long": (Encoder, rare),
    "graphs, even": (Graphs, even_graph), "graphs, heavy tail": (Graphs, tailed_graph),
}

class Slow(Dataset):
    def __init__(self, seconds): self.seconds = seconds
    def __len__(self): return 50_000
    def __getitem__(self, i):
        if self.seconds > 0.001: time.sleep(self.seconds)
        else:
            end = time.perf_counter() + self.seconds
            while time.perf_counter() < end: pass
        return torch.zeros(3, 32, 32), i % 10

class Images(LightningModule):
    def __init__(self, batch_size, seconds, width, workers):
        super().__init__()
        self.batch_size, self.seconds, self.workers = batch_size, seconds, workers
        self.network = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    def training_step(self, batch, i): return F.cross_entropy(self.network(batch[0]), batch[1])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self): return DataLoader(Slow(self.seconds), batch_size=self.batch_size, shuffle=True, num_workers=self.workers)

class Watch(Callback):
    def __init__(self, stop=False): self.begin, self.seconds, self.stop, self.steps, self.ooms = time.monotonic(), None, stop, 0, 0
    def on_train_start(self, trainer, module):
        self.seconds = time.monotonic() - self.begin
        self.ooms = counter("num_ooms")
        if self.stop: trainer.should_stop = True; trainer.fit_loop.epoch_loop.max_steps = 0; raise KeyboardInterrupt
    def on_train_batch_end(self, *_): self.steps += 1

def start(gib):
    silence(); torch.set_num_threads(1)
    ctypes.CDLL(None).cuda_stub_resize(ctypes.c_size_t(int(gib * 2**30)))
    torch.backends.cudnn.enabled = False

def fit(module, callbacks, epochs):
    trainer = trainer_for(callbacks, -1, accelerator="gpu", max_epochs=epochs, num_sanity_val_steps=2, limit_val_batches=1.0)
    trainer.fit(module)

def ragged(name, seed, gib, way):
    if way: os.environ["BATCHMEM_ONE_WAY"] = way
    else: os.environ.pop("BATCHMEM_ONE_WAY", None)
    start(gib)
    kind, draw = RAGGED[name]
    generator = random.Random(seed)
    lengths = [draw(generator) for _ in range(SAMPLES)]
    seed_everything(seed, verbose=False)
    module = kind(2, lengths)
    finder, watch = BatchFinder(min_steps_per_epoch=None), Watch()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            fit(module, [finder, watch], 3)
            outcome = "ok"
        except Exception as error:
            if not is_out_of_memory(error) or watch.seconds is None: return {"size": 0, "outcome": f"{type(error).__name__}: {error}"[:300]}
            outcome = f"DIES in step {watch.steps + 1}"
    retries = counter("num_alloc_retries")
    tried = " ".join(f"{t.batch_size}{t.kind[0]}{ {'ok':'','out_of_memory':'!','allocator_retry':'~'}.get(t.outcome,'?')}" for t in finder.plan.trials)
    return {"size": module.batch_size, "outcome": outcome, "steps": watch.steps, "search_s": round(watch.seconds, 1), "ooms": watch.ooms, "tried": tried}

def speed(seconds, width, workers, gib, way):
    if way: os.environ["BATCHMEM_ONE_WAY"] = way
    else: os.environ.pop("BATCHMEM_ONE_WAY", None)
    start(gib)
    module = Images(2, seconds, width, workers)
    finder, watch = BatchFinder(min_steps_per_epoch=None), Watch(stop=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try: fit(module, [finder, watch], 1)
        except (KeyboardInterrupt, SystemExit): pass
    return {"size": finder.plan.batch_size, "search_s": round(watch.seconds, 1)}

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what"); parser.add_argument("--seeds", type=int, default=5); parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--ways", nargs="*", default=["1"]); parser.add_argument("--only", nargs="*")
    a = parser.parse_args()
    if a.what == "ragged":
        for name in a.only or RAGGED:
            for seed in range(a.seeds):
                rows = {way: in_fork(ragged, name, seed, a.gib, way) for way in ["", *a.ways]}
                for way, row in rows.items():
                    ratio = row["size"] / rows[""]["size"] if rows[""]["size"] else math.nan
                    print(f"{name:24} seed {seed} {'read ' + way if way else 'samples':8} {ratio:5.2f} {row}", flush=True)
    else:
        for seconds in (0.02, 0.0001):
            for width, gib, workers in ((64, 1.0, 0), (64, 1.0, 2), (16, 1.0, 0)):
                rows = {way: in_fork(speed, seconds, width, workers, gib, way) for way in ["", *a.ways]}
                for way, row in rows.items():
                    print(f"{seconds * 1000:5.1f} ms/sample width {width} workers {workers} {'read ' + way if way else 'samples':8} {row['search_s'] / rows['']['search_s']:5.2f} {row}", flush=True)

if __name__ == "__main__":
    main()
