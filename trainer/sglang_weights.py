"""Weight versions on a disk that trainer and servers share: written whole, the last two kept, dead runs cleaned up."""

import fcntl
import os
import shutil
from pathlib import Path

from torch import nn

from model.export import checked_state, expected_shapes, write_folder
from model.model_minimind import MiniMindForCausalLM
from trainer.distributed import unwrap_model
from trainer.hf_model import write_hf_folder
from trainer.lora import plain_state

KEPT = 2  # versions: the one servers hold, and the one before it while they change over


class WeightVersions:
    """The numbered weight folders of one run, `{shared}/run-{id}/v000001`, …

    A file lock held while the process lives tells other runs that the folders are in use; those of runs that ended are
    removed when the next one starts. Names carry the run's id, so a server that still holds version 1 of an earlier run
    is not taken for one that holds ours.
    """

    def __init__(self, shared: Path, dtype: str):
        self.shared, self.dtype = Path(shared).resolve(), dtype
        self.run_id = os.urandom(4).hex()
        self.number, self.folder, self.shapes, self._lock = 0, None, None, None

    @property
    def version(self) -> str | None:
        """Name of the newest version, None before the first."""
        return f"{self.run_id}-{self.number}" if self.number else None

    def add(self, model: nn.Module) -> Path:
        """Write the model's weights as the next version and remove all but the last two.

        Raises: ValueError for a model that is neither MiniMind's nor from --hf_model, or whose names or shapes are not
        those of the first version, or that holds a NaN; RuntimeError if the folder cannot be written. The versions
        before stay.
        """
        bare = unwrap_model(model)
        if hasattr(bare, "folder_files"):
            self._take_folder()
            return self._keep(write_hf_folder(bare, self._next_folder(), self.dtype))
        if not isinstance(bare, MiniMindForCausalLM):
            raise ValueError(f"the policy is a {type(bare).__name__}; an SGLang server is only given the weights of a "
                             "MiniMindForCausalLM, or of the model in --hf_model")
        if self.shapes is None:
            self.shapes = expected_shapes(bare.config)
        state = checked_state(plain_state(bare), self.shapes, self.dtype, "the policy's weights")
        self._take_folder()
        return self._keep(write_folder(self._next_folder(), state, bare.config, self.dtype))

    def _next_folder(self) -> Path:
        return self.shared / f"run-{self.run_id}" / f"v{self.number + 1:06d}"

    def _keep(self, folder: Path) -> Path:
        """Count this folder, just written, as the newest version."""
        self.folder = folder
        self.number += 1
        for old in sorted(folder.parent.glob("v*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def _take_folder(self) -> None:
        """Make and lock this run's folder, and remove those whose runs no longer hold their lock."""
        if self._lock is not None:
            return
        mine = self.shared / f"run-{self.run_id}"
        try:
            mine.mkdir(parents=True)
            self._lock = open(mine / ".lock", "w", encoding="utf-8")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(f"cannot use {self.shared} for weights: {error}; name another folder that the servers "
                               "see too (--sglang_shared_path)") from error
        for other in self.shared.glob("run-*"):
            if other != mine and _is_dead(other):
                shutil.rmtree(other, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    """Whether the lock in a run's folder is there and free."""
    try:
        with open(folder / ".lock", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
