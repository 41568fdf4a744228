import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from torch.nn import BatchNorm1d, LayerNorm, LazyBatchNorm2d, Linear, Sequential, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_batchmem._lightning.strategies import (
    NEWEST_TESTED_TORCH,
    bucket_bytes,
    check_strategy,
    has_batch_norm,
    steps_are_collective,
    warn_of_untested_torch,
)


def trainer_on(kind):
    return SimpleNamespace(strategy=object.__new__(kind))


class OwnSharding(ModelParallelStrategy):
    """As the class that some projects register under the name "fsdp2"."""


class OwnFSDP(FSDPStrategy):
    pass


@pytest.mark.parametrize(
    "kind",
    [
        SingleDeviceStrategy,
        DDPStrategy,
        ModelParallelStrategy,
        FSDPStrategy,
        OwnSharding,
        OwnFSDP,
    ],
)
def test_supported_strategies(kind):
    check_strategy(trainer_on(kind))


class OwnDeepSpeed(DeepSpeedStrategy):
    pass


class Other:
    pass


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            DeepSpeedStrategy,
            "not be DeepSpeedStrategy .*:plan=plan.json,then=exit",
        ),
        (OwnDeepSpeed, "not be OwnDeepSpeed .* cannot be made again"),
        (XLAStrategy, "not be XLAStrategy .* Remove BatchFinder, and set the batch size by hand"),
        (SingleDeviceXLAStrategy, "not be SingleDeviceXLAStrategy .* counts no peak memory"),
        (
            Other,
            r"be .* FSDPStrategy or ModelParallelStrategy \(FSDP2\) .* got Other",
        ),
    ],
)
def test_refused_strategies(kind, message):
    with pytest.raises(ValueError, match=f"^strategy must {message}"):
        check_strategy(trainer_on(kind))


def test_strategies_of_the_standalone_package():
    strategies = pytest.importorskip("pytorch_lightning.strategies")
    # The class of the trainer decides which package is used.
    kind = type("Trainer", (SimpleNamespace,), {"__module__": "pytorch_lightning.trainer"})
    for accepted in (strategies.FSDPStrategy, strategies.ModelParallelStrategy):
        check_strategy(kind(strategy=object.__new__(accepted)))
    with pytest.raises(ValueError, match="XLA counts no peak memory"):
        check_strategy(kind(strategy=object.__new__(strategies.XLAStrategy)))


@pytest.mark.parametrize(
    ("kind", "layer", "ranks", "expected"),
    [
        (DDPStrategy, SyncBatchNorm(2), 2, True),
        (DDPStrategy, SyncBatchNorm(2), 1, False),
        (DDPStrategy, BatchNorm1d(2), 2, False),
        (ModelParallelStrategy, BatchNorm1d(2), 2, True),
        (FSDPStrategy, Linear(1, 1), 2, True),
        (OwnFSDP, Linear(1, 1), 2, True),
        (FSDPStrategy, Linear(1, 1), 1, False),
    ],
)
def test_sharding_and_synchronized_batch_norm_make_steps_collective(kind, layer, ranks, expected):
    trainer = SimpleNamespace(
        strategy=object.__new__(kind), lightning_module=layer, world_size=ranks
    )
    assert steps_are_collective(trainer) is expected


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        (DistributedDataParallel, 2, 4),
        # The only rank exchanges its gradients in the steps of a search too.
        (DistributedDataParallel, 1, 0),
        (Sequential, 2, 0),
    ],
)
def test_ranks_exchange_the_gradients_of_parameters_that_are_trained(kind, ranks, expected):
    layer = Linear(1, 1)
    layer.bias.requires_grad_(False)
    strategy = SimpleNamespace(model=object.__new__(kind))
    trainer = SimpleNamespace(strategy=strategy, lightning_module=layer, world_size=ranks)
    assert bucket_bytes(trainer) == expected


class OwnNorm(_BatchNorm):
    def _check_input_dim(self, x):
        pass


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (BatchNorm1d(2), True),
        (SyncBatchNorm(2), True),
        (LazyBatchNorm2d(), True),
        (OwnNorm(2), True),
        (LayerNorm(2), False),
    ],
)
def test_batch_norm_is_found_in_any_kind(layer, expected):
    assert has_batch_norm(Sequential(layer)) is expected


@pytest.mark.parametrize("version", ["2.15.0", "3.0.0+cu130", "2.15.0a0+git1234"])
def test_a_newer_torch_is_one_warning(version):
    warn_of_untested_torch.cache_clear()
    with pytest.warns(UserWarning, match=f"torch {version[:4]}.* is newer than 2.14"):
        warn_of_untested_torch(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested_torch(version)


@pytest.mark.parametrize("version", ["2.14.1+cu130", "2.5.1", "1.13.0", torch.__version__])
def test_a_tested_torch_is_no_warning(version):
    warn_of_untested_torch(version)


def test_this_version_is_tested():
    assert tuple(map(int, torch.__version__.split(".")[:2])) <= NEWEST_TESTED_TORCH
