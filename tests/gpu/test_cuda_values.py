"""Values on the stub of the CUDA runtime, whose kernels do nothing."""

import copy
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore
from torch.distributions import Bernoulli, Categorical, Normal
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_batchmem.simulated_gpu.values import Values
from tests.helpers.cuda_stub import is_cuda_stub

MIB = 2**20
pytestmark = pytest.mark.skipif(not is_cuda_stub(), reason="kernels have results on a real device")


@pytest.fixture
def values():
    values = Values()
    values.enter()
    yield values
    values.exit()


def unknown(*shape, dtype=torch.float32):
    """A result of a weight."""
    weight = nn.Parameter(torch.ones(shape)).to("cuda")
    return (weight.detach() * 2).to(dtype)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0).values,
    "argmax": lambda x: x.argmax(-1),
    "compare": lambda x: x > 1,
    "float": lambda x: x.float().exp().round(),
    "sum": lambda x: x.sum(0, keepdim=True),
    "clone": torch.clone,
}
VIEWS = {
    "transpose": lambda x: x.transpose(0, -1),
    "flip": lambda x: x.flip(0),
    "every second": lambda x: x[::2],
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "reshape": lambda x: x.reshape(-1, 1),
    "windows": lambda x: x.unfold(0, 1, 1),
}
IN_PLACE = {
    "add_": lambda x: x.add_(1),
    "set part": lambda x: x[:1].fill_(3) if x.dim() else x,
    "mask": lambda x: x.masked_fill_(x > 2, 0),
    "index_put": lambda x: x.index_put_((x == 0,), x.new_tensor(5)),
    "copy": lambda x: x.copy_(torch.ones_like(x)),
}
OPERATIONS = {**UNARY, **VIEWS, **IN_PLACE}


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=6, max_size=6),
    st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=6),
)
def test_known_arithmetic_equals_that_of_the_host(numbers, names):
    values = Values()
    values.enter()
    try:
        on_host = torch.tensor(numbers).view(2, 3)
        on_device = on_host.to("cuda")
        whole = on_device
        for name in names:
            try:
                following = OPERATIONS[name](on_host)
            # What the host cannot compute is unknown.
            except NotImplementedError:
                break
            # Some pairs do not go together, as a write to an expanded tensor.
            except (RuntimeError, IndexError) as error:
                with pytest.raises(type(error)):
                    OPERATIONS[name](on_device)
                break
            on_host, on_device = following, OPERATIONS[name](on_device)
            assert on_device.is_cuda
            assert on_device.tolist() == on_host.tolist()
            assert on_device.cpu().equal(on_host)
        assert len(whole.tolist()) == 2
        assert values.assumptions == []
    finally:
        values.exit()


def test_constants_and_random_numbers_are_known(values):
    device = torch.device("cuda")
    assert torch.tensor([1, 2], device=device)[1].item() == 2
    assert torch.full((3,), 7, device=device).tolist() == [7, 7, 7]
    assert torch.ones(2**20, device=device).sum().item() == 2**20
    assert torch.eye(3, dtype=torch.bool, device=device).sum().item() == 3
    assert sorted(torch.randperm(100, device=device).tolist()) == list(range(100))
    assert 0.1 < (torch.rand(10_000, device=device) < 0.15).float().mean().item() < 0.2
    assert torch.bernoulli(torch.full((1000,), 0.5, device=device)).mean().item() < 0.7
    assert torch.empty(1000, device=device).normal_(5, 0.1).min().item() > 4
    assert torch.randint(3, 5, (100,), device=device).unique().tolist() == [3, 4]
    drawn = torch.multinomial(torch.tensor([0.0, 1.0], device=device), 5, replacement=True)
    assert drawn.tolist() == [1] * 5


def test_out_arguments_and_lists_are_known(values):
    first = torch.arange(4.0, device="cuda")
    out = torch.empty(4, device="cuda")
    torch.add(first, first, out=out)
    assert out.tolist() == [0, 2, 4, 6]
    parts = [first.clone(), torch.zeros(2, device="cuda")]
    torch._foreach_add_(parts, 1)
    assert [part.tolist() for part in parts] == [[1, 2, 3, 4], [1, 1]]
    torch._foreach_zero_(parts)
    assert parts[0].sum().item() == 0


def test_an_index_outside_of_a_known_tensor_is_an_error_of_the_program(values):
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        torch.arange(3, device="cuda")[torch.tensor([7], device="cuda")]


def test_a_type_without_a_kernel_on_the_host_is_unknown(values):
    numbers = torch.ones(3, device="cuda").to(torch.float8_e5m2)
    assert numbers.float().tolist() == [1, 1, 1]
    # The host cannot add them, and the device has no such kernel either.
    with pytest.raises(NotImplementedError):
        torch.add(numbers.cpu(), numbers.cpu())


def test_an_unknown_float_is_one(values):
    loss = unknown(1).sum()
    assert loss.item() == float(-loss) == loss.cpu().item() == 1.0


def test_checks_of_unknown_values_fit_together(values):
    x = unknown(4, 3)
    assert not torch.isnan(x).any()
    assert not torch.isnan(x).all()
    assert torch.isfinite(x).all()
    assert not (x == torch.inf).any()
    assert (x == x).all()
    assert x[~x.isnan()].shape == (12,)
    assert (x > 0).any()
    assert not (x < 0).any()
    assert (x >= 5).all(), "checks of all elements hold"
    assert torch.allclose(x, x + 1)
    assert torch.equal(x, x + 1)
    assert not torch.equal(x, x[:1])
    assert values.assumptions == []
    assert (x > 0).sum().item() == (x < 0).sum().item() == 12


def test_an_unknown_index_may_be_any(values):
    chosen = unknown(8, 4).argmax(-1)
    assert chosen.tolist() == [0] * 8
    assert all((chosen == number).any() for number in range(4))
    assert not (chosen == 3).all(), "a loop that waits for an end does not end at once"
    assert not (chosen == 3)[0]
    assert torch.isin(chosen, torch.arange(50, device="cuda")).shape == (8,)
    assert not (chosen < 0).any()
    assert (chosen < 4).all()


@pytest.mark.parametrize(
    ("shape_of", "shape", "words"),
    [
        (lambda x: x[x > 0], (12,), "all 12 are assumed"),
        (lambda x: (x > 0).nonzero(), (12, 2), "all 12 are assumed"),
        (lambda x: torch.where(x < 0)[1], (12,), "all 12 are assumed"),
        (lambda x: torch.masked_select(x, x[:1] > 0), (12,), "all 12 are assumed"),
        (lambda x: x.argmax(-1).unique(), (1,), "1 of 4 is assumed"),
        (lambda x: x.unique(), (12,), "all 12 are assumed"),
        (lambda x: torch.bincount(x.argmax(-1)), (1,), "the length of bincount"),
        (lambda x: torch.repeat_interleave(x, x.argmax(-1), 0), (4, 3), "1 for each of 4 elements"),
        (lambda x: torch.unique(x, dim=0), (4, 3), "all 4 are assumed"),
    ],
)
def test_a_shape_of_unknown_values_is_the_largest_and_the_line_is_named(
    values, shape_of, shape, words
):
    x = unknown(4, 3)
    for _ in range(2):
        assert shape_of(x).shape == shape
    (sentence,) = values.assumptions
    assert words in sentence
    assert "depends on values that are not computed (test_cuda_values.py:" in sentence


def test_shapes_of_known_values_are_those_of_a_device(values):
    x = torch.tensor([3, 1, 3, 0], device="cuda")
    assert x[x > 1].tolist() == [3, 3]
    assert x.nonzero().squeeze(1).tolist() == [0, 1, 2]
    assert [part.tolist() for part in x.unique(return_counts=True)] == [[0, 1, 3], [1, 1, 2]]
    assert torch.bincount(x).tolist() == [1, 1, 0, 2]
    assert torch.repeat_interleave(x, x).tolist() == [3, 3, 3, 1, 3, 3, 3]
    assert torch.isin(x, torch.tensor([1, 3] * 50, device="cuda")).tolist() == [1, 1, 1, 0]
    x[x == 3] = torch.tensor([8, 9], device="cuda")
    assert x.tolist() == [8, 1, 9, 0]
    assert values.assumptions == []


def test_a_mask_takes_as_many_places_as_there_are_values(values):
    x = unknown(10)
    x[x > 0] = torch.ones(4, device="cuda")
    assert values.assumptions == []


def test_a_line_is_named_once_for_both_passes(values):
    x = unknown(6, 2).requires_grad_()
    x[x > 0].sum().backward()
    assert x.grad.shape == (6, 2)
    assert len(values.assumptions) == 1


def test_a_part_of_unknown_memory_stays_unknown(values):
    weight = unknown(4, 4)
    weight[0] = 5.0
    assert weight[0, 0].item() != 5
    weight.fill_(5.0)
    assert weight[3, 3].item() == 5
    weight[1] = unknown(4)
    assert weight[0, 0].item() != 5


def test_fresh_memory_is_unknown_until_it_is_written(values):
    """A kernel that is not an operator of torch may have written to it."""
    x = torch.empty(8, device="cuda")
    assert x[x > 5].shape == (8,)
    x.fill_(1)
    assert x[x > 5].shape == (0,)


def test_memory_that_is_used_again_is_not_known(values):
    known = torch.full((1000,), 3, device="cuda")
    address = known.data_ptr()
    del known
    weight = torch.nn.Parameter(torch.ones(1000)).to("cuda")
    again = weight.detach().long()
    assert address in (weight.data_ptr(), again.data_ptr())
    assert again.max().item() == 0


def test_whole_numbers_are_copied_and_many_floats_are_not(values):
    labels = torch.arange(2**24).to("cuda")
    assert labels[-1].item() == 2**24 - 1
    images = torch.empty(2**25)
    before = resident_bytes()
    copied = images.to("cuda")
    assert copied[0].item() == 1.0
    copied.cpu()
    images.copy_(copied)
    assert resident_bytes() - before < 32 * MIB


def test_a_copy_to_the_host_takes_the_temporary_memory_of_torch(values):
    x = unknown(512, 1024)
    torch.cuda.reset_peak_memory_stats()
    # cudaMallocAsync does not count the bytes that were requested
    before = torch.cuda.memory_allocated()
    x.T.cpu()
    assert torch.cuda.max_memory_allocated() - before == x.nbytes
    torch.cuda.reset_peak_memory_stats()
    x.cpu()
    assert torch.cuda.max_memory_allocated() == before


def test_zeros_touch_no_memory(values):
    before = resident_bytes()
    state = torch.zeros(512 * MIB // 4, device="cuda")
    weight = torch.zeros_like(state)
    assert weight[0].item() == 0
    assert resident_bytes() - before < 32 * MIB


def test_weights_are_unknown_and_stay_so(values):
    layer = nn.Linear(3, 3).to("cuda")
    made_there = nn.Linear(3, 3, device="cuda")
    copied = copy.deepcopy(layer)
    for weight in (layer.weight, made_there.weight, copied.weight.data):
        assert weight[weight > 0].shape == (9,)


def test_no_elements_are_not_assumed(values):
    x = unknown(0, 3)
    assert x[x > 0].shape == (0,)
    assert values.assumptions == []


def test_a_loop_that_ends_by_a_value_is_ended(monkeypatch):
    monkeypatch.setattr("lightning_batchmem.simulated_gpu.assumptions.MOST_SECONDS", 0)
    values = Values()
    values.enter()
    values.reads.begin_step()
    loss = unknown(1).sum()

    def train():
        while loss.item() > 0.5:
            loss.mul_(0.5)

    try:
        with pytest.raises(RuntimeError, match=r"while loss.item\(\) > 0.5:\) has read 1,0"):
            train()
    finally:
        values.exit()


def test_a_step_of_the_counter_of_an_optimizer_is_known(values):
    layer = nn.Linear(3, 3).to("cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), capturable=True)
    for _ in range(3):
        layer(torch.ones(2, 3, device="cuda")).sum().backward()
        optimizer.step()
    assert optimizer.state[layer.weight]["step"].item() == 3


def test_known_values_stay_known_in_the_thread_of_a_backward_pass(values):
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append((gradient.sum().item(), gradient[gradient > 0].shape))
            return gradient * 2

    Doubled.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()
    assert seen == [(3.0, (3,))]


def test_a_gradient_scaler_finds_nothing(values):
    layer = nn.Linear(3, 3).to("cuda")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
    for _ in range(2):
        scaler.scale(layer(torch.ones(2, 3, device="cuda")).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16


def test_distributions_accept_their_arguments(values):
    mean = unknown(4, 3)
    normal = Normal(mean, mean.exp(), validate_args=True)
    assert normal.log_prob(normal.rsample()).shape == (4, 3)
    chosen = Categorical(probs=mean.softmax(-1), validate_args=True)
    assert chosen.log_prob(chosen.sample()).shape == (4,)
    Bernoulli(probs=mean.sigmoid(), validate_args=True).log_prob(torch.ones(4, 3, device="cuda"))
    scale = torch.tensor([1.0, -1.0], device="cuda")
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(2, device="cuda"), scale, validate_args=True)


class Watching(Dataset):
    """A data set whose samples say whether operators are watched where they are made."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return int(_get_current_dispatch_mode() is not None)


def test_workers_of_a_loader_leave_the_mode(values):
    here = next(iter(DataLoader(Watching(), 4)))
    in_worker = next(iter(DataLoader(Watching(), 4, num_workers=1)))
    assert (here.tolist(), in_worker.tolist()) == ([1] * 4, [0] * 4)


def test_batches_of_workers_are_known(values):
    loader = DataLoader(TensorDataset(torch.arange(32)), 8, num_workers=1, pin_memory=True)
    total = sum(batch.to("cuda", non_blocking=True).sum().item() for (batch,) in loader)
    assert total == 31 * 16


def test_an_error_of_the_program_keeps_its_traceback(values):
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        torch.ones(3, device="cuda") + torch.ones(4, device="cuda")
    assert caught.traceback[0].path == Path(__file__)


def test_a_device_that_is_full_says_so(values):
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(2**50, device="cuda")


def test_sparse_gradients_are_left_alone(values):
    embedding = nn.Embedding(10, 4, sparse=True).to("cuda")
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
    embedding(torch.tensor([1, 5], device="cuda")).sum().backward()
    optimizer.step()
    assert embedding.weight.grad.is_sparse


def test_a_subclass_runs_its_own_operators(values):
    nested = torch.nested.nested_tensor(
        [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")], layout=torch.jagged
    )
    assert (nested * 2).values().tolist() == [2.0] * 5


def test_a_mask_of_labels_leaves_out_the_diagonal(values):
    labels = torch.tensor([0, 0, 1, 1]).to("cuda")
    same = labels[:, None] == labels[None]
    same.fill_diagonal_(False)
    similar = unknown(4, 4)
    assert similar[same].shape == (4,)
    hardest = similar.masked_fill(~same, -torch.inf).max(1).values
    assert functional.relu(hardest).shape == (4,)
    assert values.assumptions == []


def test_assumptions_name_each_line_once(values):
    for size in (4, 8):
        x = unknown(size)
        for _ in range(2):
            x = x[x > 0]
    assert len(values.assumptions) == 1
    assert "all 8 are assumed" in values.assumptions[0]


def test_a_whole_number_picked_at_unknown_positions_may_be_the_largest(values):
    """As the numbers of graphs after a pooling, of which the largest is a shape."""
    numbers = torch.arange(7, device="cuda")
    picked = numbers[unknown(7).argsort()]
    assert int(picked.max()) + 1 == 7
    in_order, _ = picked.sort(stable=True)
    assert int(in_order.max()) + 1 == 7
    assert all(text.startswith("A whole number (6 is assumed)") for text in values.assumptions)


def test_a_whole_number_that_the_host_reads_is_named(values):
    counted = unknown(8, 3).argmax(1)
    assert int(counted.max()) == 0
    (sentence,) = values.assumptions
    assert sentence.startswith("A whole number (0 is assumed) depends on values")
    assert "int(counted.max()) == 0" in sentence


def test_a_result_on_the_host_beside_those_of_the_device(values):
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.ones(4, 3, device="cuda").cumsum(0), torch.tensor([4, 2, 1]), enforce_sorted=True
    )
    assert packed.batch_sizes.tolist() == [3, 2, 1, 1]
    assert packed.data.tolist() == [1, 1, 1, 2, 2, 3, 4]


def test_a_group_of_one_rank_receives_what_it_sends(values):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        sent = torch.arange(3, device="cuda")
        received = [torch.empty(3, dtype=torch.long, device="cuda")]
        torch.distributed.all_gather(received, sent)
        assert received[0].tolist() == [0, 1, 2]
        torch.distributed.all_reduce(sent)
        assert sent.tolist() == [0, 1, 2]
        torch.distributed.all_gather(received, unknown(3).long())
        assert received[0].tolist() == [0, 0, 0]
        assert len(values.assumptions) == 1
    finally:
        torch.distributed.destroy_process_group()
