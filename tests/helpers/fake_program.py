"""A training program without Lightning: the search works on it as on a Trainer."""

import torch

from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.search.program import Program, Steps


class FakeSteps(Steps):
    """Steps of a tiny layer that use ``law(batch_size)`` bytes of a fake device."""

    def __init__(self, program):
        self.program = program

    def last_batch_size(self, batch_size):
        return max(1, batch_size // 2)

    def make_batch(self, batch_size, index, *, other_lengths=False):
        self.next_size = batch_size

    def run(self):
        program = self.program
        batch_size = self.next_size
        program.sizes.append(batch_size)
        program.device_memory.use(program.law(batch_size))
        program.device_memory.free()
        program.phases.enter("backward")
        program.module(torch.ones(batch_size, 1)).mean().backward()
        program.phases.enter("optimizer_step")
        program.optimizers[0].step()


class FakeProgram(Program):
    """One stage of a program whose memory follows ``law``, a function of the batch size."""

    device = torch.device("cpu")
    notes = (Note("search", "a note of the samples"),)
    optimizers = ()

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

    def worker_bytes(self, batch_size):
        return self.bytes_per_waiting_sample * batch_size

    shared_bytes = worker_bytes

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

    def checkpoint_states(self):
        return self.saved
