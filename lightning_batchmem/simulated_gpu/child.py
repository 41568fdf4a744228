"""Run a program on a simulated GPU up to its first ``Trainer.fit``, and write what it found.

This file is the script of a new process, in which the library of the simulated GPU is loaded. It
changes torch and Lightning when the program imports them, and nothing else: until then it imports
the standard library only, so that the program starts as without it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# Of prctl in linux/prctl.h.
_PR_SET_PDEATHSIG = 1

PACKAGE = "lightning_batchmem.simulated_gpu"

# Each of them imports those before it.
VALUE_MODULES = ("known", "unknown", "assumptions", "one_rank", "values")


# Variables that a program may read before it has a Trainer.
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


class Child:
    """The program, and the file to which its result goes.

    Args:
        request: the program, its options and the file of the result, as
            :func:`~lightning_batchmem.simulated_gpu.launch.run` writes it.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        # They are computed from the import of torch on.
        self._values: Any = None
        devices = request.get("devices") or 1
        self._ranks = devices * (request.get("nodes") or 1)
        self._visible_devices = ",".join(map(str, range(devices)))
        # Functions that the library calls, which has their addresses only.
        self._told: tuple[Any, ...] = ()
        self._is_fitting = False

    def run(self) -> None:
        """Run the program; ends the process where it calls ``Trainer.fit``."""
        # The process ends with the one that waits for it, and Ctrl-C ends it without a traceback.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for name, value in self._request["environment"].items():
            # Programs that this one starts have nothing to do with the simulated GPU.
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if self._ranks > 1:
            set_rank_variables(self._request["devices"] or 1, self._ranks)
        trainers = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
        changes = {"torch": self._change_torch, **dict.fromkeys(trainers, self._change_trainer)}
        sys.meta_path.insert(0, ChangedModules(changes))
        target = self._request["target"]
        sys.argv = [target, *self._request["arguments"]]
        is_script = self._request["kind"] == "script"
        # Python has put the folder of this file there, unless PYTHONSAFEPATH is set.
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(target).resolve().parent) if is_script else os.getcwd()
        try:
            self._run_program(target)
        except KeyError as error:
            if self._ranks > 1 or error.args[:1] not in {(name,) for name in _OF_A_LAUNCHER}:
                raise
            traceback.print_exc()
            self.refuse(
                f"{target} reads {error.args[0]}, which a launcher sets for several processes: give"
                " --devices with 2 or more"
            )
        except Exception as error:
            # Its class has this name in every version of torch.
            if type(error).__name__ != "OutOfMemoryError":
                raise
            traceback.print_exc()
            reason = str(error).partition(" GPU ")[0]
            texts = [f"Nothing fits: before Trainer.fit, {reason}", *self._values.assumptions]
            self.finish({"nothing_fits": " ".join(texts)})
        self.refuse(f"{target} ended without a call of Trainer.fit")

    def _run_program(self, target: str) -> None:
        match self._request["kind"]:
            case "script":
                runpy.run_path(target, run_name="__main__")
            case "module":
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            case kind:
                arguments = (kind, target, self._request["trainer"])
                trainer, model, data = self._checked("trainer_of", *arguments)
                trainer.fit(model, data)

    def _refuse_function(self, function: bytes, library: bytes) -> None:
        """End the process in a function that the library does not model."""
        caller = sys.modules[f"{PACKAGE}.assumptions"].running_operator()
        way = "Leave this line out, or let it compute on the CPU, to plan the rest."
        if b"cudnn" in library:
            way = "With CUDA_STUB_CUDNN=0 torch takes kernels of its own."
        self.refuse(
            f"The simulated GPU does not have {function.decode()} of {library.decode()}, which"
            f" {caller} calls. {way}"
        )

    def refuse(self, sentence: str) -> NoReturn:
        """End the process with a sentence, because there is nothing to search."""
        self.finish({"error": sentence})

    def finish(self, result: dict[str, Any]) -> NoReturn:
        """Write the fields of an ``Outcome``, and end the process here."""
        Path(self._request["result"]).write_text(json.dumps(result), encoding="utf-8")
        # Loader workers would stay for some seconds.
        for process in multiprocessing.active_children():
            process.terminate()
        try:
            # The program may have replaced both by something else.
            for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
                if stream is not None and hasattr(stream, "flush"):
                    stream.flush()
        finally:
            os._exit(0)

    def _change_torch(self, torch: Any) -> None:
        """Leave cuDNN what it plans without a device, and compute the values that are known."""
        show_the_gpu(self._visible_devices)
        limit_cudnn(torch)
        loaded = {name: _loaded_by_path(name) for name in VALUE_MODULES}
        if self._ranks > 1:
            loaded["one_rank"].meet_nobody(self._ranks, self.refuse)
        self._values = loaded["values"].Values(self.refuse)
        self._values.enter()
        text = ctypes.c_char_p
        self._told = (
            ctypes.CFUNCTYPE(None, text)(self._values.add_assumption),
            ctypes.CFUNCTYPE(None, text, text)(self._refuse_function),
        )
        library = ctypes.CDLL(None)
        # Tests run without the library.
        if hasattr(library, "cuda_stub_tell"):
            library.cuda_stub_tell(*self._told)

        def refuse_training(optimizer: Any, *_: Any) -> None:
            groups = optimizer.param_groups
            if not self._is_fitting and any(
                one.is_cuda for part in groups for one in part["params"]
            ):
                self.refuse(
                    f"{self._request['target']} trains without Trainer.fit, or before it"
                    f" ({loaded['assumptions'].project_line()}), and the values of that mean"
                    " nothing. Leave it out, because only Trainer.fit is planned, or search on the"
                    " GPU itself with find_batch_size_of_loop"
                )

        # torch.optim has deleted this name.
        optimizers = sys.modules["torch.optim.optimizer"]
        optimizers.register_optimizer_step_post_hook(refuse_training)

    def _change_trainer(self, module: Any) -> None:
        """Let ``fit`` search instead of training."""
        kind = module.Trainer
        make = kind.__init__
        fit = kind.fit

        @functools.wraps(make)
        def checked_init(trainer: Any, *arguments: Any, **keywords: Any) -> None:
            show_the_gpu(self._visible_devices)
            given = inspect.signature(make).bind(trainer, *arguments, **keywords)
            world = self._checked("use_devices", given.arguments, self._request)
            if world is not None:
                # The library has to be loaded for this number of devices.
                self.finish({"start_again": world})
            make(*given.args, **given.kwargs)

        @functools.wraps(fit)
        def searching_fit(trainer: Any, *arguments: Any, **keywords: Any) -> NoReturn:
            self._is_fitting = True
            given = inspect.signature(fit).bind(trainer, *arguments, **keywords).arguments
            # The search calls it, also where a class of the project has a ``fit`` of its own.
            vars(trainer)["fit"] = functools.partial(fit, trainer)
            from lightning_batchmem.simulated_gpu.fits import notes_about_other_fits

            notes = notes_about_other_fits(sys._getframe(1))
            request = {**self._request, "simulates_cudnn": simulates_cudnn(), "notes": notes}
            self.finish(self._checked("search", given, request, self._values))

        kind.__init__ = checked_init
        kind.fit = searching_fit

    def _checked(self, name: str, *arguments: Any) -> Any:
        """Call a function of the package; its refusals, and errors of the program, end here."""
        from lightning_batchmem._lightning.errors import is_our_error
        from lightning_batchmem.simulated_gpu import search

        try:
            return getattr(search, name)(*arguments)
        # What the program does with an error of a training is not part of a search.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            # Those of an operator that a value module calls are the program's own.
            origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if is_our_error(error) and origin.stem not in VALUE_MODULES:
                self.refuse(str(error))
            traceback.print_exc()
            assumed = self._values.assumptions[-1:]
            # Torch's own errors may have pages of text.
            what = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
            parts = [f"{self._request['target']} ended with {what:.200}", *assumed]
            self.refuse(" after this was assumed: ".join(parts))


def set_rank_variables(devices: int, ranks: int) -> None:
    """Set what torchrun would set for the first rank."""
    # In a job of Slurm, Lightning would take its variables.
    os.environ.pop("SLURM_NTASKS", None)
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(devices),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="simulated",
        # Its thread would end a process that takes no step for minutes.
        TORCH_NCCL_ENABLE_MONITORING="0",
    )


def simulates_cudnn() -> bool:
    """Whether cuDNN plans for the simulated GPU.

    The library is compiled for it where its version can plan without a device.
    ``CUDA_STUB_CUDNN=0`` switches it off.
    """
    is_compiled = hasattr(ctypes.CDLL(None), "cuda_stub_has_cudnn")
    return is_compiled and os.environ.get("CUDA_STUB_CUDNN") != "0"


def limit_cudnn(torch: Any) -> None:
    """Leave cuDNN its convolutions and attention, or nothing where it needs a device for them."""
    if simulates_cudnn():
        _keep_from_cudnn(torch)
    else:
        switch_off_cudnn(torch)


def switch_off_cudnn(torch: Any) -> None:
    """Let torch take its own kernels, also where a program switches cuDNN on."""
    torch.backends.cudnn.enabled = False
    # Both names are private in torch 2.5.1 to 2.14.
    torch._C._set_cudnn_enabled = _ignore
    type(torch.backends.cudnn).enabled = property(lambda _: False, _ignore)
    # The attention of cuDNN has a switch of its own, and is preferred on Hopper.
    torch.backends.cuda.enable_cudnn_sdp(False)


# Operators for which torch prefers functions of cuDNN that need a device: their workspaces are not
# known without one.
_NEED_A_DEVICE = (
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("batch_norm", "instance_norm", "ctc_loss", "grid_sampler"),
)


def _keep_from_cudnn(torch: Any) -> None:
    """Let torch take its own kernels for the operators that cuDNN cannot plan without a device."""
    for name in _NEED_A_DEVICE:
        own = _without_cudnn(torch, getattr(torch, name))
        # TorchScript finds an operator by its function. It is private in torch 2.5.1 to 2.14.
        torch.jit._builtins._register_builtin(own, f"aten::{name}")
        setattr(torch, name, own)
        # ``torch.nn.LSTM`` and its like look for the operators here.
        setattr(torch._VF, name, own)
    layer = torch.nn.RNNBase
    layer.flatten_parameters = _without_cudnn(torch, layer.flatten_parameters)


def _without_cudnn(torch: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_own_kernels(*arguments: Any, **keywords: Any) -> Any:
        # These names are private in torch 2.5.1 to 2.14. The public context manager sets more.
        is_enabled = torch._C._get_cudnn_enabled()
        torch._C._set_cudnn_enabled(False)
        try:
            return function(*arguments, **keywords)
        finally:
            torch._C._set_cudnn_enabled(is_enabled)

    return with_own_kernels


def show_the_gpu(visible_devices: str) -> None:
    """Let the program see the simulated GPU where it has named another one of its machine."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") not in (None, "", "-1"):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices


class ChangedModules(MetaPathFinder):
    """Finds modules as usual, and calls a function with each of some modules after its import.

    Args:
        changes: name of a module -> the function.
    """

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The usual specification of the module, with a loader that calls the function."""
        # Without its entry, the finders behind this one are asked.
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        loader.exec_module = load_and_change
        return spec


def _ignore(*_: Any) -> None:
    """Do nothing with a setting."""


def _loaded_by_path(name: str) -> Any:
    """A module beside this one. The package imports Lightning, and the program has not yet."""
    full_name = f"{PACKAGE}.{name}"
    spec = importlib.util.spec_from_file_location(full_name, Path(__file__).parent / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{full_name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    Child(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).run()
