"""SLURM's srun on this machine: it starts all tasks of a job here, with the variables of each."""

import os
import subprocess
import sys


def main(words):
    command = [word for word in words if not word.startswith("--")]
    tasks = [
        subprocess.Popen(
            command,
            env={**os.environ, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"},
        )
        for rank in map(str, range(int(os.environ["SLURM_NTASKS"])))
    ]
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
