import torch
from torch import nn

from lightning_batchmem.devices.breakdown import MemoryBreakdown, measure_breakdown

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A module with 10 x 4 tied weights, a buffer of 3 doubles and a frozen bias of 10."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def trained(module, optimizer, batch):
    module(batch).sum().backward()
    optimizer.step()


def test_bytes_by_hand_with_tied_weights():
    module = Tied()
    batch = torch.zeros(5, dtype=torch.int64)
    optimizer = torch.optim.Adam(p for p in module.parameters() if p.requires_grad)
    before = measure_breakdown(module, [optimizer], batch, CPU, start_bytes=10_000)
    weight = 10 * 4 * 4
    bias = 10 * 4
    buffer = 3 * 8
    data = 5 * 8
    assert before == MemoryBreakdown(
        weight + bias + buffer, 0, 0, data, 0, 10_000 - weight - bias - buffer - data
    )
    trained(module, optimizer, batch)
    # The state is two moments, and one float in which Adam counts its steps.
    state = 2 * weight + 4
    after = measure_breakdown(
        module, [optimizer], batch, CPU, start_bytes=10_000, peak_bytes=12_345
    )
    rest = 10_000 - weight - bias - buffer - weight - state - data
    assert after == MemoryBreakdown(weight + bias + buffer, weight, state, data, 2_345, rest)
    assert (after.peak_bytes, after.start_bytes) == (12_345, 10_000)


def test_a_storage_is_counted_in_the_first_part_that_holds_it():
    module = nn.Linear(8, 8, bias=False)
    batch = {"own": torch.ones(4), "view": module.weight[:2], "twice": [torch.ones(4)] * 2}
    breakdown = measure_breakdown(module, [], batch, CPU, start_bytes=1000)
    assert (breakdown.parameters_bytes, breakdown.batch_bytes) == (256, 32)


def test_master_copies_that_only_the_optimizer_knows_are_its_state():
    module = nn.Linear(4, 4, bias=False).half()
    master = module.weight.detach().float().requires_grad_()
    master.grad = torch.ones_like(master)
    optimizer = torch.optim.SGD([master], 0.1)
    breakdown = measure_breakdown(module, [optimizer], None, CPU, start_bytes=1000)
    assert breakdown.parameters_bytes == 32
    assert breakdown.gradients_bytes == 64
    assert breakdown.optimizer_state_bytes == 64


def test_other_devices_are_not_counted():
    module = nn.Linear(4, 4, device="meta")
    breakdown = measure_breakdown(module, [], torch.ones(4, device="meta"), CPU, start_bytes=7)
    assert breakdown == MemoryBreakdown(0, 0, 0, 0, 0, 7)


def test_lazy_and_sparse_tensors():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2, 2])).sum().backward()
    module = nn.ModuleList([embedding, nn.LazyLinear(3)])
    breakdown = measure_breakdown(module, [], None, CPU, start_bytes=1000)
    assert (breakdown.parameters_bytes, breakdown.gradients_bytes) == (160, 3 * 8 + 3 * 16)


def test_a_dtensor_counts_with_its_local_shard(tmp_path):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        # The whole tensor has the rows of four ranks, and this rank has a quarter of them.
        shard = DTensor.from_local(
            torch.ones(2, 4), mesh, [Shard(0)], shape=torch.Size((8, 4)), stride=(4, 1)
        )
        module = nn.Module()
        module.weight = nn.Parameter(shard)
        breakdown = measure_breakdown(module, [], None, CPU, start_bytes=1000)
    finally:
        torch.distributed.destroy_process_group()
    assert breakdown.parameters_bytes == 2 * 4 * 4


def test_a_peak_and_a_start_below_the_known_parts_leave_a_negative_rest_and_the_sum_exact():
    module = nn.Linear(10, 10, bias=False)
    breakdown = measure_breakdown(module, [], None, CPU, start_bytes=300, peak_bytes=350)
    assert (breakdown.other_bytes, breakdown.activations_bytes) == (-100, 50)
    assert breakdown.peak_bytes == 350
    at_start = MemoryBreakdown(10, 20, 30, 40, 0, 500)
    assert at_start.at_peak(590) == MemoryBreakdown(10, 20, 30, 40, 0, 490)


def test_what_was_kept_and_gradients_of_a_step_are_no_activations():
    at_start = MemoryBreakdown(10, 20, 30, 40, 0, 500)
    parts = at_start.at_peak(900, gradients_bytes=70, kept_bytes=100)
    assert parts == MemoryBreakdown(10, 70, 30, 40, 150, 500, 100)
    assert (parts.peak_bytes, parts.start_bytes) == (900, 750)
    # Fewer gradients than at the start are not at the peak, and the parts fit into it.
    assert at_start.at_peak(900, gradients_bytes=10) == MemoryBreakdown(10, 20, 30, 40, 300, 500)
    full = at_start.at_peak(650, gradients_bytes=70, kept_bytes=100)
    assert full == MemoryBreakdown(10, 20, 30, 40, 0, 500, 50)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another, which has the state."""

    def __init__(self, inner):
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        super().__init__(parameters, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def test_the_state_of_an_optimizer_inside_another():
    module = nn.Linear(4, 10)
    optimizer = Lookahead(torch.optim.Adam(module.parameters()))
    trained(module, optimizer, torch.ones(2, 4))
    breakdown = measure_breakdown(module, [optimizer], None, CPU, start_bytes=0)
    assert breakdown.optimizer_state_bytes == 2 * (40 + 10) * 4 + 2 * 4
