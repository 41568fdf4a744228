"""What the objectives of BatchFinder do to a training, in real fits on a fake device."""

from __future__ import annotations

import numpy
import pytest
import torch
from lightning import seed_everything
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_batchmem import BatchFinder, Plan
from lightning_batchmem.plan.records import Speed
from lightning_batchmem.search.trial import TrialRunner
from tests.helpers.lawful import SAMPLES, Lawful, Sizes, law, loader
from tests.helpers.plans import search_notes, training_notes

# The arguments that the fixture sets for other tests.
DEFAULT = {"objective": "auto", "min_steps_per_epoch": "auto", "multiple_of": None}
RECIPE = {**DEFAULT, "objective": "recipe"}
# It does not fit into the 475 MiB of the fake device, and its half does.
TOO_LARGE = 600


class Project(Lawful):
    """A project with a validation."""

    samples = SAMPLES

    def train_dataloader(self):
        return loader(self.batch_size, self.samples)

    def val_dataloader(self):
        return loader(self.batch_size, 2 * SAMPLES)

    def validation_step(self, batch, batch_idx):
        pass


class Manual(Project):
    """A project that steps its optimizer itself."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class TwoLoaders(Project):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)

    def train_dataloader(self):
        return [loader(self.batch_size), loader(self.batch_size)]


class Summed(Project):
    def training_step(self, batch, batch_idx):
        return (super().training_step(batch, batch_idx) * 0 + 1.0) * len(batch[0])


class InBatchNegatives(Project):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0 + torch.tensor(len(batch[0])).log()


class Normalized(Project):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.norm = nn.BatchNorm1d(1)


class Scheduled(Project):
    """A schedule of a length that the project has written down."""

    def __init__(self, *arguments, make=None):
        super().__init__(*arguments)
        self.make = make

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = self.make(optimizer, self)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fits(module, search, *callbacks, options=DEFAULT, **trainer):
    """The plan of a fit, and the samples of each optimizer step of its training."""
    sizes = Sizes()
    trainer = {"max_steps": -1, "max_epochs": 1, **trainer}
    plan = search(module, sizes, *callbacks, options=options, **trainer)
    return plan, sizes.per_step


def test_the_default_raises_the_size_to_one_and_a_half_times_that_of_the_project(search, device):
    plan, per_step = fits(Project(device, law, 16), search)
    assert (plan.batch_size, plan.limited_by, plan.verified) == (24, "recipe", True)
    assert plan.training.startswith("16 -> 24 samples a step, 313 -> 209 steps, learning rate")
    assert len(per_step) - 1 == 209
    assert plan.reason == (
        '24 samples: more may train worse than your 16; objective="memory" lifts this. Memory'
        " alone allows about 336 samples."
    )
    (warning,) = training_notes(plan)
    assert warning.startswith("An optimizer step has 24 samples instead of 16 at the same learning")
    assert 'objective="recipe" keeps your own size. lr_scaling="sqrt" multiplies' in warning


@pytest.mark.parametrize(
    ("asked", "size", "limited_by"),
    [
        ({"objective": "memory"}, 336, "memory"),
        ({"max_batch_size": 100}, 100, "max_batch_size"),
        ({"target_batch_size": 64}, 64, "target_batch_size"),
        ({"min_steps_per_epoch": 50}, 100, "min_steps_per_epoch"),
        ({"min_steps_per_epoch": None}, 336, "memory"),
    ],
)
def test_what_is_asked_for_is_given(search, device, asked, size, limited_by):
    plan, _ = fits(Project(device, law, 16), search, options={**DEFAULT, **asked})
    assert plan.limited_by == limited_by
    # Two rehearsals pass where memory limits the size.
    assert size <= plan.batch_size <= 1.1 * size
    first = training_notes(plan)[0]
    assert first.startswith(f"An optimizer step has {plan.batch_size} samples instead of 16 at the")
    assert 'objective="recipe" keeps your own size. lr_scaling="sqrt" multiplies' in first
    assert first in " ".join(plan.short_text().split())


def test_a_placeholder_is_no_recipe(search, device):
    plan, _ = fits(Project(device, law, 2), search)
    assert plan.limited_by == "memory"


@pytest.mark.parametrize("options", [DEFAULT, RECIPE])
def test_a_size_that_does_not_fit_keeps_the_samples_of_a_step(search, device, options):
    trainer = {"limit_train_batches": 3, "limit_val_batches": 2, "val_check_interval": 3}
    module = Project(device, law, TOO_LARGE)
    plan, per_step = fits(module, search, options=options, **trainer)
    assert (plan.batch_size, plan.accumulate_grad_batches) == (300, 2)
    assert (plan.limited_by, plan.verified) == ("memory", True)
    assert plan.training.startswith("600 (600 -> 2 x 300) samples a step, 3 steps, learning rate")
    assert per_step == [600, 600, 600, 0]
    counts = {"limit_train_batches": 6, "limit_val_batches": 4, "val_check_interval": 6}
    assert plan.recipe.trainer_settings == counts
    assert {name: getattr(module.trainer, name) for name in counts} == counts
    assert "limit_val_batches is 4 instead of 2, because it counts batches." in search_notes(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_an_interval_of_validations_is_never_longer_than_an_epoch(search, device):
    module = Project(device, law, TOO_LARGE)
    # Two batches of 600, and three of 300.
    module.samples = 601
    plan, _ = fits(module, search, val_check_interval=2)
    assert (plan.batch_size, plan.accumulate_grad_batches) == (300, 2)
    assert plan.recipe.trainer_settings == {"val_check_interval": 3}


def test_a_validation_loader_of_a_fixed_size_keeps_its_number_of_batches(search, device):
    class TwoValidations(Project):
        def val_dataloader(self):
            return [super().val_dataloader(), loader(10)]

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

    module = TwoValidations(device, law, TOO_LARGE)
    plan, _ = fits(module, search, limit_train_batches=3, limit_val_batches=2)
    assert plan.recipe.trainer_settings == {"limit_train_batches": 6}


@pytest.mark.parametrize(
    ("own_size", "options", "trainer", "found", "accumulate"),
    [
        # A search stays below 0.97 of what fills the limit, but the project runs at its size.
        (370, DEFAULT, {}, 370, 1),
        (370, RECIPE, {}, 370, 1),
        # Two batches of 301 are next to a prime.
        (601, DEFAULT, {}, 301, 2),
        # The data have 5,000 samples, and so has a step.
        (10_000, DEFAULT, {}, 250, 20),
        (10_000, RECIPE, {}, 250, 20),
        # Sizes that other arguments leave.
        (600, {**RECIPE, "max_batch_size": 300}, {}, 300, 2),
        (20, {**RECIPE, "multiple_of": 8}, {}, 8, 2),
        (20, {**DEFAULT, "multiple_of": 16}, {}, 16, 1),
        (8, {**DEFAULT, "multiple_of": 8}, {}, 8, 1),
        (32, {**DEFAULT, "min_batch_size": 32}, {}, 48, 1),
        # A step with as few samples as they allow.
        (8, {**DEFAULT, "min_batch_size": 32}, {"accumulate_grad_batches": 2}, 32, 1),
        (8, {**RECIPE, "min_batch_size": 32}, {}, 32, 1),
        (2, {**DEFAULT, "multiple_of": 8}, {"accumulate_grad_batches": 2}, 8, 1),
        (2, {**RECIPE, "multiple_of": 8}, {"accumulate_grad_batches": 2}, 8, 1),
        (4, {**RECIPE, "multiple_of": 8}, {}, 8, 1),
        (5, {**RECIPE, "multiple_of": 8, "min_batch_size": 9}, {}, 16, 1),
        (
            10,
            {**DEFAULT, "multiple_of": 8, "min_batch_size": 12},
            {"accumulate_grad_batches": 2},
            16,
            1,
        ),
        # One sample may be a placeholder, and 16 of them are none.
        (1, DEFAULT, {"accumulate_grad_batches": 16}, 16, 1),
        (1, RECIPE, {}, 1, 1),
    ],
)
def test_the_step_is_kept_as_far_as_the_arguments_allow(
    search, device, own_size, options, trainer, found, accumulate
):
    plan, _ = fits(Project(device, law, own_size), search, options=options, **trainer)
    assert (plan.batch_size, plan.accumulate_grad_batches) == (found, accumulate)
    assert plan.verified


@pytest.mark.parametrize("options", [DEFAULT, RECIPE])
def test_batches_of_a_project_that_accumulates_are_joined(search, device, options):
    module = Project(device, law, 4)
    trainer = {"accumulate_grad_batches": 8, "limit_train_batches": 20}
    plan, per_step = fits(module, search, options=options, **trainer)
    assert (plan.batch_size, plan.accumulate_grad_batches, plan.limited_by) == (32, 1, "recipe")
    assert plan.training.startswith("32 (8 x 4 -> 32) samples a step, 3 steps, learning rate")
    assert plan.recipe.trainer_settings == {"limit_train_batches": 3}
    assert per_step == [32, 32, 32, 0]
    assert "the recipe of the project allows no more than 32 in an optimizer step" in plan.reason
    assert "Memory alone allows about 336 samples." in plan.reason


@pytest.mark.parametrize("options", [DEFAULT, RECIPE])
def test_a_size_of_the_whole_data_set_does_not_fall(fit, fake_device, options):
    device = fake_device(available_bytes=10_000 * 2**20)
    finder = BatchFinder(**options)
    fit(Project(device, law, 10_000), finder, device, max_steps=-1, max_epochs=1)
    assert (finder.plan.batch_size, finder.plan.accumulate_grad_batches) == (SAMPLES, 1)
    assert finder.plan.training.startswith("5,000 samples a step, 1 step, learning rate")
    assert finder.plan.reason.startswith("5,000 samples instead of the project's 10,000: the data")


@pytest.mark.parametrize(
    ("own_size", "samples", "trainer", "made_of", "settings"),
    [
        (4, SAMPLES, {"overfit_batches": 4}, "16 (4 x 4 -> 16)", (1, 1, 1)),
        (4, SAMPLES, {"limit_train_batches": 4}, "16 (4 x 4 -> 16)", (1, 1.0, 1)),
        (150, SAMPLES, {"limit_train_batches": 4}, "600 (4 x 150 -> 2 x 300)", (2, 1.0, 1)),
        (4, 14, {"limit_train_batches": 20}, "14 (4 x 4 -> 14)", (5, 1.0, 1)),
    ],
)
@pytest.mark.parametrize("options", [DEFAULT, RECIPE])
def test_a_step_has_no_more_samples_than_an_epoch(
    search, device, options, own_size, samples, trainer, made_of, settings
):
    module = Project(device, law, own_size)
    module.samples = samples
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 8, "val_check_interval": 2, **trainer}
    plan, per_step = fits(module, search, options=options, **trainer)
    assert plan.training.startswith(f"{made_of} samples a step, 2 steps, learning rate")
    effective = plan.effective_batch_size
    assert per_step == [effective, effective, 0]
    names = ("limit_train_batches", "limit_val_batches", "val_check_interval")
    assert tuple(getattr(module.trainer, name) for name in names) == settings
    assert training_notes(plan) == ()


@pytest.mark.parametrize(
    ("kind", "callbacks", "why"),
    [
        (Manual, (), "your training_step steps the optimizers itself"),
        (Project, (GradientAccumulationScheduler({0: 1}),), "a GradientAccumulationScheduler sets"),
        (TwoLoaders, (), "there are several training loaders"),
    ],
)
@pytest.mark.parametrize("options", [DEFAULT, RECIPE])
def test_where_accumulation_is_not_ours_a_sentence_says_so(
    search, device, kind, callbacks, why, options
):
    plan, _ = fits(kind(device, law, TOO_LARGE), search, *callbacks, options=options)
    assert 300 < plan.batch_size < TOO_LARGE
    assert plan.accumulate_grad_batches == 1
    rate, warning = training_notes(plan)
    assert "samples instead of 600 at the same learning rate" in rate
    assert warning.startswith(
        f"Accumulation does not keep the 600 samples of a step, because {why}"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Project, None),
        (Summed, "Your loss is a sum over the batch"),
        (InBatchNegatives, "Your loss compares the samples of a batch with each other"),
        (Normalized, "BatchNorm normalizes each batch of 300 by itself, and not the 600"),
    ],
)
def test_what_cannot_go_with_accumulation_is_a_warning(search, device, kind, words):
    plan, _ = fits(kind(device, law, TOO_LARGE), search)
    assert plan.accumulate_grad_batches == 2
    assert len(training_notes(plan)) == (0 if words is None else 1)
    assert (words or "") in "".join(training_notes(plan))


def test_a_loss_of_copies_that_fails_is_no_error_of_the_training(search, device):
    class NeedsDifferentSamples(Project):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) in (2, 8) and self.trainer.accumulate_grad_batches == 2:
                raise IndexError("no negative sample")
            return super().training_step(batch, batch_idx)

    options = {**DEFAULT, "min_batch_size": 9}
    with pytest.warns(match=r"The loss of copies of a sample cannot be read: IndexError"):
        plan, _ = fits(NeedsDifferentSamples(device, law, TOO_LARGE), search, options=options)
    assert training_notes(plan) == ()


class Diffusion(Project):
    """Each step has its own noise."""

    draws = staticmethod(torch.randn)

    def training_step(self, batch, batch_idx):
        noise = torch.as_tensor(self.draws(len(batch[0])), dtype=torch.float32)
        return super().training_step(batch, batch_idx) * 0 + noise.pow(2).mean()


class NumpyNoise(Diffusion):
    draws = staticmethod(numpy.random.standard_normal)


@pytest.mark.parametrize("kind", [Diffusion, NumpyNoise])
def test_nothing_is_said_of_a_random_loss(search, device, kind):
    for seed in range(5):
        seed_everything(seed, verbose=False)
        module = kind(device, law, TOO_LARGE)
        plan, _ = fits(module, search, limit_train_batches=1)
        assert (plan.accumulate_grad_batches, training_notes(plan)) == (2, ())


def one_cycle_of(steps):
    return lambda optimizer, module: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=steps(module)
    )


def milestones(optimizer, module):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [100, 250])


def of_two(optimizer, module):
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 303),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [10])


STALE = "but the training has 209 steps now, and not 313: its end is not reached."


@pytest.mark.parametrize(
    ("make", "warning"),
    [
        (one_cycle_of(lambda module: 313), f"OneCycleLR has total_steps=313, {STALE}"),
        (milestones, f"MultiStepLR has milestones=250, {STALE}"),
        (of_two, f"CosineAnnealingLR has T_max=303, {STALE}"),
        (one_cycle_of(lambda module: module.trainer.estimated_stepping_batches), ""),
        # It was longer than the training before, as its author wanted.
        (one_cycle_of(lambda module: 1000), ""),
    ],
)
def test_a_schedule_of_the_old_length_is_a_warning(search, device, make, warning):
    plan, _ = fits(Scheduled(device, law, 16, make=make), search)
    assert plan.batch_size == 24
    rate, *others = training_notes(plan)
    assert "samples instead of 16 at the same learning rate" in rate
    assert len(others) == bool(warning)
    assert "".join(others).startswith(warning)


def test_a_schedule_of_batches_is_a_warning_under_accumulation(search, device):
    make = one_cycle_of(lambda module: len(module.train_dataloader()))
    plan, _ = fits(Scheduled(device, law, TOO_LARGE, make=make), search)
    (warning,) = training_notes(plan)
    assert warning == (
        "OneCycleLR has total_steps=17, which is the number of batches, but the scheduler steps"
        " once in 2 of them: its end is not reached. Compute it in configure_optimizers from"
        " trainer.estimated_stepping_batches."
    )


def test_a_schedule_that_ends_too_early_is_a_warning(search, device):
    def cosine(optimizer, module):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)

    class ManualScheduled(Scheduled, Manual):
        pass

    plan, _ = fits(ManualScheduled(device, law, TOO_LARGE, make=cosine), search)
    assert plan.training.startswith("600 -> 352 samples a batch, 9 -> 15 batches")
    assert any("CosineAnnealingLR has T_max=9" in text for text in training_notes(plan))
    assert any(
        "15 steps now, and not 9: it ends too early" in text for text in training_notes(plan)
    )


def speeds_of(monkeypatch, own, other, own_size):
    def samples_per_s(runner, batch_size, accumulate_grad_batches, limits):
        return own if batch_size == own_size else other

    monkeypatch.setattr(TrialRunner, "samples_per_s", samples_per_s)


@pytest.mark.usefixtures("compares_speeds")
@pytest.mark.parametrize(
    ("options", "other", "size", "limited_by"),
    [
        # The newcomer's project: 245 samples a second at 32, and 193 at 160.
        ({}, 193.0, 16, "throughput"),
        ({}, 240.0, 24, "recipe"),
        ({"objective": "memory"}, 193.0, 352, "memory"),
        ({"objective": "throughput", "max_batch_size": 64}, 270.0, 16, "throughput"),
        ({"objective": "throughput", "max_batch_size": 64}, 300.0, 0, ""),
    ],
)
def test_the_size_of_the_project_is_left_only_for_one_that_is_not_slower(
    search, device, monkeypatch, options, other, size, limited_by
):
    speeds_of(monkeypatch, 245.0, other, own_size=16)
    plan, _ = fits(Project(device, law, 16), search, options={**DEFAULT, **options})
    assert plan.verified
    compared = [speed.batch_size for speed in plan.speeds]
    if size == 0:
        # The fastest size of a fake device is not known.
        assert plan.batch_size == compared[-1] != 16
        return
    assert (plan.batch_size, plan.limited_by) == (size, limited_by)
    assert plan.speeds[0] == Speed(16, 245.0)
    assert f"245 samples/s at 16 (yours), {other:.0f} at {compared[1]}" in str(plan)
    has_warning = any(
        "are slower than your 16: 79% of the samples" in w for w in training_notes(plan)
    )
    assert has_warning == (options.get("objective") == "memory")
    if size == 16:
        how = "ran slower" if not options else "did not run clearly faster"
        assert (
            plan.reason
            == f"16 samples: it is the size of the project, and {compared[1]} samples {how}."
        )


@pytest.mark.usefixtures("compares_speeds")
def test_a_comparison_runs_five_steps_of_each_size_beside_each_other(search, device):
    module = Project(device, law, 16)
    plan, _ = fits(module, search)
    assert [speed.batch_size for speed in plan.speeds] == [16, 24]
    assert all(speed.samples_per_s > 0 for speed in plan.speeds)
    assert "(yours)" in str(plan)


class Scaled(Project):
    """A project whose learning rate lr_scaling sets."""

    lr = 0.1

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.lr = 0.1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


@pytest.mark.parametrize(
    ("own_size", "accumulate", "found", "rate"),
    [(16, 1, (24, 1), 0.15), (600, 1, (300, 2), 0.1), (4, 8, (32, 1), 0.1)],
)
@pytest.mark.parametrize("is_same_trainer", [True, False])
def test_each_fit_starts_from_the_size_before_the_first(
    fit, device, own_size, accumulate, found, rate, is_same_trainer
):
    module = Scaled(device, law, own_size)
    trainer = None
    limits = []
    texts = []
    for _ in range(3):
        if trainer and is_same_trainer:
            trainer.fit_loop.max_epochs += 1
            trainer.fit(module)
        else:
            finder = BatchFinder(lr_scaling="linear")
            arguments = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 16}
            trainer = fit(module, finder, device, accumulate_grad_batches=accumulate, **arguments)
        assert (module.batch_size, trainer.accumulate_grad_batches) == found
        assert module.lr == pytest.approx(rate)
        limits.append(trainer.limit_train_batches)
        texts.append(finder.plan.training)
        assert not any("learning rate" in warning for warning in training_notes(finder.plan))
    # Settings are scaled once.
    assert len(set(limits)) == len(set(texts)) == 1


def test_each_fit_for_a_target_names_the_steps_of_the_project(fit, device):
    """For a target ``limit_train_batches`` stays as it is."""
    finder = BatchFinder(target_batch_size=64, max_batch_size=16)
    arguments = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 40}
    trainer = fit(Scaled(device, law, 32), finder, device, **arguments)
    first = finder.plan.training
    assert "40 -> 10 steps" in first
    trainer.fit_loop.max_epochs += 1
    trainer.fit(trainer.lightning_module)
    assert finder.plan.training == first


def test_a_size_that_is_put_back_keeps_the_accumulation_of_the_project(fit, device):
    module = Scaled(device, law, 8)
    finder = BatchFinder(objective="recipe", max_batch_size=4)
    trainer = fit(module, finder, device, max_steps=-1, max_epochs=1, limit_train_batches=20)
    first = finder.plan.training
    assert (module.batch_size, trainer.accumulate_grad_batches) == (4, 2)
    module.batch_size = 8
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module)
    assert (module.batch_size, trainer.accumulate_grad_batches) == (4, 2)
    assert finder.plan.training == first


def test_a_size_that_a_new_module_has_from_an_earlier_fit_is_not_raised_again(fit, device):
    class Data(LightningDataModule):
        batch_size = 16

        def train_dataloader(self):
            return loader(self.batch_size)

    class Fixed(Lawful):
        def train_dataloader(self):
            return loader(16)

    def without_size(kind=Lawful):
        module = kind(device, law)
        del module.batch_size
        return module

    data = Data()
    data.batch_size = 16
    passed = loader(16)
    fixed = without_size(Fixed)
    for _ in range(2):
        arguments = {"max_steps": -1, "max_epochs": 1}
        fit(without_size(), BatchFinder(), device, datamodule=data, **arguments)
        assert data.batch_size == 24
        fit(without_size(), BatchFinder(), device, train_dataloaders=passed, **arguments)
        assert passed.batch_size == 24
        finder = BatchFinder()
        fit(fixed, finder, device, **arguments)
        assert finder.plan.batch_size == 24
    # Another project has a size of its own.
    module = Project(device, law, 24)
    fit(module, BatchFinder(), device, **arguments)
    assert module.batch_size == 36


def test_a_resumed_run_keeps_the_samples_of_a_step(fit, device, tmp_path):
    def finder():
        return BatchFinder(min_steps_per_epoch=None)

    path = str(tmp_path / "last.ckpt")
    arguments = {"limit_val_batches": 0}
    trainer = fit(Project(device, law, TOO_LARGE), finder(), device, max_steps=2, **arguments)
    trainer.save_checkpoint(path)
    sizes = Sizes()
    resumed = finder()
    module = Project(device, law, TOO_LARGE)
    fit(
        module,
        resumed,
        device,
        sizes,
        max_steps=4,
        ckpt_path=path,
        limit_train_batches=2,
        **arguments,
    )
    assert resumed.plan.training.startswith("600 (600 -> 2 x 300) samples a step")
    # This Trainer has a limit, and that of the first run had none.
    assert module.trainer.limit_train_batches == 4
    assert module.trainer.accumulate_grad_batches == 2
    assert sizes.seen == {300}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize(
    ("first", "resumed", "interval"),
    [
        ({}, {"val_check_interval": 3}, 5),
        # The last batch of its epoch is a third of one, and that of ours two thirds.
        ({}, {"val_check_interval": 9}, 17),
        ({}, {"val_check_interval": 30, "check_val_every_n_epoch": None}, 60),
        ({"val_check_interval": 3}, {"val_check_interval": 3}, 6),
        ({"val_check_interval": 3}, {"val_check_interval": 0.5}, 0.5),
    ],
)
def test_an_interval_of_a_resumed_run_goes_with_its_accumulation(
    fit, device, tmp_path, first, resumed, interval
):
    path = str(tmp_path / "last.ckpt")
    fit(Project(device, law, TOO_LARGE), BatchFinder(), device, **first).save_checkpoint(path)
    module = Project(device, law, TOO_LARGE)
    fit(module, BatchFinder(), device, max_steps=4, ckpt_path=path, **resumed)
    assert module.trainer.val_check_interval == interval


def test_recipe_and_target_exclude_each_other():
    with pytest.raises(ValueError, match='target_batch_size must be None with objective="recipe"'):
        BatchFinder(objective="recipe", target_batch_size=64)
