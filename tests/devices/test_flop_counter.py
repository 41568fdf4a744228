import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_batchmem.devices.flop_counter import FlopCounter, _needs_formula
from lightning_batchmem.devices.peaks import LiveStorages


def count(network, inputs):
    counter = FlopCounter(network)
    with counter:
        network(inputs).square().mean().backward()
    return counter


def test_a_linear_layer_counts_twice_m_n_k_for_each_product():
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    counter = count(network, torch.randn(8, 16))
    first = 2 * 8 * 16 * 64
    second = 2 * 8 * 64 * 4
    # The first layer has no gradient of its inputs.
    assert counter.flops == 2 * first + 3 * second
    assert counter.why_wrong == ""
    assert not counter.has_convolutions


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution_counts_the_channels_of_its_groups(groups):
    network = nn.Conv2d(8, 16, 3, padding=1, groups=groups)
    counter = count(network, torch.randn(4, 8, 10, 10))
    forward = 2 * 4 * (10 * 10) * 16 * (8 // groups) * 3 * 3
    assert counter.flops == 2 * forward
    assert counter.has_convolutions


def test_a_transposed_convolution_counts_the_positions_of_its_inputs():
    network = nn.ConvTranspose2d(8, 16, 4, stride=2)
    counter = count(network, torch.randn(4, 8, 5, 5, requires_grad=True))
    assert counter.flops == 3 * 2 * 4 * (5 * 5) * 8 * 16 * 4 * 4


def test_attention_on_the_cpu_counts_the_products_with_keys_and_values():
    network = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    inputs = torch.randn(2, 6, 16)
    counter = count(network, inputs)
    tokens = 2 * 6
    projections = 2 * tokens * 16 * (3 * 16 + 16)
    feed_forward = 2 * tokens * 2 * 16 * 32
    # Each of the heads multiplies 6 queries of 4 numbers with 6 keys, and the result with values.
    products = 2 * 2 * (2 * 4 * 6 * 6 * 4)
    first = 2 * tokens * 16 * 3 * 16
    # The formula of torch has a fifth product in backward, since the kernel computes one again.
    attention = products + products // 2 * 5
    assert counter.flops == 3 * (projections + feed_forward) - first + attention
    assert counter.why_wrong == ""


def test_without_groups_the_count_is_that_of_torch():
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 5)
    )
    inputs = torch.randn(4, 3, 16, 16)
    expected = FlopCounterMode(display=False)
    with expected:
        network(inputs).square().mean().backward()
    assert count(network, inputs).flops == expected.get_total_flops() > 0


def gradients(network, inputs, mode=None):
    torch.manual_seed(1)
    network.zero_grad()
    if mode is None:
        network(inputs).square().mean().backward()
    else:
        with mode:
            network(inputs).square().mean().backward()
    return [weight.grad.clone() for weight in network.parameters()]


def test_the_counted_step_computes_the_same_bits():
    network = nn.Sequential(nn.Linear(16, 64), nn.Mish(), nn.Dropout(0.3), nn.Linear(64, 4))
    inputs = torch.randn(8, 16)
    plain = gradients(network, inputs)
    counted = gradients(network, inputs, FlopCounter(network))
    assert all(map(torch.equal, plain, counted))


def test_an_lstm_on_the_cpu_has_no_formula():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(16, 8)
            self.head = nn.Linear(8, 1)

        def forward(self, inputs):
            return self.head(self.lstm(inputs)[0])

    counter = count(Net(), torch.randn(5, 2, 16))
    assert counter.flops > 0
    assert counter.why_wrong == "torch has no formula for what lstm (LSTM) computes"


def test_modules_that_multiply_no_matrices_are_no_reason():
    network = nn.Sequential(
        nn.Embedding(10, 16), nn.LayerNorm((5, 16)), nn.PReLU(16), nn.Linear(16, 3)
    )
    network[2].weight = nn.Parameter(torch.full((5,), 0.1))
    counter = count(network, torch.randint(0, 10, (4, 5)))
    assert counter.why_wrong == ""


def test_a_layer_without_samples_is_no_reason():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)

        def forward(self, inputs):
            return torch.cat([self.used(inputs), self.unused(inputs[:0])])

    assert count(Experts(), torch.randn(3, 4)).why_wrong == ""


def test_layers_in_inference_mode_count_nothing():
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Linear(4, 4)
            self.student = nn.Linear(4, 4)

        def forward(self, inputs):
            with torch.inference_mode():
                target = self.teacher(inputs)
            return self.student(inputs) - target.clone()

    reason = "torch has no formula for what teacher (Linear) computes"
    assert count(Distilled(), torch.randn(3, 4)).why_wrong == reason


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_counts_twice(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, inputs):
            return checkpoint(self.block, inputs, use_reentrant=reentrant)

    counter = count(Checkpointed(), torch.randn(3, 4, requires_grad=True))
    assert counter.why_wrong.startswith("backward computes activations again")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_without_a_module_is_noticed(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, inputs):
            return checkpoint(lambda x: (x @ self.weight).tanh(), inputs, use_reentrant=reentrant)

    counter = count(Checkpointed(), torch.randn(3, 4, requires_grad=True))
    assert counter.why_wrong.startswith("backward computes activations again")


def test_an_operator_of_another_library_needs_a_formula():
    with torch.library._scoped_library("demo_flops", "FRAGMENT") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.impl("product", torch.matmul, "CompositeExplicitAutograd")
        network = nn.Linear(4, 4)
        counter = FlopCounter(network)
        with counter:
            inputs = network(torch.randn(3, 4)).detach()
            torch.ops.demo_flops.product(inputs, inputs.T)
        assert "the operator demo_flops.product" in counter.why_wrong


def test_a_formula_that_fails_does_not_end_the_step(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("an unexpected shape")

    formulas = "lightning_batchmem.devices.flop_counter.flop_registry"
    monkeypatch.setattr(formulas, {torch.ops.aten.addmm: fail})
    counter = count(nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4))
    assert counter.why_wrong == "torch has no formula for what 0 (Linear) computes"


def test_a_step_without_products_has_no_number():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(4))

        def forward(self, inputs):
            return self.factor * inputs

    assert count(Scale(), torch.randn(3, 4)).why_wrong == "no operator of the step has a formula"


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("aten.add", False),
        ("aten.convert_element_type", False),
        ("aten.native_layer_norm", False),
        ("aten._thnn_fused_lstm_cell", False),
        ("aten._cudnn_rnn_flatten_weight", False),
        ("aten.upsample_bilinear2d", False),
        ("c10d.allreduce_", False),
        ("aten._cudnn_rnn", True),
        ("aten._grouped_mm", True),
        ("aten.addmm_", True),
        ("aten._transformer_encoder_layer_fwd", True),
        ("flash_attn._flash_attn_forward", True),
    ],
)
def test_the_name_of_an_operator_shows_whether_it_may_multiply(operator, expected):
    assert _needs_formula(operator) == expected


def test_the_work_of_an_optimizer_does_not_count():
    network = nn.Linear(4, 4)
    counter = FlopCounter(network)
    inputs = torch.randn(3, 4)
    with counter:
        network(inputs).sum().backward()
        counted = counter.flops
        counter.begin_optimizer_step()
        torch.mm(inputs, inputs.T)
        counter.end_optimizer_step()
        assert counter.flops == counted
        counter.begin_optimizer_step()
        # A closure runs another forward pass.
        network(inputs)
        counter.continue_step()
        counter.end_optimizer_step()
        assert counter.flops == counted + 2 * 3 * 4 * 4


def test_nothing_is_left_behind():
    network = nn.Linear(4, 4)
    with pytest.raises(RuntimeError), FlopCounter(network):
        network(torch.randn(3, 5))
    assert LiveStorages.is_possible()
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
