"""One rank of loop/test_ranks.py, which searches in loops without a Trainer."""

import json
import warnings

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

import lightning_batchmem.loop.search
from lightning_batchmem import find_batch_size_of_loop
from lightning_batchmem.loop.training_loop import training_loop
from tests.helpers.fake_device import FakeDevice
from tests.helpers.lawful import MIB, law

BUDGETS = (500, 400)


def network(case):
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    if case.get("wrapper") == "ddp":
        return nn.parallel.DistributedDataParallel(layers)
    if case.get("wrapper") == "fsdp":
        return FullyShardedDataParallel(
            layers,
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=case["use_orig_params"],
        )
    if case.get("wrapper") == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(layers[0])
        fully_shard(layers)
    return layers


def run_case(rank, directory, case):
    """Search and train; returns the plan and what is left."""
    device = FakeDevice(available_bytes=BUDGETS[rank] * MIB)
    device.enforces_limits = True
    lightning_batchmem.loop.search.device_memory_for = lambda _: device
    model = network(case)
    # Both processes have this one number.
    path = directory / "counts"
    model.counts = torch.from_file(str(path), shared=True, size=1, dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch):
        x, y = batch
        model.counts += 1
        device.use(law(len(x)))
        device.free()
        if rank == 1 and len(x) >= case.get("fails_at", 10**6):
            raise LookupError("of the user")
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        if case.get("collectives"):
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()

    def make_batch(size):
        return torch.randn(size, 6), torch.randn(size, 1)

    is_collective = training_loop(step, make_batch, model, optimizer, [], None).steps_are_collective
    plan = None
    if case.get("search", True):
        options = {"model": model, "optimizer": optimizer, **case.get("options", {})}
        plan = json.loads(find_batch_size_of_loop(step, make_batch, **options).to_json())
    counted = model.counts.item()
    torch.distributed.barrier()
    for _ in range(3):
        step(make_batch(4))
    torch.distributed.barrier()
    model.counts.zero_()
    torch.distributed.barrier()
    tensors = [*model.parameters(), *model.buffers()]
    local = [getattr(tensor, "to_local", lambda one=tensor: one)() for tensor in tensors]
    left = [value.double().tolist() for value in (*local, torch.get_rng_state())]
    parts = [part for part in model.modules() if isinstance(part, FullyShardedDataParallel)]
    left.append(sum(part._is_root is True for part in parts))
    return {"plan": plan, "left": left, "is_collective": is_collective, "counted": counted}


def run_cases(rank, directory, cases):
    """Run the cases one after the other; an error of a single case is part of the result."""
    warnings.simplefilter("error")
    # The fake device belongs to the step here, and what it counts is not restored.
    warnings.filterwarnings("ignore", "BatchFinder left these changed")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=len(BUDGETS))
    seen = {}
    for name, case in cases.items():
        try:
            seen[name] = run_case(rank, directory, case)
        except (LookupError, RuntimeError) as error:
            seen[name] = {"error": f"{type(error).__name__}: {error}"}
    (directory / f"{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
