"""Every number that steers a search, with its meaning and its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BudgetPolicy:
    """Numbers that bound the reading of batches that a loader forms itself, within a budget."""

    max_batches_read: int = 256
    """Batches that are read at each budget, where the loader forms them. Source: It bounds the time
    of a search, as `scan_seconds` does."""
    first_batches_kept: int = 2
    """This many of the first batches run besides the worst ones. Source: Changing shapes
    fragment memory."""
    shrinking_share: float = 0.3
    """A search over a budget begins at the project's, divided by 4 as long as this leaves at
    most this share of the largest batch. Source: A quarter is expected, and more is left where
    single samples fill the budget."""
    differing_share: float = 0.1
    """A loader follows a budget if the largest batches at two budgets differ by more than this
    share. Source: Less may be chance."""


@dataclass(frozen=True)
class ReadingPolicy:
    """Numbers that bound the reading of samples."""

    typical_samples: int = 32
    """Samples that are read with `worst_case="typical"`. Source: Several lengths, and quick to
    read."""
    max_sample_sizes: int = 10_000
    """Samples whose size is measured, at most. Source: It bounds the time of a search."""
    equal_sizes: int = 64
    """If this many samples have one size, assume that all have it; if none of them can be read,
    that none can. Source: One long sample in 64 is missed in a third of the cases."""
    equal_sizes_quick: int = 512
    """The same while samples are read quickly. Source: As above, with fewer misses."""
    equal_sizes_seconds: float = 2.0
    """Reading is quick until then. Source: It bounds the time of a search."""
    scan_seconds: float = 20.0
    """Reading samples ends after this time. Source: It bounds the time of a search."""
    sample_seconds: float = 60.0
    """Reading one sample fails after this time. Source: A worker that waits for a thread of its
    parent process waits forever."""
    samples_share: float = 0.25
    """The samples, or the batches that are kept, take at most this share of the free memory.
    Source: The steps need the rest."""
    max_draws: int = 1_000
    """Where batches concatenate samples, the largest of this many random batches is used. Source: A
    training of 1,000 steps has about as many."""
    max_drawn_sizes: int = 1_000_000
    """Samples in all of these batches, at most. Source: Sums of large batches hardly differ."""
    budget: BudgetPolicy = BudgetPolicy()


@dataclass(frozen=True)
class RehearsalPolicy:
    """Numbers that place rehearsals below the limit; shares are of the size that fills it."""

    limit_share: float = 0.95
    """The limit is at most this share of what a GPU can provide. Source:
    Libraries, fragmentation and other processes take the rest; `python -m benchmarks.cuda_search`.
    """

    probe_share: float = 0.5
    """The last measurement is at this share of the first rehearsal. Source: 0.28 found smaller
    sizes in `python -m benchmarks.cuda_search`."""
    least_growth: float = 1.5
    """A measurement is at least at this multiple of the size before. Source: Closer sizes show no
    more of the lines."""
    first_share: float = 0.9
    """The first rehearsal is at this share of the size that fills the limit. Source: Rounding and
    fragmentation take the rest; with 0.88 and 0.92 `python -m benchmarks.cuda_search` finds about
    as much."""
    most_share: float = 0.97
    """No rehearsal is above this share. Source: As above."""
    host_share: float = 0.25
    """On a CPU one size is rehearsed, at this share. Source: An overrun there ends the process.
    Twenty networks used up to 3.5 bytes for each byte of tensors, and 1 / 3.5 is 0.29: `python -m
    benchmarks.search`."""
    collective_share: float = 0.85
    """Where ranks take steps together, so that no limit can be enforced, one size is rehearsed, at
    this share. Source: An error there ends all ranks."""
    between_share: float = 0.6
    """Between a size that ran and one that failed, the next size is at this share of the way.
    Source: A rehearsal that fails ends early, so it costs less than one that passes."""
    gap_share: float = 0.06
    """The search ends when a size that passed and one that failed differ by at most this share.
    Source: Below the difference of `first_share` and `most_share`."""
    max_errors: int = 3
    """After this many rehearsals that ran out of memory, the search ends with one that passed.
    Source: It bounds the time of a search."""


@dataclass(frozen=True)
class StepPolicy:
    """Numbers of steps that are run at one size."""

    warmup_steps: int = 1
    """Warm-up steps of a measurement, at least. Source: Optimizers get their state in a step, and
    libraries allocate memory in the first."""
    rehearsal_warmup_steps: int = 2
    """The same of a rehearsal; a retry of the allocator in them does not count. Source: The second
    step places its blocks beside the optimizer states."""
    timed_steps: int = 3
    """Timed steps of a measurement whose times count, at least. Source: The median of three
    leaves out a single slow step."""
    timed_seconds: float = 0.25
    """More steps are timed until all of them have taken this time. Source: Other
    work on a shared machine often slows down all steps of a tenth of a second."""
    steady_steps: int = 3
    """Steps of a rehearsal after the warm-up. Source: `python -m benchmarks.cuda_search`; more of
    them find trainings that run out of memory in later steps. With two, 2 of 36 trainings do
    with expandable segments."""
    more_steady_steps: int = 15
    """More of them where peaks differ or steps draw random numbers, repeated until as many have
    drawn and none needs more. Source: Random depth or image size."""


@dataclass(frozen=True)
class SearchPolicy:
    """Numbers that steer a search; sizes in samples.

    The text of each number has two parts: what it does, and after "Source:" a command, a paper or a
    reason.

    Example:
        >>> SearchPolicy(first_size=4).first_size
        4
    """

    first_size: int = 2
    """The first size, unless `min_batch_size` is given. Source: One sample is an error to BatchNorm
    and takes other code paths."""
    ladder_growth: int = 4
    """The second size is this multiple of the first, as far as it is certain to fit, and where no
    error can be caught each further one of the one before. Source: All of them together take a
    third more steps than the largest alone."""
    near_best_share: float = 0.95
    """The smallest size with this share of the best throughput counts as the fastest. A size that
    does not exceed the smaller ones by as much counts as flat. Source: Beyond it, more memory gains
    next to no speed."""
    flat_sizes: int = 2
    """After this many sizes without a rise, no larger size is timed. Source: One size may be slow
    by itself, where a library changes its algorithm."""

    rehearsal: RehearsalPolicy = RehearsalPolicy()
    steps: StepPolicy = StepPolicy()
    reading: ReadingPolicy = ReadingPolicy()
