from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn, optim

from lightning_batchmem.measure.breakdown import measure_breakdown
from lightning_batchmem.measure.estimate import _RULES, Estimate, estimate_parts

CPU, META = torch.device("cpu"), torch.device("meta")
Muon = getattr(optim, "Muon", None)  # not in torch 2.5.1

# each with the options that change what is kept, or how and where
OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "foreach": True}),
    (optim.Adam, {"fused": True, "weight_decay": 0.1}),
    (optim.Adam, {"lr": torch.tensor(1e-3)}),  # four bytes that the optimizer keeps as well
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "fused": True}),
    (optim.NAdam, {}),
    (optim.NAdam, {"foreach": True, "decoupled_weight_decay": True}),
    (optim.RAdam, {}),
    (optim.RAdam, {"foreach": True}),
    (optim.Adamax, {}),
    (optim.Adamax, {"foreach": True, "maximize": True}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9}),
    (optim.RMSprop, {"centered": True, "foreach": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"fused": True, "initial_accumulator_value": 0.1}),
    (optim.Adadelta, {}),
    (optim.Adadelta, {"foreach": True, "weight_decay": 0.1}),
    (optim.ASGD, {}),
    (optim.ASGD, {"foreach": True, "t0": 0}),
    (optim.Rprop, {}),
    (optim.Rprop, {"foreach": True}),
    (optim.Adafactor, {}),
    (optim.Adafactor, {"foreach": True}),
]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Parameters of 1, 2 and 3 dimensions, and a buffer."""
    module = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(6, 4)).to(dtype)
    module.register_buffer("scale", torch.ones(5))
    return module


def measured(module: nn.Module, optimizers: list[Any], batch: object, device: torch.device = CPU) -> Estimate:
    breakdown = measure_breakdown(module, optimizers, batch, device, start_bytes=0)
    return Estimate(
        breakdown.parameters_bytes, breakdown.gradients_bytes, breakdown.optimizer_state_bytes, breakdown.batch_bytes
    )


def step(module: nn.Module, batch: Tensor, *optimizers: optim.Optimizer) -> None:
    module(batch).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def check(module: nn.Module, batch: Tensor, *optimizers: optim.Optimizer) -> Estimate:
    """The estimate before the first step is what is measured after one and after two, to the byte."""
    estimate = estimate_parts(module, optimizers, batch, CPU)
    for _ in range(2):
        step(module, batch, *optimizers)
        assert estimate == measured(module, list(optimizers), batch)
        assert estimate == estimate_parts(module, optimizers, batch, CPU)
    return estimate


@pytest.mark.parametrize(
    ("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", None) or "-".join(value)
)
def test_the_estimate_is_what_real_steps_leave(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    module = network()
    estimate = check(module, torch.ones(5, 2, 3), kind(module.parameters(), **options))
    assert estimate.parameters_bytes == 4 * (3 * 2 * 2 + 3 + 4 * 6 + 4) + 5 * 4
    assert (estimate.gradients_bytes, estimate.batch_bytes) == (estimate.parameters_bytes - 5 * 4, 5 * 2 * 3 * 4)


@pytest.mark.skipif(Muon is None, reason="this torch has no Muon")
@pytest.mark.parametrize("momentum", [0.95, 0.0])
def test_muon_keeps_one_copy_whatever_its_momentum(momentum: float) -> None:
    assert Muon is not None
    module = nn.Linear(6, 4, bias=False)  # it takes matrices only
    assert check(module, torch.ones(5, 6), Muon(module.parameters(), momentum=momentum)).optimizer_state_bytes == 96


def test_sparse_adam_keeps_dense_copies_and_its_gradients_are_smaller_than_estimated() -> None:
    module, batch = nn.Embedding(10, 4, sparse=True), torch.tensor([1, 2, 2])
    optimizer = optim.SparseAdam(module.parameters())
    estimate = estimate_parts(module, [optimizer], batch, CPU)
    assert estimate == Estimate(160, 160, 320, 24)
    step(module, batch, optimizer)
    found = measured(module, [optimizer], batch)
    assert found.optimizer_state_bytes == 320
    assert found.gradients_bytes == 3 * 8 + 3 * 16


def test_every_optimizer_of_torch_has_a_rule_that_is_tested_here_or_is_known_to_have_none() -> None:
    of_torch = {one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, optim.Optimizer)}
    assert of_torch - set(_RULES) == {optim.Optimizer, optim.LBFGS}
    tested_on_their_own = {optim.SparseAdam, *([Muon] if Muon else [])}
    assert set(_RULES) == {kind for kind, _ in OPTIMIZERS} | tested_on_their_own


def test_what_lbfgs_keeps_grows_and_is_unknown() -> None:
    module = nn.Linear(3, 5)
    assert estimate_parts(module, [optim.LBFGS(module.parameters())], None, CPU).optimizer_state_bytes is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [optim.Adam, optim.Adafactor, optim.Adagrad, optim.RMSprop])
def test_state_has_the_type_of_the_parameter(kind: type[optim.Optimizer], dtype: torch.dtype) -> None:
    module = network(dtype)
    check(module, torch.ones(5, 2, 3, dtype=dtype), kind(module.parameters()))


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_the_count_of_steps_follows_the_default_type_except_where_it_is_fused(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        module = nn.Linear(3, 5)
        estimate = check(module, torch.ones(2, 3), optim.Adam(module.parameters(), **options))
    finally:
        torch.set_default_dtype(torch.float32)
    assert estimate.optimizer_state_bytes == 2 * 160 + 2 * (4 if options else 8)


def test_options_count_by_group() -> None:
    module = network()
    groups = [{"params": module[0].parameters(), "momentum": 0.9}, {"params": module[2].parameters()}]
    estimate = check(module, torch.ones(5, 2, 3), optim.SGD(groups, lr=0.1))
    assert estimate.optimizer_state_bytes == 4 * (3 * 2 * 2 + 3)


def test_frozen_parameters_have_neither_gradient_nor_state_but_adagrad_has_it_from_the_start() -> None:
    for kind, state_bytes in ((optim.Adam, 2 * 112 + 2 * 4), (optim.Adagrad, 172 + 4 * 4)):
        module = network()
        module[0].requires_grad_(False)
        estimate = check(module, torch.ones(5, 2, 3), kind(module.parameters()))
        assert (estimate.gradients_bytes, estimate.optimizer_state_bytes) == (112, state_bytes)


def test_a_shared_parameter_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    module = Tied()
    estimate = check(module, torch.zeros(5, dtype=torch.int64), optim.AdamW(module.parameters()))
    assert estimate == Estimate(160, 160, 2 * 160 + 4, 40)


def test_two_optimizers_each_keep_their_own_also_of_the_same_parameter() -> None:
    module = network()
    adam = optim.Adam(module.parameters())
    sgd = optim.SGD(module[2].parameters(), lr=0.1, momentum=0.9)
    estimate = check(module, torch.ones(5, 2, 3), adam, sgd)
    assert (estimate.gradients_bytes, estimate.optimizer_state_bytes) == (172, 2 * 172 + 4 * 4 + 112)


def test_master_copies_that_only_the_optimizer_knows_are_its_state() -> None:
    module = nn.Linear(4, 4, bias=False).half()
    master = module.weight.detach().float().requires_grad_()
    optimizer = optim.Adam([master])
    estimate = estimate_parts(module, [optimizer], None, CPU)
    assert estimate == Estimate(32, 32 + 64, 64 + 2 * 64 + 4, 0)
    step(module, torch.ones(2, 4, dtype=torch.float16))
    master.grad = module.weight.grad.float()
    optimizer.step()
    assert estimate == measured(module, [optimizer], None)


class Unknown(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_an_unknown_optimizer_makes_the_state_unknown_and_nothing_else() -> None:
    module = nn.Linear(3, 5)
    adam = optim.Adam(module.parameters())
    for unknown in (Unknown(module.parameters()), object()):  # a strategy's own may be no torch optimizer
        assert estimate_parts(module, [adam, unknown], torch.ones(2, 3), CPU) == Estimate(80, 80, None, 24)
    assert estimate_parts(module, [], torch.ones(2, 3), CPU) == Estimate(80, 80, 0, 24)


def test_a_subclass_counts_as_its_parent_while_the_state_is_made_in_the_same_code() -> None:
    class Named(optim.Adam):
        pass

    class Patched(optim.Adam):
        step = optim.Optimizer.profile_hook_step(optim.Adam.step)  # as torch does to the first subclass to be made

    class OtherStep(optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class OtherState(optim.Adam):
        def _init_group(self, *args: Any) -> Any:
            return super()._init_group(*args)

    module = nn.Linear(3, 5)

    def state_bytes(kind: type[optim.Optimizer]) -> int | None:
        return estimate_parts(module, [kind(module.parameters())], None, CPU).optimizer_state_bytes

    assert (state_bytes(Named), state_bytes(Patched)) == (168, 168)
    assert (state_bytes(OtherStep), state_bytes(OtherState)) == (None, None)


def test_a_scheduler_and_lightnings_wrapper_change_nothing() -> None:
    module = nn.Linear(3, 5)
    optimizer = optim.Adam(module.parameters())
    optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps the method of the instance
    wrapped = LightningOptimizer(optimizer)
    assert estimate_parts(module, [wrapped], None, CPU).optimizer_state_bytes == 168


CAPTURABLE = {"capturable": True}
NO_CAPTURE, NO_ITEM, NO_FUSED = "capturable", "meta tensors", "fused"  # why a step cannot go on without a GPU


@pytest.mark.parametrize(
    ("kind", "options", "scalars_bytes", "beside", "failure"),
    [
        (optim.Adam, {}, 4, False, None),
        (optim.Adam, CAPTURABLE, 4, True, NO_CAPTURE),
        (optim.AdamW, {}, 4, False, None),
        (optim.AdamW, CAPTURABLE, 4, True, NO_CAPTURE),
        (optim.NAdam, {}, 8, False, None),
        (optim.NAdam, CAPTURABLE, 8, True, NO_CAPTURE),
        (optim.RAdam, {}, 4, False, None),
        (optim.RAdam, CAPTURABLE, 4, True, NO_CAPTURE),
        (optim.Adamax, {}, 4, False, None),
        (optim.Adamax, CAPTURABLE, 4, True, NO_CAPTURE),
        (optim.RMSprop, {}, 4, False, None),
        (optim.RMSprop, CAPTURABLE, 4, True, NO_CAPTURE),
        (optim.Adadelta, {}, 4, False, None),
        (optim.Adadelta, CAPTURABLE, 4, True, NO_CAPTURE),
        (optim.Rprop, {}, 4, False, None),
        (optim.Rprop, CAPTURABLE, 4, True, NO_CAPTURE),
        (optim.ASGD, {}, 12, True, NO_ITEM),
        (optim.Adagrad, {}, 4, False, None),
        (optim.Adagrad, {"fused": True}, 4, True, NO_FUSED),
        (optim.Adafactor, {}, 4, False, NO_ITEM),
    ],
)
def test_small_state_lies_on_the_cpu_or_beside_the_parameter(
    kind: type[optim.Optimizer], options: dict[str, Any], scalars_bytes: int, beside: bool, failure: str | None
) -> None:
    """The meta device stands for a GPU: torch makes the state there, and some steps can then not go on."""
    module = nn.Linear(3, 5, bias=False, device=META)
    module.weight.grad = torch.zeros_like(module.weight)
    optimizer = kind(module.parameters(), **options)
    if failure is None:
        optimizer.step()
    else:
        with pytest.raises((AssertionError, RuntimeError), match=failure):
            optimizer.step()
    state = [value for value in optimizer.state[module.weight].values() if isinstance(value, Tensor)]
    assert sum(tensor.nbytes for tensor in state if tensor.dim() == 0) == scalars_bytes
    for device in (CPU, META):
        found = sum(tensor.nbytes for tensor in state if tensor.device == device)
        assert estimate_parts(module, [optimizer], None, device).optimizer_state_bytes == found
    assert estimate_parts(module, [optimizer], None, CPU).optimizer_state_bytes == (0 if beside else scalars_bytes)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_a_fused_adam_counts_its_steps_beside_the_parameter(kind: type[optim.Optimizer]) -> None:
    """By hand: without a GPU it refuses before it makes its state."""
    module = nn.Linear(3, 5, bias=False, device=META)
    optimizer = kind(module.parameters(), fused=True)
    by_device = [estimate_parts(module, [optimizer], None, device).optimizer_state_bytes for device in (CPU, META)]
    assert by_device == [0, 2 * 60 + 4]


def test_other_devices_are_not_counted() -> None:
    module = nn.Linear(4, 4, device=META)
    optimizer = optim.SGD(module.parameters(), momentum=0.9)
    batch = torch.ones(4, device=META)
    assert estimate_parts(module, [optimizer], batch, CPU) == Estimate(0, 0, 0, 0)
    assert estimate_parts(module, [optimizer], batch, META) == Estimate(80, 80, 80, 16)


def test_a_batch_counts_its_elements_once() -> None:
    ones = torch.ones(100)
    batch = {"view": ones[:1], "again": [ones[10:20]] * 2}
    view = batch["view"]
    assert estimate_parts(nn.Identity(), [], [batch, view], CPU).batch_bytes == 4 + 40


def test_sparse_and_lazy_tensors() -> None:
    module = nn.ModuleList([nn.LazyLinear(3)])
    module.register_buffer("mask", torch.eye(4).to_sparse())
    optimizer = optim.Adam(module.parameters())
    assert estimate_parts(module, [optimizer], None, CPU) == Estimate(4 * (2 * 8 + 4), 0, 0, 0)


def test_a_dtensor_counts_with_its_local_shard(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])

        def shard() -> DTensor:  # four ranks' worth of rows, of which this one holds a quarter
            return DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], shape=torch.Size((8, 4)), stride=(4, 1))

        module = nn.Module()
        module.weight = nn.Parameter(shard())
        module.weight.grad = shard()
        optimizer = optim.Adam(module.parameters(), foreach=False)
        estimate = estimate_parts(module, [optimizer], None, CPU)
        optimizer.step()
        assert estimate == measured(module, [optimizer], None) == Estimate(32, 32, 2 * 32 + 4, 0)
        factored = estimate_parts(module, [optim.Adafactor(module.parameters())], None, CPU)
        assert factored.optimizer_state_bytes == 4 * (8 + 4) + 4  # rows and columns are whole on every rank
    finally:
        torch.distributed.destroy_process_group()
