from __future__ import annotations

from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from lightning_batchmem._lightning.strategies import check_strategy


def trainer_on(kind: type) -> SimpleNamespace:
    return SimpleNamespace(strategy=object.__new__(kind))


@pytest.mark.parametrize("kind", [SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy])
def test_supported_strategies(kind: type) -> None:
    check_strategy(trainer_on(kind))


def test_deepspeed_is_refused_with_an_alternative() -> None:
    with pytest.raises(
        ValueError, match=r"DeepSpeedStrategy .* cannot be made again .* train_micro_batch_size_per_gpu"
    ):
        check_strategy(trainer_on(DeepSpeedStrategy))


def test_another_strategy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"ModelParallelStrategy .* got FSDPStrategy"):
        check_strategy(trainer_on(FSDPStrategy))
