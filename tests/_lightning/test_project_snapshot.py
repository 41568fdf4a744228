import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from lightning_batchmem._lightning.clean_start import ProjectSnapshot, project_snapshot
from tests.helpers.lawful import Lawful, law, quiet_trainer


@pytest.mark.parametrize("size", [0, 2, 9])
def test_a_tensor_that_a_step_resizes(size):
    module = LightningModule()
    module.register_buffer("values", torch.arange(4.0))
    state = ProjectSnapshot(module)
    module.values.untyped_storage().resize_(4 * size)
    module.values.resize_(size).fill_(-1)
    state.restore_or_warn()
    assert torch.equal(module.values, torch.arange(4.0))
    # The training can resize the tensor again.
    module.values.resize_(9)


class Deep(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.layers[1].eval()
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.metric = MeanMetric()
        self.memory = [1, [2, 3]]
        self.alias = self.memory
        self.average = torch.ones(3)
        self.data = TensorDataset(torch.zeros(4))


def disturb(module):
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.add_(1)
    module.layers[0].weight.requires_grad_(False)
    module.layers[0].bias.data = torch.zeros(3)
    module.layers[1].train()
    module.tied.bias.grad = torch.ones(3)
    module.hidden = torch.full((2,), 7.0)
    module.metric.update(torch.tensor(5.0))
    module.memory[1].append(4)
    module.average += 1
    module.added = "new"
    module.layers.register_forward_hook(lambda *_: None)
    module.register_buffer("late", torch.zeros(1))
    del module.alias


def described(module):
    """Everything that ``disturb`` changes, and which objects hold it."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(),
        ("average", module.average),
    ]
    values = [
        (name, id(one), one.data_ptr(), one.requires_grad, one.grad, one.tolist())
        for name, one in tensors
    ]
    modules = [
        (one.training, dict(one._forward_hooks), sorted(vars(one))) for one in module.modules()
    ]
    others = [
        module.metric.update_count,
        str(module.memory),
        id(module.memory),
        id(vars(module).get("alias")),
    ]
    return [values, modules, others]


def test_a_module_is_restored():
    module = Deep()
    called = []
    handle = module.layers.register_forward_pre_hook(lambda *_: called.append(1))
    before = described(module)
    kept = ProjectSnapshot(module)
    disturb(module)
    assert all(old != new for old, new in zip(before, described(module), strict=True))
    kept.restore_or_warn()
    assert described(module) == before
    module.layers(torch.zeros(2, 3))
    # The handle works only if the table of hooks that it refers to is still that of the module.
    handle.remove()
    module.layers(torch.zeros(2, 3))
    assert called == [1]


def test_a_lazy_parameter_is_refused():
    class Lazy(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.LazyLinear(3)

    with pytest.raises(ValueError, match=r"lazy parameter 'layer\.weight'"):
        ProjectSnapshot(Lazy())


def test_the_state_of_a_configured_optimizer_is_not_copied(device):
    module = Lawful(device, law)
    copied = []

    def count(trainer, _):
        assert len(trainer.optimizers[0].state) == 2
        copied.append({id(saved.tensor) for saved in project_snapshot(trainer).attributes.tensors})

    with pytest.warns(UserWarning, match="training loader was built before"):
        quiet_trainer(LambdaCallback(on_train_end=count), max_steps=1).fit(module)
    assert copied == [set(map(id, module.parameters()))]
