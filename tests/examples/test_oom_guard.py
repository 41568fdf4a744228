"""The example that runs in parts what does not fit, on a CPU that acts as if it were full."""

import gc
import importlib
import re
import weakref
from itertools import accumulate, pairwise

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from examples.oom_guard import OomGuard, main, samples_in
from lightning_batchmem import BatchFinder
from tests.helpers.lawful import MIB, Lawful, law, quiet_trainer

# The samples of each batch. More than four do not fit.
SIZES = (4, 3, 9, 4, 8, 7, 6, 5, 4)
FITS = 4


def fail():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Failing(LightningModule):
    """A network in float64, whose memory ends at a place of a step with too many samples.

    Args:
        place: ``"forward"``, ``"backward"`` (when half of the gradients exist), or ``"last part"``
            (in forward, and once in backward of a last part that fits, which has logged).
        norm: a layer.
    """

    def __init__(self, place=None, norm=nn.LayerNorm):
        super().__init__()
        self.place = place
        self.layers = nn.Sequential(
            nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Linear(16, 1)
        ).double()
        self.samples = []

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["more"][0]
        self.samples.append(len(x))
        self.log("before", y.mean(), on_step=True, on_epoch=True)
        hidden = self.layers[:2](x)
        if len(x) > FITS and self.place in ("forward", "last part"):
            fail()
        if len(x) > FITS and self.place == "backward":
            hidden.register_hook(lambda _: fail())
        if self.place == "last part" and self.is_last_part():
            hidden.register_hook(lambda _: fail())
        loss = (self.layers[2:](hidden) - y).square().mean()
        self.log_dict({"after": loss}, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def is_last_part(self):
        """Whether the last of four parts of nine samples runs, or of two parts of eight."""
        return self.samples[-4:] == [2, 2, 2, 3] or self.samples[-3:] == [8, 4, 4]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=0.01)


class Steps(Callback):
    """The gradients, the loss and the logged values of each step."""

    def __init__(self):
        self.all = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.all.append([parameter.grad.clone() for parameter in pl_module.parameters()])

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.all.append([outputs["loss"], dict(trainer.callback_metrics)])

    def on_train_end(self, trainer, pl_module):
        self.all.append(dict(trainer.callback_metrics))
        self.all.append(dict(pl_module.state_dict()))


def loader(sizes=SIZES):
    """Batches of these sizes, as tensors in containers."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, sum(sizes), 6, generator=generator, dtype=torch.float64)
    ends = list(accumulate(sizes, initial=0))
    return DataLoader(
        TensorDataset(x, y[:, :1]),
        batch_sampler=[list(range(begin, end)) for begin, end in pairwise(ends)],
        collate_fn=lambda samples: {
            "x": torch.stack([one for one, _ in samples]),
            "more": (torch.stack([other for _, other in samples]),),
        },
    )


def trained(module, *callbacks, loaders=None, **options):
    seed_everything(5, verbose=False)
    steps = Steps()
    trainer = quiet_trainer(*callbacks, steps, **{"max_epochs": 2, **options})
    trainer.fit(module(), loader() if loaders is None else loaders)
    return steps.all


# --- what it does


@pytest.mark.filterwarnings("ignore:OomGuard. a batch ran out of memory")
def test_the_example_shows_equal_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main()
    *_, last = capsys.readouterr().out.splitlines()
    text = r"4 of 12 batches ran in parts; weights differ by at most (\S+)"
    assert float(re.fullmatch(text, last)[1]) < 1e-5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:OomGuard. a batch ran out of memory")
@pytest.mark.parametrize("place", ["forward", "backward", "last part"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_parts_equal_the_whole_batch(place, clip):
    whole = trained(Failing, gradient_clip_val=clip)
    guard = OomGuard()
    modules = []

    def make():
        modules.append(Failing(place))
        return modules[0]

    in_parts = trained(make, guard, gradient_clip_val=clip)
    assert guard.oom_splits == 2 * sum(size > FITS for size in SIZES)
    assert_close(in_parts, whole, rtol=1e-12, atol=1e-14)
    # Nine samples fail as a whole and in two parts, or in four.
    tried = {
        "forward": [9, 4, 5, 2, 2, 2, 3],
        "backward": [9, 4, 5, 2, 2, 2, 3],
        "last part": [9, 4, 5, 2, 2, 2, 3, 1, 1, 1, 1, 1, 1, 1, 2],
    }
    (module,) = modules
    assert module.samples[2 : 2 + len(tried[place])] == tried[place]
    # The next fit counts anew.
    trained(Failing, guard, max_epochs=1)
    assert guard.oom_splits == 0


def test_a_training_without_errors_is_the_same_bit_for_bit():
    guard = OomGuard()
    assert_close(trained(Failing, guard), trained(Failing), rtol=0.0, atol=0.0)
    assert guard.oom_splits == 0


class WithLbfgs(Failing):
    """Runs the closure several times in a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.filterwarnings("ignore:OomGuard. a batch ran out of memory")
def test_an_optimizer_that_calls_the_closure_several_times():
    whole = trained(WithLbfgs, max_steps=3)
    guard = OomGuard()
    assert_close(trained(lambda: WithLbfgs("backward"), guard, max_steps=3), whole)
    assert guard.oom_splits == 3


def test_the_first_batch_in_parts_is_a_warning():
    with pytest.warns(UserWarning, match="and then ran in 4 parts") as caught:
        trained(lambda: Failing("forward"), OomGuard(), max_epochs=1)
    assert sum("OomGuard" in str(one.message) for one in caught) == 1


class Holding(Failing):
    """Notes which tensors of failed attempts are alive when a part begins."""

    def __init__(self, place):
        super().__init__(place)
        self.held = []
        self.alive = []

    def training_step(self, batch, batch_idx):
        self.alive.append(sum(one() is not None for one in self.held))
        taken = torch.zeros(len(batch["x"]))
        if len(taken) > FITS:
            self.held.append(weakref.ref(taken))
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _, taken=taken: None)
        return loss


@pytest.mark.filterwarnings("ignore:OomGuard. a batch ran out of memory")
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_failed_attempt_holds_no_tensors(place, monkeypatch):
    # Without it only references count.
    monkeypatch.setattr("examples.oom_guard.garbage_collection_cuda", lambda: None)
    modules = []
    gc.disable()
    try:
        trained(
            lambda: modules.append(Holding(place)) or modules[0], OomGuard(), loaders=loader([9])
        )
    finally:
        gc.enable()
    assert (len(modules[0].held), len(modules[0].alive)) == (2 * 2, 2 * 7)
    assert set(modules[0].alive) == {0}


# --- where parts cannot equal the whole


class Manual(Failing):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


REFUSED = {
    "BatchNorm": (lambda: Failing(norm=nn.BatchNorm1d), {}, r"BatchNorm \(layers.1\) would"),
    "BatchNorm without means": (
        lambda: Failing(norm=lambda n: nn.BatchNorm1d(n, track_running_stats=False).eval()),
        {},
        r"BatchNorm \(layers.1\) would",
    ),
    "accumulation": (Failing, {"accumulate_grad_batches": 2}, "a backward that fails"),
    "manual": (Manual, {}, "training_step steps the optimizers itself"),
}


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_at_the_start(name):
    make, options, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"OomGuard cannot run batches in parts, because {reason}"):
        trained(make, OomGuard(), **options)


def test_several_ranks_are_refused():
    trainer = quiet_trainer(strategy="ddp", devices=2)
    with pytest.raises(ValueError, match=r"because ranks wait .*\(DDPStrategy\)"):
        OomGuard().on_fit_start(trainer, Failing())


class Accumulating(Callback):
    """Accumulates from a hook on."""

    def __init__(self, hook):
        setattr(self, hook, self.accumulate)

    def accumulate(self, trainer, *_):
        trainer.accumulate_grad_batches = 3


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start"])
def test_accumulation_that_another_callback_sets(hook):
    callbacks = (OomGuard(), Accumulating(hook))
    if hook == "on_fit_start":
        with pytest.raises(ValueError, match="gradients of earlier batches"):
            trained(Failing, *callbacks)
        return
    # The third batch is the first one that does not fit, and steps.
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(lambda: Failing("backward"), *callbacks)
    (note,) = raised.value.__notes__
    assert "gradients of earlier batches" in note


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
def test_batch_norm_that_is_frozen_is_accepted():
    guard = OomGuard()
    trained(lambda: Failing(norm=lambda size: nn.BatchNorm1d(size).eval()), guard, max_epochs=1)
    assert guard.oom_splits == 0


class One(LightningModule):
    """Has room for no sample."""

    def training_step(self, batch, batch_idx):
        fail()

    def configure_optimizers(self):
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (torch.zeros(3, 2), "one sample does not fit"),
        ({"x": torch.zeros(3), "edges": torch.zeros(2, 9)}, "it holds something other than"),
        ([torch.zeros(3), ["a", "b", "c"]], "it holds something other than"),
        ({"x": torch.zeros(3), "samples": 3}, "it holds something other than"),
        ({"x": torch.zeros(3), "epoch": torch.tensor(3)}, "it holds something other than"),
    ],
    ids=["one sample", "edges", "texts", "number", "tensor without dimensions"],
)
def test_a_batch_that_cannot_be_split_is_the_error(batch, reason):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        quiet_trainer(OomGuard(), max_steps=1).fit(One(), DataLoader([batch], batch_size=None))
    (note,) = raised.value.__notes__
    assert note.startswith(f"OomGuard cannot split this batch, because {reason}")


def test_the_samples_of_a_batch():
    x = torch.zeros(5, 2)
    assert samples_in({"x": x, "more": [(x, x[:, 0])]}) == 5
    assert samples_in([]) is None


class ReturnsMore(Failing):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "outputs": batch}


class LogsMetric(Failing):
    def __init__(self, place):
        super().__init__(place)
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("metric", self.metric)
        return loss


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ReturnsMore, "training_step must return its loss, a tensor,"),
        (LogsMetric, r"log\('metric'\) must get a number"),
    ],
)
def test_what_a_part_cannot_return_or_log(kind, text):
    with pytest.raises(TypeError, match=text):
        trained(lambda: kind("forward"), OomGuard())


# --- what it leaves


@pytest.mark.filterwarnings("ignore:OomGuard. a batch ran out of memory")
@pytest.mark.parametrize("sizes", [SIZES, (9, 3, 0)], ids=["a training", "one that fails"])
def test_the_module_gets_its_own_methods_back(sizes):
    module = Failing("forward")
    # A module that is compiled has such an attribute too.
    own = module.training_step
    module.training_step = own
    if 0 in sizes:
        with pytest.raises(RuntimeError):
            trained(lambda: module, OomGuard(), loaders=loader(sizes))
    else:
        trained(lambda: module, OomGuard(), loaders=loader(sizes))
    names = {"training_step", "log", "optimizer_zero_grad", "optimizer_step"}
    assert names & vars(module).keys() == {"training_step"}
    assert vars(module)["training_step"] is own


class Bounded(Lawful):
    """Fails above 50 samples, which no line shows."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) > 50:
            fail()
        return loss


def test_a_search_sees_the_errors_itself(fit, fake_device):
    plans = []
    guard = OomGuard()
    for guards in ([], [guard]):
        device = fake_device(available_bytes=500 * MIB)
        finder = BatchFinder(multiple_of=1, min_steps_per_epoch=None)
        fit(Bounded(device, law), finder, device, *guards)
        plans.append((finder.plan.batch_size, [trial.outcome for trial in finder.plan.trials]))
    assert plans[0] == plans[1]
    assert "out_of_memory" in plans[0][1]
    assert guard.oom_splits == 0


@pytest.mark.parametrize("package", ["lightning_batchmem", "lightning_batchmem.pytorch_lightning"])
def test_the_old_name_says_where_it_went(package):
    with pytest.raises(ImportError, match=r"copy examples/oom_guard\.py of its repository"):
        exec(f"from {package} import OomGuard")
    module = importlib.import_module(package)
    assert "OomGuard" not in dir(module)
    assert not hasattr(module, "Unknown")
