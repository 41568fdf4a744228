"""Every number that steers a search, with its meaning and its source.

``python -m lightning_batchmem.plan.policy`` prints them as the table of ``docs/limits.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

_SIMULATED = "simulated CUDA allocators: `python -m benchmarks.simulated_cuda`"
_HOST = "trainings in memory control groups: `python -m benchmarks.search`"


def _number(default: Any, meaning: str, source: str) -> Any:
    """A field of the policy; ``source`` is a command, a paper or a reason."""
    return field(default=default, metadata={"meaning": meaning, "source": source})


@dataclass(frozen=True)
class SearchPolicy:
    """Numbers that steer a search; sizes in samples. The metadata of each field explains it.

    Example:
        >>> SearchPolicy(first_size=4).first_size
        4
    """

    # Which sizes are run.
    first_size: int = _number(
        2,
        "The first size, unless `min_batch_size` is given.",
        "One sample is an error to BatchNorm and takes other code paths.",
    )
    second_growth: int = _number(
        4,
        "The second size is at most this multiple of the first.",
        "Far enough apart to measure a slope, and cheap.",
    )
    max_sizes: int = _number(
        8, "A search runs at most this many sizes.", "It bounds the time of a search."
    )
    max_sizes_compiled: int = _number(
        4,
        "The same for a module that `torch.compile` compiled.",
        "Each size is compiled for itself, which takes seconds to minutes.",
    )
    large_probe_share: float = _number(
        0.25,
        "A third probe is this share of the candidate.",
        "It shows a bend of the line while that is harmless.",
    )
    large_probe_limit_share: float = _number(
        0.45,
        "The third probe runs only if it is predicted to need at most this share of the limit.",
        "Half of `candidate_share`.",
    )
    between_probes_sizes: int = _number(
        3,
        "A size between two probes of which one failed runs only if more sizes than this are left.",
        "A candidate and two steps down need three sizes.",
    )
    candidate_share: float = _number(
        0.90,
        "The first size that is rehearsed is predicted to need this share of the limit.",
        f"Rounding and fragmentation take the rest; {_SIMULATED}",
    )
    step_up_share: float = _number(
        0.94, "The same for the larger size that is tried after a pass.", _SIMULATED
    )
    collective_share: float = _number(
        0.85,
        "The same where ranks take steps together, so that no limit can be enforced.",
        _SIMULATED,
    )
    step_down: tuple[float, ...] = _number(
        (0.052, 0.12, 0.25, 0.5), "A size shrinks by these shares after each failure.", _SIMULATED
    )
    climb: tuple[float, ...] = _number(
        (0.5, 0.8),
        "These shares of the size that fits are rehearsed first where an overrun kills.",
        _HOST,
    )
    min_gain: float = _number(
        0.02, "A smaller gain is not worth another size.", "A rehearsal costs about 14 steps."
    )
    min_gain_when_killed: float = _number(
        0.1, "The same where an overrun kills the process.", _HOST
    )
    throughput_share: float = _number(
        0.95,
        '`objective="throughput"` chooses the smallest size with this share of the best speed.',
        "Beyond it, more memory gains next to no speed.",
    )

    # The limit and the reserves.
    limit_share: float = _number(
        0.95,
        "The limit is at most this share of what the device can provide.",
        f"Libraries, fragmentation and other processes take the rest; {_SIMULATED}",
    )
    most_held_ratio: float = _number(
        2.5,
        "Two small probes on the host show at most this many held bytes for each live byte.",
        _HOST,
    )
    least_held_ratio: float = _number(
        0.75,
        "Above a rehearsal, at least this many held bytes are expected for each live byte.",
        _HOST,
    )
    reserve_share: float = _number(
        0.12,
        "Share of the growth of the resident set that is kept free on the host.",
        f"60 steps exceeded the first eight by up to 7 %; {_HOST}",
    )
    reserve_share_inexact: float = _number(
        0.4, "The same where live bytes cannot be counted.", _HOST
    )
    fragmented_ratio: float = _number(
        1.15,
        "From this ratio of reserved to requested bytes on, a note advises expandable segments.",
        _SIMULATED,
    )
    limit_tolerance: float = _number(
        0.1,
        "An earlier plan is used again if the limit differs by at most this share.",
        "The free memory of a host always differs a little.",
    )
    more_in_use_share: float = _number(
        0.01,
        "Training that starts with more in use than the search, by this share of the limit, warns.",
        "Less is no difference between two starts of one training.",
    )

    # The steps of one size.
    first_warmup_steps: int = _number(
        2, "Warm-up steps at the first size, at least.", "Libraries allocate memory in the first."
    )
    warmup_steps: int = _number(
        1, "Warm-up steps at later sizes, at least.", "Optimizers get their state in a step."
    )
    graph_warmup_steps: int = _number(
        3, "The same for a compiled module.", "CUDA graphs warm up, record and replay."
    )
    max_warmup_steps: int = _number(
        20,
        "Warm-up ends here even if an optimizer has not stepped.",
        "fp16 skips the first steps while it looks for its loss scale.",
    )
    measured_steps: int = _number(
        2, "Steps whose peaks and times a probe measures.", "The second shows a difference."
    )
    steady_steps: int = _number(
        5,
        "Steps of a rehearsal after the warm-up.",
        f"With fewer, trainings ran out of memory in later steps; {_SIMULATED}",
    )
    more_steady_steps: int = _number(
        15, "More of them where peaks differ.", "Random depth or image size."
    )
    more_steady_steps_slow: int = _number(
        5, "The same where steps are slow.", "It bounds the time of a search."
    )
    differing_share: float = _number(
        0.1, "Peaks differ from this share of the highest on.", "Less is noise of the allocator."
    )
    smaller_batch_share: float = _number(
        0.75,
        "A rehearsal on a device also has a batch of this share of the size.",
        f"Its gradients lie between those of full batches and cannot be released; {_SIMULATED}",
    )
    slow_step_seconds: float = _number(
        2.0, "Slower steps are repeated less often.", "It bounds the time of a search."
    )
    announced_seconds: float = _number(
        30.0, "A search that is expected to take longer says so.", "Patience."
    )
    restart_seconds: float = _number(
        2.0,
        "Expected time to restore everything before a rehearsal.",
        "Collecting garbage twice, and writing the weights back.",
    )
    steps_of_a_probe: int = _number(
        7, "Expected steps of a probe, with its evaluation.", "Counted in `tests/search`."
    )
    steps_of_a_rehearsal: int = _number(
        14, "Expected steps of a rehearsal, with its evaluation.", "Counted in `tests/search`."
    )

    # The lines.
    on_one_line_share: float = _number(
        0.005,
        "Sizes lie on one line if no residual is above this share of the growth.",
        "Live bytes are exact, so only rounding is left.",
    )
    flat_share: float = _number(
        0.05,
        "Held bytes are fitted where live bytes grow by less than this share of their growth.",
        "Under CUDA graphs a replay allocates nothing.",
    )
    flat_bytes: int = _number(
        64 * 2**20,
        "The same, where held bytes grow by more than this.",
        "A few segments of the allocator.",
    )

    # The samples.
    max_samples: int = _number(
        32, "Samples that are kept to make batches of.", "Several lengths, and quick to read."
    )
    max_sample_sizes: int = _number(
        10_000, "Samples whose size is measured, at most.", "It bounds the time of a search."
    )
    equal_sizes: int = _number(
        64,
        "So many samples of one size count as a data set of one size.",
        "One long sample in 64 is missed in a third of the cases.",
    )
    equal_sizes_quick: int = _number(
        512, "The same while samples are read quickly.", "As above, with fewer misses."
    )
    equal_sizes_seconds: float = _number(
        2.0, "Reading is quick until then.", "It bounds the time of a search."
    )
    scan_seconds: float = _number(
        20.0, "Reading samples ends after this time.", "It bounds the time of a search."
    )
    sample_seconds: float = _number(
        60.0,
        "Reading one sample fails after this time.",
        "A worker that waits for a thread of its parent process waits forever.",
    )
    samples_share: float = _number(
        0.25,
        "The samples take at most this share of the free memory.",
        "The steps need the rest.",
    )
    max_draws: int = _number(
        1_000,
        "Random batches of which the largest is used where batches concatenate samples.",
        "A training of 1,000 steps has about as many.",
    )
    max_drawn_sizes: int = _number(
        1_000_000,
        "Samples in all of these batches, at most.",
        "Sums of large batches hardly differ.",
    )


def policy_table(policy: SearchPolicy | None = None) -> str:
    """Return the numbers as a table in Markdown."""
    policy = policy or SearchPolicy()
    rows = ["| number | value | meaning | source |", "|---|---:|---|---|"]
    for number in fields(policy):
        value = getattr(policy, number.name)
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:,}"
        meaning = number.metadata["meaning"]
        source = number.metadata["source"]
        rows.append(f"| `{number.name}` | {text} | {meaning} | {source} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(policy_table())  # noqa: T201
