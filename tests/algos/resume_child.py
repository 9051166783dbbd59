"""`python resume_child.py run RECIPE ...` is `python -m rewarden.cli run RECIPE ...` on a slow disk, to be killed while it writes.

Each tensor file takes KILL_SLOW_S longer. The KILL_AT-th one below a checkpoint or export that is being written (KILL_IN is
"checkpoint" or "export") stops for good when half of its bytes are on disk, and KILL_MARK says that it has come so far.
"""

import itertools
import os
import runpy
import time
from pathlib import Path

import safetensors.torch

HIDDEN = {"checkpoint": ".tmp-step-", "export": ".tmp-export"}
write = safetensors.torch.save_file
files = itertools.count(1)


def save_file(tensors, filename, metadata=None):
    time.sleep(float(os.environ.get("KILL_SLOW_S", "0")))
    write(tensors, filename, metadata)
    hidden = HIDDEN.get(os.environ.get("KILL_IN", ""))
    if hidden and hidden in str(filename) and next(files) == int(os.environ["KILL_AT"]):
        os.truncate(filename, Path(filename).stat().st_size // 2)
        Path(os.environ["KILL_MARK"]).touch()
        time.sleep(300)


# before rewarden, transformers and peft are imported: they take the function by name
safetensors.torch.save_file = save_file
runpy.run_module("rewarden.cli", run_name="__main__", alter_sys=True)
