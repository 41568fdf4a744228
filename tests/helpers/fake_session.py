"""A training program without Lightning: the search works on it as on a Trainer."""

from contextlib import nullcontext

import torch

from lightning_batchmem.devices.peaks import PhasePeaks


class FakeSteps:
    """Steps of a tiny layer that use ``law(batch_size)`` bytes of a fake device."""

    first_phase = "forward"
    sample_bytes = 0
    num_other_batches = 0

    def __init__(self, session):
        self.session = session

    def last_batch_size(self, batch_size):
        return max(1, batch_size // 2)

    def begin(self, batch_size):
        return 1

    def items(self, batch_size):
        return batch_size

    def make_batch(self, batch_size, index, *, other_lengths=False):
        self.next_size = batch_size

    def run(self):
        session = self.session
        batch_size = self.next_size
        session.sizes.append(batch_size)
        session.device_memory.use(session.law(batch_size))
        session.device_memory.free()
        session.phases.enter("backward")
        session.module(torch.ones(batch_size, 1)).mean().backward()
        session.phases.enter("optimizer_step")
        session.optimizers[0].step()

    def complete(self):
        pass

    def end(self):
        pass


class FakeSession:
    """One stage of a program whose memory follows ``law``, a function of the batch size."""

    device = torch.device("cpu")
    evaluation = None
    evaluates_first = False
    steps_are_collective = False
    accumulate_grad_batches = 1
    notes = ("a note of the samples",)
    largest_batch_bytes = 0

    def __init__(self, device_memory, law, largest=10_000):
        self.device_memory = device_memory
        self.law = law
        self.largest = largest
        self.phases = PhasePeaks(device_memory)
        self.module = torch.nn.Linear(1, 1)
        self.training = FakeSteps(self)
        self.sizes = []
        self.batch_size = None
        self.restarts = []
        self.saved = []
        self.bytes_per_waiting_sample = 0
        self.configure()

    def configure(self):
        self.optimizers = [torch.optim.Adam(self.module.parameters())]

    def bounds(self):
        return [(self.largest, "dataset")]

    def avoided_sizes(self):
        return set()

    def worker_bytes(self, batch_size):
        return self.bytes_per_waiting_sample * batch_size

    def sample_sizes(self):
        return 4

    def use_sample_sizes(self, of_ranks):
        self.longest_sample = max(of_ranks)

    def check_batch_size(self, batch_size):
        assert self.batch_size == batch_size

    def restart(self, batch_size):
        self.restarts.append(batch_size)
        self.module.zero_grad()
        self.configure()
        self.batch_size = batch_size

    def without_synchronization(self):
        return nullcontext()

    def checkpoint_states(self):
        return self.saved
