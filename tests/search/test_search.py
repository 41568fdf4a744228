"""Whole searches in a real Trainer on a fake device.

The tests cover validation, other stages, limits of the size, and the state after a search.
"""

import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_batchmem import BatchFinder
from lightning_batchmem.devices import host
from lightning_batchmem.devices.breakdown import measure_breakdown
from tests.helpers.lawful import MIB, SAMPLES, Evaluated, Lawful, found_size, law, loader
from tests.helpers.plans import search_notes, training_notes

BUDGET = 500 * MIB
LIMIT = 475 * MIB
FOUND = found_size(BUDGET, multiple_of=1)
# A search finds this size where each sample takes two MiB.
HALF = 177
# A search probes this size as its second one.
SECOND = 8
# A search rehearses this size as its first one.
REHEARSED = 338
LESS_THAN_LIMIT = "The search left 0.000 MiB of the limit free"


@pytest.mark.parametrize(
    ("arguments", "size", "peaks"),
    [
        ({}, HALF, (law(4), law(2 * HALF))),
        # The validation data has fewer samples than a batch.
        ({"samples": 50}, FOUND, (law(4), law(100))),
        ({"size_name": "fixed_size"}, FOUND, (law(100), law(100))),
    ],
)
def test_validation_is_a_phase(search, device, arguments, size, peaks):
    plan = search(Evaluated(device, **arguments))
    assert (plan.batch_size, device.num_ooms) == (size, 0)
    assert (
        tuple(plan.trials[index].memory.phase_peak_bytes["evaluation"] for index in (0, -1))
        == peaks
    )


def test_validation_that_does_not_fit(search, device):
    module = Evaluated(device)
    module.factor = 250
    with pytest.raises(RuntimeError, match=r"^Nothing fits"):
        search(module)


@pytest.mark.parametrize(
    ("loaders", "reason"),
    [([torch.zeros(4, 1)], "must be torch DataLoaders"), (loader(None), "batch_size=None")],
)
def test_validation_that_cannot_be_measured_is_left_out(search, device, loaders, reason):
    with pytest.warns(UserWarning, match=f"leaves validation out of the search: .*{reason}"):
        plan = search(Evaluated(device), val_dataloaders=loaders, limit_val_batches=1)
    assert plan.batch_size == FOUND


# Lightning itself warns of the empty list.
@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_an_empty_list_of_validation_loaders_is_no_validation(search, device):
    plan = search(Evaluated(device), val_dataloaders=[])
    assert plan.batch_size == FOUND
    assert "evaluation" not in plan.trials[0].memory.phase_peak_bytes


@pytest.mark.parametrize(
    ("stage", "is_passed"), [("validate", False), ("test", True), ("predict", False)]
)
def test_other_stages_are_searched_with_forward_passes(stage, is_passed, search, device):
    module = Evaluated(device)
    data = loader(3)
    plan = search(module, stage=stage, data=data if is_passed else None)
    assert plan.batch_size == HALF
    assert {phase for trial in plan.trials for phase in trial.memory.phase_peak_bytes} == {
        "evaluation"
    }
    assert set(module.evaluated) == {HALF, SAMPLES % HALF}
    # No training step was run.
    assert module.sizes == []
    assert (data.batch_size, module.batch_size) == (3, 3)


@pytest.mark.parametrize(
    ("size_name", "advice"),
    [
        ("fixed_size", "The batches of the validation do not follow the batch size: make them"),
        ("batch_size", "Use a smaller model, smaller samples"),
    ],
)
def test_a_validation_that_does_not_fit_is_named(search, device, size_name, advice):
    module = Evaluated(device, size_name)
    module.factor = 500
    with pytest.raises(RuntimeError) as raised:
        search(module)
    (sentence, *_) = str(raised.value).partition(" (")
    assert sentence.endswith("the smallest size allowed, ran out of memory in the validation")
    assert advice in str(raised.value)


def test_a_training_that_does_not_fit_names_no_validation(search, device):
    with pytest.raises(RuntimeError) as raised:
        search(Lawful(device, lambda size: law(500 * size)))
    assert "validation" not in str(raised.value)


@pytest.mark.parametrize(("size_name", "fast"), [("fixed_size", False), ("batch_size", True)])
def test_a_stage_without_a_search(search, device, size_name, fast):
    module = Evaluated(device, size_name)
    assert search(module, stage="test", fast_dev_run=fast) is None
    assert (set(module.evaluated), module.batch_size) == ({3 if fast else 50}, 3)


def test_a_stage_whose_loaders_cannot_be_set_is_a_warning(search, device):
    with pytest.warns(
        UserWarning, match=r"loaders of test_dataloader must have a batch size that can be set"
    ):
        assert search(Evaluated(device), stage="test", data=loader(None, samples=2)) is None


def test_a_stage_that_failed_can_be_repeated(search, device):
    module = Evaluated(device)
    module.fails_at = SECOND
    with pytest.raises(IndexError, match="of the user"):
        search(module, stage="validate")
    assert (module.batch_size, module.evaluated, module.training) == (3, [], True)
    module.fails_at = 0
    module.trainer.validate(module)
    assert set(module.evaluated) == {HALF, SAMPLES % HALF}


def test_a_fraction_of_the_batches(search, device):
    device.budget = 10**6 * MIB
    plan = search(Lawful(device, law), limit_train_batches=0.25)
    # The data set has four batches of this size, of which the last one is short.
    assert (plan.batch_size, plan.limited_by) == (1666, "limit_train_batches")


def test_accumulation_runs_two_micro_batches(search, device):
    sizes = []
    plan = search(
        Lawful(device, lambda size: sizes.append(size) or law(size)), accumulate_grad_batches=4
    )
    probes = [trial for trial in plan.trials if trial.kind == "probe"]
    assert all(sizes.count(trial.batch_size) == 2 * trial.full_steps for trial in probes)
    assert (plan.accumulate_grad_batches, plan.effective_batch_size) == (4, 4 * FOUND)


def test_an_average_of_the_weights_takes_a_copy_of_the_parameters(search, device):
    plan = search(Lawful(device, law), StochasticWeightAveraging(0.01), max_epochs=1)
    # The copy has a weight and a bias of four bytes each.
    assert plan.limit_bytes == LIMIT
    assert any(LESS_THAN_LIMIT in note for note in search_notes(plan))
    elsewhere = StochasticWeightAveraging(0.01, swa_epoch_start=2, device=torch.device("meta"))
    plan = search(Lawful(device, law), elsewhere, max_epochs=3)
    assert not any(LESS_THAN_LIMIT in note for note in search_notes(plan))


def test_an_average_of_the_weights_fits_into_the_limit_of_the_training(search, device):
    device.enforces_limits = True
    budgets = []

    def noted(size):
        budgets.append(device.budget)
        return law(size)

    average = StochasticWeightAveraging(0.01)
    options = {"memory_limit": 300 * MIB}
    plan = search(Lawful(device, noted), average, max_epochs=1, options=options)
    assert plan.limit_bytes == 300 * MIB
    *of_search, of_training = budgets
    assert set(of_search) == {300 * MIB - 8}
    assert of_training == 300 * MIB


def test_loader_workers_make_batches_ahead(search, device):
    plan = search(Lawful(device, law), train_dataloaders=loader(3, num_workers=1))
    # The workers hold three batches, and each sample takes 4 bytes.
    # They take host memory, and none of the device.
    chosen = plan.trials[-1]
    assert (chosen.memory.needed_bytes, chosen.memory.set_aside_bytes) == (law(plan.batch_size), 0)


@pytest.mark.parametrize("on_host", [False, True])
def test_batches_of_workers_fit_into_shared_memory(search, device, monkeypatch, on_host):
    if on_host:
        device.as_host()
    # Docker gives 64 MiB. Here it has room for 100 samples in three batches.
    usage = SimpleNamespace(total=1, free=3 * 4 * 100)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage)
    module = Lawful(device, lambda size: size)
    plan = search(module, train_dataloaders=loader(3, num_workers=1), options={"min_batch_size": 1})
    assert (plan.batch_size, plan.limited_by) == (100, "shared memory")
    assert "would fill the shared memory, /dev/shm" in plan.reason
    # Validation workers live at the same time, and make all of its 80 samples.
    plan = search(
        Evaluated(device, "fixed_size", 80),
        train_dataloaders=loader(3, num_workers=1),
        val_dataloaders=loader(40, 80, num_workers=1),
    )
    assert (plan.batch_size, plan.limited_by) == ((1200 - 4 * 80) // 12, "shared memory")
    # Without workers nothing is shared.
    plan = search(module, train_dataloaders=loader(3))
    assert plan.limited_by != "shared memory"


def test_a_device_that_fills_up_during_the_search(search, device):
    def fill_up(size):
        device.budget = 600 * MIB if size > 100 else device.budget
        return law(size)

    device.budget = 1000 * MIB
    plan = search(Lawful(device, fill_up))
    # 471 samples fill this limit. After 0.90 of them, 0.6 of the way to 0.97 is rehearsed.
    assert (plan.limit_bytes, plan.batch_size, device.num_ooms) == (570 * MIB, 443, 0)


def test_padded_samples_train_an_epoch(search, device):
    # One sample of 64 is four times as long as the others.
    samples = [torch.zeros(40 if index % 64 == 1 else 10) for index in range(640)]
    data = DataLoader(samples, 3, shuffle=True, collate_fn=lambda each: [pad_sequence(each, True)])
    arguments = {"train_dataloaders": data, "max_steps": -1, "max_epochs": 1}
    plan = search(Lawful(device, lambda elements: law(elements // 10)), **arguments)
    # This many samples of 40 elements fit. Nothing fragments, so no share stays free.
    assert plan.batch_size == 88
    assert not any("expandable_segments" in note for note in search_notes(plan))
    assert any("Samples differ in size" in note for note in search_notes(plan))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        search(
            Lawful(device, lambda elements: law(elements // 10)),
            options={"worst_case": "typical"},
            **arguments,
        )


class Watched(Lawful):
    """Notes the state in which each size is first run, and in which training starts."""

    def __init__(self, device_memory, fails_at=0):
        super().__init__(device_memory, law)
        self.fails_at = fails_at
        seen = {}
        # The search does not restore a function, and so this one keeps all states.
        self.seen = lambda: seen
        starts = []
        self.is_training = lambda: bool(starts)
        self.callback = LambdaCallback(on_train_start=lambda *_: starts.append(True))

    def configure_callbacks(self):
        # Hooks of callbacks run in the training only, and no training follows an error.
        return [] if self.fails_at else self.callback

    def training_step(self, batch, batch_idx):
        is_training = self.is_training()
        optimizer = self.trainer.optimizers[0]
        module_state = (self.layer.bias.item(), self.layer.bias.grad is None, len(self.sizes))
        last = len(optimizer._optimizer_step_post_hooks) if is_training else torch.rand(1).item()
        state = (*module_state, bool(optimizer.state), self.trainer.global_step, last)
        self.seen().setdefault("training" if is_training else len(batch[0]), state)
        if len(batch[0]) == self.fails_at:
            raise IndexError("of the user")
        return super().training_step(batch, batch_idx)


def test_trials_and_training_start_from_the_state_before_the_search(search, device):
    module = Watched(device)
    start = (module.layer.bias.item(), True, 0, False, 0)
    plan = search(module)
    seen = module.seen()
    # Training starts from this state, without a hook on the optimizer.
    assert seen["training"] == (*start, 0)
    # Every trial starts from this state, with the same random numbers.
    sizes = {trial.batch_size for trial in plan.trials}
    assert len(sizes) > 3
    assert {seen[size] for size in sizes} == {(*start, seen[2][-1])}


class Remembering(Lawful):
    """Keeps a state with one row for each sample from step to step, as truncated BPTT does."""

    def __init__(self, device_memory):
        super().__init__(device_memory, law)
        self.memory = None

    def training_step(self, batch, batch_idx):
        self.memory = batch[0] if self.memory is None else self.memory + batch[0]
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        data = super().train_dataloader().dataset
        return DataLoader(data, self.batch_size, drop_last=True)


class RememberingFromStart(Remembering):
    """Makes this state before the first step, from its batch size."""

    def on_train_start(self):
        self.memory = torch.zeros(self.batch_size, 1)


@pytest.mark.parametrize("kind", [Remembering, RememberingFromStart])
def test_a_state_with_one_row_for_each_sample_starts_anew_at_each_size(search, device, kind):
    """A state of another size would end in a RuntimeError."""
    assert search(kind(device)).batch_size == FOUND


def test_a_trial_after_one_that_failed_starts_from_the_state_before_the_search(search, device):
    module = Watched(device)
    use = Lawful(device, lambda size: law(size) if size < SECOND else 10**12).use
    module.use = use
    bias = module.layer.bias.item()
    search(module)
    seen = module.seen()
    # The next trial is between the size that ran and the one that failed.
    assert seen[5] == seen[SECOND] == seen[2]
    assert seen[5][:-1] == (bias, True, 0, False, 0)


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_the_memory_of_a_failure_is_read_without_the_batch_that_failed(
    search, device, monkeypatch, step
):
    """It would be listed as other memory of the process, which the user cannot free."""
    references = []
    is_alive = []

    def run_out_of_memory(batch, batch_idx):
        references.append(weakref.ref(batch[0]))
        raise MemoryError

    def measure(*arguments, **keywords):
        is_alive.append(references[-1]() is not None)
        return measure_breakdown(*arguments, **keywords)

    monkeypatch.setattr("lightning_batchmem.search.search.measure_breakdown", measure)
    module = Evaluated(device)
    setattr(module, step, run_out_of_memory)
    with pytest.raises(RuntimeError, match=r"^Nothing fits"):
        search(module)
    assert is_alive == [False]


@pytest.mark.parametrize("fails_at", [SECOND, REHEARSED])
def test_everything_is_restored_after_an_error(search, device, fails_at):
    device.enforces_limits = True
    module = Watched(device, fails_at)
    callback = Callback()
    bias = module.layer.bias.item()
    random = torch.get_rng_state()
    with pytest.raises(IndexError, match="of the user"):
        search(module, callback, accumulate_grad_batches=4)
    assert fails_at in module.seen()
    trainer = module.trainer
    assert (trainer.global_step, trainer.accumulate_grad_batches) == (0, 4)
    assert trainer.callbacks[1:] == [callback]
    assert not trainer.optimizers[0].state
    assert (module.layer.bias.item(), module.layer.bias.grad) == (bias, None)
    assert torch.equal(random, torch.get_rng_state())
    assert (module.batch_size, module.sizes, device.budget) == (3, [], BUDGET)


class TakesMemoryEarly(Lawful):
    """Takes memory in a hook before the first step: 100 MiB for each of its samples above 300."""

    def on_train_start(self):
        self.use((self.batch_size - 300) * 100 if self.batch_size > 300 else 0)


def test_a_hook_before_the_first_step_that_runs_out_of_memory_is_an_outcome(search, device):
    plan = search(TakesMemoryEarly(device, law))
    failed = [trial for trial in plan.trials if trial.outcome != "ok"]
    assert {trial.outcome for trial in failed} == {"out_of_memory"}
    assert 250 < plan.batch_size < 310
    assert failed[0].error.startswith("OutOfMemoryError: CUDA out of memory")


def test_no_tensor_of_a_step_that_failed_is_left(search, device):
    made = []
    alive = set()

    def steep(size):
        alive.add(sum(reference() is not None for reference in made))
        # The traceback of an error refers to this frame, and so to the tensor.
        held = torch.zeros(size)
        made.append(weakref.ref(held))
        device.use(law(size) + max(0, size - 30) * 60 * MIB)
        device.free()
        return law(size)

    search(Lawful(device, steep))
    assert device.num_ooms > 0
    assert alive == {0}


@pytest.mark.parametrize("is_caught", [False, True])
def test_an_allocation_that_fails_in_the_first_step_of_a_size_is_a_note(search, device, is_caught):
    seen = set()

    def first_steps_fail(size):
        if is_caught and size not in seen:
            seen.add(size)
            # As cuDNN does where its fastest algorithm needs too much.
            with suppress(torch.cuda.OutOfMemoryError):
                device.use(2 * device.budget)
        return law(size)

    plan = search(Lawful(device, first_steps_fail))
    assert plan.verified
    assert (
        any("an allocation failed inside a step" in note for note in search_notes(plan))
        is is_caught
    )


class Logging(Lawful):
    def training_step(self, batch, batch_idx):
        # Only a step of the search has a smaller batch.
        if self.logger is not None and len(batch[0]) < FOUND:
            self.logger.experiment.config.update({"a": 1})
            self.logger.experiment["b"] = self.logger.experiment.runs[0].name
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("has_logger", [True, False])
def test_with_a_logger_and_barebones(has_logger, device, tmp_path):
    finder = BatchFinder(multiple_of=1, objective="memory")
    finder.device_memory = lambda _: device
    arguments = {"logger": CSVLogger(tmp_path)} if has_logger else {"barebones": True}
    trainer = Trainer(accelerator="cpu", callbacks=[finder], max_steps=1, **arguments)
    module = Logging(device, law)
    trainer.fit(module)
    loggers = [arguments["logger"]] if has_logger else []
    assert (module.batch_size, trainer.loggers) == (FOUND, loggers)


# --- the last batch of an epoch


class Normalized(Lawful):
    """Its BatchNorm fails with a batch of one sample, and with ``drop_last`` it needs full ones."""

    def __init__(self, device, samples=131, batch_size=3, *, drop_last=False):
        super().__init__(device, law, batch_size)
        self.norm = torch.nn.BatchNorm1d(1)
        self.samples = samples
        self.drop_last = drop_last

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if self.drop_last:
            assert len(x) == self.batch_size
        return super().training_step([self.norm(x)], batch_idx)

    def train_dataloader(self):
        return loader(self.batch_size, self.samples, drop_last=self.drop_last)


@pytest.mark.parametrize(
    ("samples", "arguments", "size"),
    [
        # 131 = 10 x 13 + 1, so the last batch of an epoch would have one sample.
        (131, {}, 12),
        (132, {}, 13),
        # These epochs end before that batch.
        (131, {"limit_train_batches": 5, "options": {"max_batch_size": 13}}, 13),
        (131, {"limit_train_batches": 0.3, "options": {"max_batch_size": 13}}, 13),
        (131, {"overfit_batches": 0.3, "options": {"max_batch_size": 13}}, 13),
        # A batch of 12 samples may be the last of eleven.
        (131, {"limit_train_batches": 11, "options": {"max_batch_size": 13}}, 12),
        # 30 is a multiple of 6, 5, 10 and 2, but not of 4.
        (31, {"options": {"max_batch_size": 6}}, 4),
        (31, {"options": {"max_batch_size": 12, "target_batch_size": 20}}, 4),
    ],
)
def test_the_last_batch_of_an_epoch_has_not_one_sample(search, device, samples, arguments, size):
    device.enforces_limits = True
    options = {"min_steps_per_epoch": 10, **arguments.pop("options", {})}
    module = Normalized(device, samples)
    plan = search(module, max_steps=-1, max_epochs=1, options=options, **arguments)
    assert plan.batch_size == size
    assert plan.verified
    assert min(module.sizes) > 1


def test_without_smaller_batches_none_is_rehearsed(search, device):
    device.enforces_limits = True
    module = Normalized(device, drop_last=True)
    assert search(module, options={"max_batch_size": 13}).batch_size == 13


@pytest.mark.parametrize("size", [2, 3])
def test_a_small_size_is_rehearsed_without_a_batch_of_one_sample(search, device, size):
    device.enforces_limits = True
    plan = search(Normalized(device, 6 * size), options={"max_batch_size": size})
    assert (plan.batch_size, plan.verified) == (size, True)


# --- hooks at the end of an evaluation


class Begins(Evaluated):
    """Has hooks at the start of an evaluation, so those at its end are called too."""

    def on_test_epoch_start(self):
        self.starts = True

    on_predict_start = on_test_epoch_start


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_hooks_at_the_end_of_an_evaluation(search, device, stage):
    module = Begins(device)
    hooks = []
    module.on_test_epoch_end = module.on_predict_end = lambda: hooks.append(module.starts)
    assert search(module, stage=stage).batch_size == HALF
    assert len(hooks) > 4


def test_a_hook_that_needs_a_whole_epoch_is_a_warning(search, device):
    module = Begins(device)
    hooks = []

    def on_test_epoch_end():
        hooks.append(len(module.evaluated))
        assert len(module.evaluated) == -(-SAMPLES // HALF)

    module.on_test_epoch_end = on_test_epoch_end
    with pytest.warns(UserWarning, match="on_test_epoch_end failed after .* AssertionError"):
        assert search(module, stage="test").batch_size == HALF
    assert len(hooks) > 4


def longest_of(samples):
    return [pad_sequence(samples, batch_first=True)]


class Texts(Lawful):
    """Texts of which a few are long; a token takes a MiB."""

    def __init__(self, device_memory, batch_size, *, is_ragged):
        super().__init__(device_memory, lambda tokens: law(tokens), batch_size)
        lengths = [20 if is_ragged and index % 50 == 0 else 2 for index in range(1000)]
        self.texts = [torch.zeros(length) for length in lengths]

    def train_dataloader(self):
        return DataLoader(self.texts, self.batch_size, shuffle=True, collate_fn=longest_of)


@pytest.mark.parametrize(
    ("project", "is_ragged", "note"),
    [
        (
            100,
            True,
            "18 fits even if every sample is the longest (80 bytes, median 8); with typical",
        ),
        (400, False, "If you compute values from"),
        (2, False, "If you compute values from"),
    ],
)
def test_the_first_note_tells_why_the_size_is_below_that_of_the_project(
    search, device, project, is_ragged, note
):
    plan = search(Texts(device, project, is_ragged=is_ragged))
    change = f"An optimizer step has {plan.batch_size} samples instead of {project} at the same"
    assert training_notes(plan)[0].startswith(change)
    assert search_notes(plan)[0].startswith(note)
    instead = f" instead of the project's {project}" if project > plan.batch_size else ""
    assert plan.reason.startswith(f"{plan.batch_size} samples{instead}: ")


def test_what_was_asked_for_and_not_done_is_the_first_note(search, device, tmp_path):
    module = Texts(device, 100, is_ragged=True)
    plan = search(module, options={"target_batch_size": 331})
    assert "not the 331 of target_batch_size" in " ".join(training_notes(plan))
    assert "fits even if every sample is the longest" in search_notes(plan)[0]
    again = search(module, options={"plan": tmp_path})
    assert search_notes(again)[0].startswith("The earlier plan was not used")


def test_a_note_names_validation_loaders_that_keep_the_size_of_the_project(search, device):
    notes = search_notes(search(Evaluated(device), val_dataloaders=loader(3)))
    assert "The loaders of val_dataloader keep your batch size, 3." in notes
    # Another size was never that of the project.
    for arguments in ({"val_dataloaders": loader(7)}, {}):
        plan = search(Evaluated(device), **arguments)
        assert not any("keep your batch size" in note for note in search_notes(plan))


class Named(Evaluated):
    """Its loaders have another attribute than ``batch_size``."""

    def __init__(self, device):
        super().__init__(device, "bs")
        self.bs = 3

    def train_dataloader(self):
        return loader(self.bs)


def test_a_test_that_is_left_alone_says_so(fit, device, caplog):
    module = Named(device)
    trainer = fit(module, BatchFinder(objective="memory", max_batch_size=20), device)
    assert module.bs == 20
    with caplog.at_level("INFO"):
        trainer.test(module)
        # It is not the size that fit has found any more.
        module.bs = 10
        trainer.test(module)
    assert "does not search for test_dataloader: the project has batch size 20" in caplog.text
    assert "leaves test_dataloader unchanged: no loader follows `batch_size`" in caplog.text
