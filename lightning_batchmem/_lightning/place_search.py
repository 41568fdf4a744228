"""Find the place of the batch size: set a candidate, request the loaders, see if they follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_batchmem._lightning.clean_start import CleanStart
from lightning_batchmem._lightning.packages import is_own_error
from lightning_batchmem._lightning.project_attribute import ProjectAttribute
from lightning_batchmem._lightning.size_candidates import candidate_paths
from lightning_batchmem._lightning.size_places import (
    InHook,
    SizeNotFollowedError,
    check_one_size,
)
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem.batches.counted_batches import check_batch_of_one
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices.out_of_memory import release_traceback
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.search.ranks import Ranks


@dataclass(frozen=True)
class FollowedSetting:
    """A setting whose size is set, and whose loaders follow it.

    Args:
        setting: the setting.
        loaders: the loaders at the size at which they were requested.
        project_size: the size that the project had before.
    """

    setting: BatchSizeSetting
    loaders: StageLoaders
    project_size: int | None

    def check_samples(self, batches: ProbeBatches) -> None:
        """Raise a ValueError if loaders whose size is set make batches of ready batches."""
        place = self.setting.place
        # With a larger size the project itself collates several samples of the data set.
        if self.project_size == 1 and place.sets_loaders_of(self.setting.source):
            check_batch_of_one(batches.batch(1)[0], self.loaders.hook)

    def why_own_size(self, error: Exception, options: SearchOptions) -> str:
        """Why a search begins again at the project's own size, after an error below it.

        A step may divide its batch, or start a codebook with it, and need more than two samples.

        Returns:
            A note; empty where the search has to end with the error.
        """
        size = self.setting.size or 0
        own_size = self.project_size or 0
        largest_size = min(bound for bound, _ in options.bounds)
        # Another rank may have passed this step.
        may_retry = self.setting.trainer.world_size == 1 and options.min_batch_size is None
        if is_own_error(error) or not (may_retry and size < own_size <= largest_size):
            return ""
        return (
            f"Sizes below {own_size}, your own, were left out: at {size} there was an error"
            f" ({release_traceback(error)})."
        )


def followed_setting(
    setting: BatchSizeSetting,
    batch_size: int,
    clean_start: CleanStart,
    ranks: Ranks,
) -> FollowedSetting:
    """Set the size at the given place, or at one that is found, and request the loaders.

    All ranks find the same place. Nothing is tried where the loaders follow at the given one, or
    where the user has named it.

    Args:
        setting: the setting at the place that the options name.
        batch_size: the size to set.
        clean_start: the state before the first request.
        ranks: the processes that search together.

    Raises:
        ValueError: if the loaders follow at no place.
    """
    project_size = setting.size
    loaders = None
    try:
        loaders = setting.loaders_for(batch_size)
    except SizeNotFollowedError:
        if setting.name != SearchOptions.batch_arg_name:
            raise
    if all(ranks.exchange(loaders is not None)) and loaders is not None:
        return FollowedSetting(setting, loaders, project_size)
    trials = PlaceTrials(setting, batch_size, clean_start, ranks)
    found = trials.found()
    clean_start.again_for_loaders()
    project_size = found.size
    try:
        if isinstance(found.place, InHook):
            check_one_size(trials.project_sizes, found.source.hook, setting.name)
        loaders = found.loaders_for(batch_size)
    except ValueError as error:
        if not trials.tried:
            raise
        tried = ", ".join(f"`{path}`" for path in trials.tried)
        raise ValueError(f"{error} The loaders follow none of {tried}.") from error
    return FollowedSetting(found, loaders, project_size)


class PlaceTrials:
    """Trials of the attributes that may be the batch size of a project.

    Each of them is set, and the loaders are requested. Before the next one everything is restored.

    Args:
        setting: the setting at the place where the loaders do not follow.
        batch_size: one of the two sizes that are set.
        clean_start: the state before the first request.
        ranks: the processes that try together, and find the same place.

    Attributes:
        tried: paths of the attributes that were set.
        project_sizes: the batch sizes of the loaders as the project makes them.
    """

    def __init__(
        self,
        setting: BatchSizeSetting,
        batch_size: int,
        clean_start: CleanStart,
        ranks: Ranks,
    ) -> None:
        self.tried: list[str] = []
        self.project_sizes: list[int] = []
        self._setting = setting
        self._batch_size = batch_size
        self._clean_start = clean_start
        self._ranks = ranks

    def found(self) -> BatchSizeSetting:
        """The setting at the attribute that most loaders follow, or at their hook if there is none.

        Of several, such as a number of a configuration and one that refers to it, it is the first.
        """
        self._clean_start.again_for_loaders()
        loaders, sizes = self._setting.loaders_of_project()
        # A hook may return a loader that is a global variable.
        self._clean_start.keep_sizes_of(loaders)
        self.project_sizes = sizes
        roots = ProjectAttribute(self._setting.trainer, self._setting.module, "").roots
        own_paths = candidate_paths(roots, sizes, self._clean_start.restored)
        paths_of_ranks = self._ranks.exchange(own_paths)
        # A rank may have other attributes.
        paths = [
            path for path in paths_of_ranks[0] if all(path in others for others in paths_of_ranks)
        ]
        loaders_at = {}
        for path in paths:
            self._clean_start.again_for_loaders()
            self.tried.append(path)
            followers = self._followers(path, max(sizes))
            loaders_at[path] = min(self._ranks.exchange(followers))
        if any(loaders_at.values()):
            return self._setting.at(max(loaders_at, key=lambda path: loaders_at[path]))
        return replace(self._setting, place=InHook(self._setting.source, sizes[0]))

    def _followers(self, path: str, largest_size: int) -> int:
        """Set an attribute twice and request the loaders; returns how many of them follow."""
        setting = self._setting.at(path)
        size = self._batch_size
        # No loader has this size already, and a hook that only lowers it does not follow.
        other_size = size * max(2, largest_size // size + 1)
        # With another value, a hook of the user may raise any error, or leave the script.
        try:
            sizes = setting.sizes_at(size)
            other_sizes = setting.sizes_at(other_size)
        except (Exception, SystemExit):  # noqa: BLE001
            return 0
        if len(sizes) != len(other_sizes) or size not in sizes:
            return 0
        return sum(
            one % size == 0 and one * other_size == other * size
            for one, other in zip(sizes, other_sizes, strict=True)
        )
