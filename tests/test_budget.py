"""A search over a budget within which loaders form their own batches."""

from dataclasses import replace

import pytest
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_batchmem import BatchFinder, Plan
from tests.helpers.budgets import Tokens, WithinBudget, stream_of_batches, within_budget
from tests.helpers.lawful import MIB, Lawful, quiet_trainer
from tests.helpers.plans import search_notes, training_notes
from tests.helpers.samples import pad

# Texts of 8 tokens, and some of 100.
LENGTHS = [100 if index % 100 == 99 else 8 for index in range(5000)]
ALL_TOKENS = 4950 * 8 + 50 * 100


def tokens_law(tokens):
    """Bytes of a step with so many padded tokens."""
    return 99 * MIB + tokens * MIB // 16


class Texts(Lawful):
    """A module whose memory follows the padded tokens of its batches."""

    make = staticmethod(within_budget)

    def __init__(self, device_memory, max_tokens=512, law=tokens_law):
        super().__init__(device_memory, law)
        self.max_tokens = max_tokens
        del self.batch_size

    def training_step(self, batch, batch_idx):
        self.sizes.append(tuple(batch.shape))
        self.use(batch.numel())
        return self.layer(batch[:, :1].float()).mean()

    def train_dataloader(self):
        return self.make(LENGTHS, self.max_tokens)


class Streamed(Texts):
    make = staticmethod(stream_of_batches)


BUDGET = {"batch_arg_name": "max_tokens", "budget": True}


def options(**more):
    return {**BUDGET, **more}


# The limit is 475 MiB: 376 more than the fixed part, or 6,016 tokens, which `found_size` would turn
# into 5,666. The third probe, at 2,707, has 338 texts of 8 tokens, which are 2,704. So a budget of
# 6,023 is predicted to fill the limit.
FOUND = 5673
FOUND_TOKENS = FOUND // 8 * 8


# The stream is sorted, so its first 256 small batches have no text of 100 tokens.
@pytest.mark.parametrize(("kind", "first"), [(Texts, 128), (Streamed, 32)])
def test_the_largest_budget_that_fits_is_found(search, device, kind, first, capsys):
    module = kind(device)
    plan = search(module, options=options())
    assert (plan.batch_size, plan.limited_by, plan.verified) == (FOUND, "memory", True)
    assert module.max_tokens == FOUND
    assert plan.trials[0].batch_size == first
    assert plan.measured_peak_bytes == tokens_law(FOUND_TOKENS)
    size = f"max_tokens {FOUND:,}"
    assert (
        plan.reason == f"{size}: it passed a rehearsal, and the limit leaves little room above it."
    )
    assert plan.memory.lines["forward"].slope == pytest.approx(MIB / 16, rel=0.01)
    text = capsys.readouterr().out
    assert f"BatchFinder: max_tokens {FOUND:,}, limited by memory, verified by a rehearsal" in text
    assert "items/s" in str(plan)
    assert "for each of max_tokens (forward)" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_other_batches_count_where_they_need_more(search, device):
    """Attention over the longest text needs more than the batch with most tokens."""

    class Attention(Texts):
        def training_step(self, batch, batch_idx):
            self.sizes.append(tuple(batch.shape))
            self.use(batch.numel() * (1 if batch.shape[1] == 8 else 2))
            return self.layer(batch[:, :1].float()).mean()

    plan = search(Attention(device), options=options())
    longest = plan.batch_size // 100 * 100
    assert tokens_law(2 * longest) <= 475 * MIB
    assert plan.measured_peak_bytes == tokens_law(2 * longest)
    assert plan.batch_size >= 0.9 * FOUND / 2


def test_the_epoch_keeps_its_steps(search, device):
    plan = search(Texts(device, law=lambda tokens: MIB), options=options(min_steps_per_epoch=40))
    assert plan.limited_by == "min_steps_per_epoch"
    made = [len(within_budget(LENGTHS, plan.batch_size + more).batch_sampler) for more in (0, 64)]
    assert made[0] >= 40 > made[1]
    assert "too few optimizer steps (min_steps_per_epoch is 40)" in plan.reason


@pytest.mark.parametrize("kind", [Texts, Streamed])
def test_a_budget_for_all_data_is_not_exceeded(search, device, kind):
    plan = search(kind(device, law=lambda tokens: MIB), options=options())
    assert plan.limited_by == "dataset"
    # A larger budget would put all texts into one batch, padded to 100 tokens.
    assert ALL_TOKENS / 4 < plan.batch_size <= 5000 * 100
    assert "an epoch has no second batch above max_tokens" in plan.reason


def test_max_and_min_are_budgets(search, device):
    plan = search(Texts(device), options=options(min_batch_size=1000, max_batch_size=2000))
    assert (plan.batch_size, plan.limited_by) == (2000, "max_batch_size")
    assert min(trial.batch_size for trial in plan.trials) >= 1000


def test_nothing_fits(search, device):
    with pytest.raises(RuntimeError, match=r"Nothing fits: max_tokens 128, the smallest size"):
        search(Texts(device, law=lambda tokens: 10**9), options=options())


def test_throughput_counts_items(search, device, monkeypatch):
    seconds = [0.0]

    class Timed(Texts):
        def training_step(self, batch, batch_idx):
            # A step takes the time of at least 1,000 tokens.
            seconds[0] += max(1000, batch.numel()) / 1e5
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("lightning_batchmem.search.steps.time.perf_counter", lambda: seconds[0])
    plan = search(Timed(device), options=options(objective="throughput"))
    assert plan.limited_by == "throughput"
    assert 900 <= plan.batch_size <= 2048
    speeds = {trial.batch_size: trial.samples_per_s for trial in plan.trials}
    assert speeds[plan.batch_size] == pytest.approx(1e5, rel=0.06)


def test_loaders_that_are_passed_have_the_budget_in_their_sampler(search, device):
    loader = within_budget(LENGTHS, 512)
    module = Texts(device)
    plan = search(module, options=options(), train_dataloaders=loader)
    assert plan.batch_size == loader.batch_sampler.max_tokens == FOUND
    # The attribute of the module has nothing to do with the loader.
    assert module.max_tokens == 512


class Cached(WithinBudget):
    """A sampler that makes its batches once, when they are first needed."""

    cache = None

    def batches(self):
        if self.cache is None:
            self.cache = super().batches()
        return self.cache


def test_a_sampler_that_keeps_its_batches_trains_at_the_budget(search, device):
    sampler = Cached(LENGTHS, 512)
    loader = DataLoader(Tokens(LENGTHS), batch_sampler=sampler, collate_fn=pad)
    plan = search(Texts(device), options=options(), train_dataloaders=loader)
    assert plan.batch_size == sampler.max_tokens
    assert max(map(len, sampler.batches())) == plan.batch_size // 8


def test_the_budget_of_a_datamodule(search, device):
    class Data(LightningDataModule):
        def __init__(self, max_tokens):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return within_budget(LENGTHS, self.hparams.max_tokens)

    data = Data(512.0)
    module = Texts(device)
    del module.max_tokens
    assert search(module, options=options(), datamodule=data).batch_size == FOUND
    assert data.hparams.max_tokens == FOUND


def test_a_target_and_a_learning_rate_speak_of_the_budget(search, device):
    module = Texts(device)
    plan = search(module, options=options(target_batch_size=8192))
    assert (plan.batch_size, plan.accumulate_grad_batches) == (4096, 2)
    assert "max_tokens 512 -> 8,192 (2 x 4,096): 16 times" in plan.training
    assert any("step has max_tokens 8,192 instead of 512" in text for text in training_notes(plan))


class Both(Texts):
    """Validation within the same budget, and its own loader of a fixed size."""

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.use(2 * batch.numel())

    def val_dataloader(self):
        return [
            within_budget(LENGTHS, self.max_tokens),
            DataLoader(Tokens(LENGTHS), 2, collate_fn=pad),
        ]


def test_validation_within_the_budget_is_part_of_the_search(search, device):
    plan = search(Both(device), options=options())
    assert tokens_law(2 * plan.batch_size) <= 475 * MIB
    assert plan.batch_size >= 0.9 * FOUND / 2


def test_an_evaluation_within_the_budget(search, device):
    plan = search(Both(device), options=options(), stage="validate")
    assert plan.batch_size >= 0.9 * FOUND / 2
    assert plan.budget_name == "max_tokens"


def test_an_evaluation_without_a_budget_is_left_alone(search, device):
    class OneSize(Texts):
        def validation_step(self, batch, batch_idx):
            self.use(batch.numel())

        def val_dataloader(self):
            return DataLoader(Tokens(LENGTHS), 4, collate_fn=pad)

    assert search(OneSize(device), options=options(), stage="validate") is None


def test_a_plan_of_a_budget_is_used_again(search, device):
    first = search(Texts(device), options=options())
    again = search(Texts(device), options=options(plan=first))
    assert again.batch_size == first.batch_size
    assert again.reason.startswith(f"max_tokens {FOUND:,}: the size of an earlier plan")
    # A size in samples is no budget.
    in_samples = search(Texts(device), options=options(plan=replace(first, budget_name=None)))
    assert any("The earlier plan was not used: it has" in note for note in search_notes(in_samples))


class Fixed(Texts):
    def train_dataloader(self):
        return within_budget(LENGTHS, 512)


class Sized(Texts):
    def train_dataloader(self):
        return DataLoader(Tokens(LENGTHS), batch_size=4, collate_fn=pad)


class Mixed(Texts):
    def train_dataloader(self):
        sized = DataLoader(Tokens(LENGTHS), batch_size=self.max_tokens // 64, collate_fn=pad)
        return [within_budget(LENGTHS, self.max_tokens), sized]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


class OfConstantLength(WithinBudget):
    """The number of its batches is set, as with ``num_steps`` of torch_geometric."""

    def __len__(self):
        return 20


class ConstantLength(Texts):
    def train_dataloader(self):
        sampler = OfConstantLength(LENGTHS, self.max_tokens)
        return DataLoader(Tokens(LENGTHS), batch_sampler=sampler, collate_fn=pad)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (Fixed, {}, "batches of train_dataloader must change with `max_tokens`"),
        (Sized, {}, "batch_arg_name must name a budget with budget=True, but no loader of train"),
        (Mixed, {}, "each loader of train_dataloader must form its own batches within"),
        (ConstantLength, {}, "max_batch_size must be given, because train_dataloader has the same"),
        (Texts, {"batch_arg_name": "max_items"}, "must name an attribute of the module, the"),
        (Texts, {"batch_arg_name": "layer"}, "`layer` must be a budget of at least 1 with"),
    ],
)
def test_projects_without_a_budget_are_refused(search, device, kind, more, message):
    with pytest.raises(ValueError, match=message):
        search(kind(device), options=options(**more))


def test_passed_loaders_without_the_attribute_are_refused(search, device):
    loader = DataLoader(Tokens(LENGTHS), batch_sampler=BatchSampler(range(9), 2, False))
    with pytest.raises(ValueError, match="must name an attribute of the batch sampler"):
        search(Texts(device), options=options(), train_dataloaders=loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 8192}, "budget must be True or False, got 8192"),
        ({"budget": True, "worst_case": "longest"}, "worst_case must be None with budget=True"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchFinder(**arguments, objective="memory")


class Few:
    """Computes its number of batches only once, as some few-shot samplers do."""

    def __init__(self, ways, epochs_of):
        self.ways = ways
        self.epochs_of = epochs_of
        self.length = epochs_of // ways

    def __len__(self):
        return self.length

    def __iter__(self):
        for index in range(self.length):
            yield list(range(index * self.ways, min(self.epochs_of, (index + 1) * self.ways)))


class Refuses(WithinBudget):
    """Allows no budget above one that it knows."""

    def __iter__(self):
        if self.max_tokens > 600:
            raise RuntimeError("max_tokens is above 600")
        return super().__iter__()


@pytest.mark.parametrize(
    ("sampler", "name", "error"),
    [
        (Few(2, 64), "ways", "IndexError: list index out of range at"),
        (Refuses(LENGTHS, 512), "max_tokens", "RuntimeError: max_tokens is above 600 at"),
    ],
)
def test_a_budget_that_a_sampler_cannot_follow_is_a_sentence(search, device, sampler, name, error):
    loader = DataLoader(Tokens(LENGTHS), batch_sampler=sampler)
    if name == "max_tokens":
        loader.collate_fn = pad
    chosen = options(batch_arg_name=name, max_batch_size=1000)
    message = f"must make batches at each budget, got {error} .*smaller max_batch_size"
    with pytest.raises(ValueError, match=message):
        search(Texts(device), options=chosen, train_dataloaders=loader)
    assert getattr(sampler, name) in (2, 512)
    chosen["max_batch_size"] = 2 if name == "ways" else 600
    plan = search(Texts(device), options=chosen, train_dataloaders=loader)
    assert plan.batch_size == chosen["max_batch_size"]


class OfItsSize(WithinBudget):
    """A sampler whose attribute has the name of a batch size, but is a number of tokens."""

    @property
    def batch_size(self):
        return self.max_tokens

    @batch_size.setter
    def batch_size(self, value):
        self.max_tokens = value


def test_a_batch_size_that_is_a_budget(search, device):
    sampler = OfItsSize(LENGTHS, 512)
    loader = DataLoader(Tokens(LENGTHS), batch_sampler=sampler, collate_fn=pad)
    with pytest.raises(
        ValueError, match=r"its batches do not depend on batch_size alone: .* with budget=True"
    ):
        search(Texts(device), train_dataloaders=loader)
    plan = search(Texts(device), options={"budget": True}, train_dataloaders=loader)
    assert (plan.batch_size, plan.budget_name) == (FOUND, "batch_size")


class Layers(Texts):
    """A real network, whose memory is measured on the host."""

    def __init__(self):
        super().__init__(None, 64)
        self.layers = nn.Sequential(nn.Embedding(5000, 16), nn.Linear(16, 16), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()


def test_a_search_on_the_host_reads_in_a_worker():
    finder = BatchFinder(**BUDGET, max_batch_size=1024, objective="memory")
    quiet_trainer(finder, max_steps=2).fit(Layers())
    assert (finder.plan.batch_size, finder.plan.verified) == (1024, True)
    assert finder.plan.trials[-1].samples_per_s > 0
