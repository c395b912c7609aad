"""Ends of runs: what shells, kernels, schedulers, launchers, libraries and Python print last.

Each entry says how the run ended, and makes the lines that follow its body. They are composed in
the shape of real ends; names of files, functions and hosts are made up.
"""
# ruff: noqa: E501 (lines of logs)

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from ends_bodies import Body

Make = Callable[[Body, random.Random], list[str]]


@dataclass(frozen=True, slots=True)
class EndCase:
    """An end. `how` are the endings that are right; `is_ill` is False for ends of healthy runs."""

    name: str
    how: tuple[str, ...]
    make: Make
    is_ill: bool = True
    needs_total: bool = False
    steps: int = 30


SITE = "/opt/venv/lib/python3.11/site-packages"
LIBRARIES = (
    (f"{SITE}/trl/trainer/grpo_trainer.py", "_generate_and_score_completions"),
    (f"{SITE}/transformers/trainer.py", "_inner_training_loop"),
    (f"{SITE}/torch/nn/modules/module.py", "_call_impl"),
    (f"{SITE}/deepspeed/runtime/zero/stage3.py", "step"),
    (f"{SITE}/vllm/v1/worker/gpu_model_runner.py", "execute_model"),
    (f"{SITE}/peft/tuners/lora/layer.py", "forward"),
)
ODD_ERRORS = (
    "ValueError: the gizmo of layer 7 is out of flurb",
    "RuntimeError: The size of tensor a (4096) must match the size of tensor b (2048) at non-singleton dimension 1",
    "TypeError: Widget.__init__() got an unexpected keyword argument 'flavour'",
    "AttributeError: module 'torch.widgets' has no attribute 'frobnicate'",
    "AssertionError",
    "NotImplementedError: frobnication of sparse widgets",
    "IndexError: list index out of range",
)
USER_ERRORS = ("KeyError: 'answer'", "AttributeError: 'NoneType' object has no attribute 'group'",
               "ZeroDivisionError: division by zero", "ValueError: could not convert string to float: 'x'")  # fmt: skip


def frames(rng: random.Random, *, in_user: bool = False) -> list[str]:
    lines = ['  File "/data/ana/proj/train.py", line 88, in <module>', "    trainer.train()"]
    for file, function in rng.sample(LIBRARIES, k=rng.randint(1, 4)):
        lines += [
            f'  File "{file}", line {rng.randint(20, 3000)}, in {function}',
            "    return self._step(batch)",
        ]
    if in_user:
        lines += [
            '  File "/data/ana/proj/rewards.py", line 41, in accuracy',
            "    return score(text)",
        ]
    return lines


def trace(rng: random.Random, error: str = "", *, in_user: bool = False) -> list[str]:
    error = error or rng.choice(USER_ERRORS if in_user else ODD_ERRORS)
    return ["Traceback (most recent call last):", *frames(rng, in_user=in_user), error]


def _prefixed(lines: list[str], prefix: str) -> list[str]:
    return [prefix + line for line in lines]


def _torchrun_table(rank: int, code: int) -> list[str]:
    return [
        f"E0312 10:00:00.123000 4200 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {code}) local_rank: {rank} (pid: 4242) of binary: /opt/venv/bin/python",
        "Traceback (most recent call last):",
        '  File "/opt/venv/bin/torchrun", line 8, in <module>',
        "    sys.exit(main())",
        f'  File "{SITE}/torch/distributed/run.py", line 918, in main',
        "    run(args)",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "============================================================",
        "train.py FAILED",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-03-12_10:00:00",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {code} (pid: 4242)",
        "============================================================",
    ]


def _ranks(_: Body, rng: random.Random) -> list[str]:
    each = [
        _prefixed(trace(rng, "ValueError: the gizmo is out of flurb"), f"[rank{rank}]: ")
        for rank in range(8)
    ]
    mixed = []
    while any(each):
        mixed.append(rng.choice([lines for lines in each if lines]).pop(0))
    return [*mixed, *_torchrun_table(3, 1)]


def _ray(body: Body, rng: random.Random) -> list[str]:
    inner = frames(rng, in_user=True)
    return [
        "Traceback (most recent call last):",
        '  File "/data/ana/verl/verl/trainer/main_ppo.py", line 4, in main',
        "    ray.get(runner.run.remote(config))",
        "ray.exceptions.RayTaskError(KeyError): ray::TaskRunner.run() (pid=412, ip=10.0.0.4)",
        *inner,
        "KeyError: 'gsm8k'",
    ]


def _chained(_: Body, rng: random.Random) -> list[str]:
    link = rng.choice((
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    ))  # fmt: skip
    return [*trace(rng), "", link, "", *trace(rng, "RuntimeError: the step could not be completed")]


def _json_trace(_: Body, rng: random.Random) -> list[str]:
    text = "\n".join(trace(rng))
    return [
        json.dumps(
            {"level": "error", "ts": "2026-03-12T10:00:00Z", "msg": "step failed", "exc_info": text}
        )
    ]


def _docker(_: Body, rng: random.Random) -> list[str]:
    return [
        json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-03-12T10:00:00Z"})
        for line in trace(rng)
    ]


def _boxed(_: Body, rng: random.Random) -> list[str]:
    return [
        "╭─────────── Traceback (most recent call last) ───────────╮",
        "│ /data/ana/proj/train.py:88 in <module>                  │",
        f"│ {SITE}/trl/trainer/x.py:9 in step │",
        "│ ❱ 9 │   raise ValueError(x)                             │",
        "╰─────────────────────────────────────────────────────────╯",
        "ValueError: the gizmo is out of flurb",
    ]


def _coloured(_: Body, rng: random.Random) -> list[str]:
    bar = "\r 30%|###       | 30/100 [00:30<02:00, 1.0it/s]"
    lines = trace(rng)
    return [bar + lines[0], *(f"\x1b[31m{line}\x1b[0m" for line in lines[1:])]


def _cut_head(_: Body, rng: random.Random) -> list[str]:
    return trace(rng)[2:]


def _cut_tail(_: Body, rng: random.Random) -> list[str]:
    lines = trace(rng)
    return lines[: rng.randint(2, len(lines) - 1)]


def _only(*lines: str) -> Make:
    return lambda _, rng: list(lines)


def _of_worker(*lines: str) -> Make:
    return lambda body, rng: _prefixed(list(lines), body.prefix)


def _bad_then_finish(count: int) -> Make:
    return lambda body, rng: [*body.bad * count, *body.finish]


def _hung_in_engine(body: Body, rng: random.Random) -> list[str]:
    """An engine that logs every few minutes for hours, with nothing to do."""
    return [
        f"INFO 03-26 {hour:02d}:{minute:02d}:43 [loggers.py:12] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%"
        for hour in range(2, 9)
        for minute in range(0, 60, 5)
    ]


NCCL = (
    "[rank3]:[E312 10:10:00.1 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600041 milliseconds before timing out.",
    "[rank3]:[E312 10:10:00.2 ProcessGroupNCCL.cpp:621] [Rank 3] To avoid data inconsistency, we are taking the entire process down.",
)
SEGV_DUMP = (
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007fcf597eb640 (most recent call first):",
    f'  File "{SITE}/flashinfer/decode.py", line 514 in begin_forward',
    f'  File "{SITE}/vllm/attention/backends/flashinfer.py", line 149 in begin_forward',
    '  File "/data/ana/proj/train.py", line 88 in <module>',
    "",
    "Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)",
)
DIED, KILLED, HUNG = ("exception",), ("killed",), ("hung",)
ILL: tuple[EndCase, ...] = (
    EndCase("user_traceback", DIED, lambda _, rng: trace(rng, in_user=True)),
    EndCase("library_traceback", DIED, lambda _, rng: trace(rng)),
    EndCase("worker_traceback", DIED, lambda body, rng: _prefixed(trace(rng), body.prefix or "[rank0]: ")),
    EndCase("eight_ranks", DIED, _ranks),
    EndCase("ray_task", DIED, _ray),
    EndCase("chained", DIED, _chained),
    EndCase("cut_head", DIED, _cut_head),
    EndCase("cut_tail", DIED, _cut_tail),
    EndCase("json_traceback", DIED, _json_trace),
    EndCase("docker_traceback", DIED, _docker),
    EndCase("coloured_traceback", DIED, _coloured),
    EndCase("rich_box", DIED, _boxed),
    EndCase("logger_traceback", DIED, lambda _, rng: _prefixed(trace(rng), "2026-03-01 10:00:00,123 ERROR worker: ")),
    EndCase("cuda_oom", DIED, lambda _, rng: trace(rng, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.42 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.2 GiB is free.")),
    EndCase("cuda_oom_alone", DIED, _of_worker("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.42 GiB.")),
    EndCase("illegal_access", DIED, _only("terminate called after throwing an instance of 'c10::Error'", "  what():  CUDA error: an illegal memory access was encountered", "Aborted (core dumped)")),
    EndCase("segfault", DIED, _only("Segmentation fault (core dumped)")),
    EndCase("segfault_of_shell", DIED, _only("./run.sh: line 12:  4242 Segmentation fault      (core dumped) python train.py")),
    EndCase("faulthandler", DIED, _only(*SEGV_DUMP)),
    EndCase("glibc", DIED, _only("double free or corruption (!prev)", "Aborted (core dumped)")),
    EndCase("bus_error", DIED, _only("Bus error (core dumped)")),
    EndCase("sigsegv_of_torchrun", DIED, lambda _, rng: _torchrun_table(2, -11)),
    EndCase("mpi", DIED, _only("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD", "with errorcode 1.")),
    EndCase("disk_full", DIED, lambda _, rng: trace(rng, "OSError: [Errno 28] No space left on device")),
    EndCase("exit_code", DIED, _only("srun: error: node01: task 3: Exited with exit code 1")),
    EndCase("hydra", DIED, lambda _, rng: ["Error executing job with overrides: ['trainer.nnodes=1']", *trace(rng)]),
    EndCase("ray_actor", DIED, _only("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.")),
    EndCase("engine_dead", DIED, lambda _, rng: [*_prefixed(trace(rng), "(EngineCore_DP0 pid=9) ERROR 03-26 22:47:24 [core.py:712] "), "RuntimeError: Engine core initialization failed. See root cause above."]),
    EndCase("error_line", DIED, _only("2026-03-01 10:00:00,123 ERROR trainer: the gizmo is out of flurb, giving up")),
    EndCase("killed", KILLED, _only("Killed")),
    EndCase("killed_of_shell", KILLED, _only("./run.sh: line 12:  4242 Killed                  python train.py --lr 1e-6")),
    EndCase("killed_srun", KILLED, _only("srun: error: node01: task 0: Killed", "srun: Terminating StepId=4242.0")),
    EndCase("oom_slurm", KILLED, _only("slurmstepd: error: Detected 1 oom_kill event in StepId=4242.batch. Some of the step tasks have been OOM Killed.")),
    EndCase("oom_kernel", KILLED, _only("[81234.1] Out of memory: Killed process 4242 (python) total-vm:182211kB, anon-rss:171000kB")),
    EndCase("sigkill_torchrun", KILLED, lambda _, rng: _torchrun_table(5, -9)),
    EndCase("time_limit", KILLED, _only("slurmstepd: error: *** JOB 4242 ON node01 CANCELLED AT 2026-03-12T10:00:00 DUE TO TIME LIMIT ***")),
    EndCase("cancelled", KILLED, _only("slurmstepd: error: *** STEP 4242.0 ON node01 CANCELLED AT 2026-03-12T10:00:00 ***")),
    EndCase("preempted", KILLED, _only("slurmstepd: error: *** JOB 4242 ON node01 CANCELLED AT 2026-03-12T10:00:00 DUE TO PREEMPTION ***")),
    EndCase("kubernetes", KILLED, _only("command terminated with exit code 137", "Last State: Terminated, Reason: OOMKilled")),
    EndCase("sigterm", KILLED, _only("Received SIGTERM, exiting.")),
    EndCase("terminated", KILLED, _only("Terminated")),
    EndCase("signal_exception", KILLED, lambda _, rng: trace(rng, "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 15")),
    EndCase("sighup", KILLED, lambda _, rng: trace(rng, "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 1")),
    EndCase("nccl_watchdog", (*HUNG, *DIED), _only(*NCCL)),
    EndCase("nccl_watchdog_abort", (*HUNG, *DIED), _only(*NCCL, "terminate called after throwing an instance of 'c10::DistBackendError'", "  what():  [Rank 3] Watchdog caught collective operation timeout")),
    EndCase("barrier", (*HUNG, *DIED), _only("RuntimeError: [Rank 0]: Rank 3 failed to pass monitoredBarrier in 1800000 ms")),
    EndCase("nan_then_finish", ("finished", "unknown"), _bad_then_finish(6)),
    EndCase("nan_at_end", ("finished", "unknown"), _bad_then_finish(1)),
    EndCase("silence", ("open",), _only(), needs_total=True),
    EndCase("cut_line", ("open",), lambda body, rng: [body.lines[-1][: len(body.lines[-1]) // 2]], needs_total=True),
    EndCase("keyboard", ("stopped",), lambda _, rng: trace(rng, "KeyboardInterrupt")),
)  # fmt: skip
NOISE = (
    "[rank0]:[W312 10:00:00.2 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources.",
    "wandb: Run summary:",
    "wandb:   train/global_step 100",
    "wandb: Synced 5 W&B file(s), 0 media file(s)",
)
IGNORED = (
    "Exception ignored in: <function Pool.__del__ at 0x7f>",
    "Traceback (most recent call last):",
    '  File "/usr/lib/python3.11/multiprocessing/pool.py", line 268, in __del__',
    "    self._change_notifier.put(None)",
    "AttributeError: 'NoneType' object has no attribute 'dumps'",
)
FINISHED = ("finished", "unknown")
HEALTHY: tuple[EndCase, ...] = (
    EndCase("finish", FINISHED, lambda body, rng: [*body.finish], False, steps=100),
    EndCase("finish_noise", FINISHED, lambda body, rng: [*body.finish, *NOISE], False, steps=100),
    EndCase("finish_ignored", FINISHED, lambda body, rng: [*body.finish, *IGNORED], False, steps=100),
    EndCase("finish_server_down", FINISHED, lambda body, rng: [*body.finish, "INFO:     Received SIGTERM, shutting down the inference server.", "W0312 10:00:00 api.py:900] Sending process 4242 closing signal SIGTERM"], False, steps=100),
    EndCase("last_step", FINISHED, _only(), False, steps=100),
)  # fmt: skip
# What a run survives: put into the middle of a body that continues to its end.
SURVIVED: dict[str, tuple[str, ...]] = {
    "caught": ("Reward worker failed, retrying:", "Traceback (most recent call last):",
               '  File "/data/ana/proj/rewards.py", line 41, in accuracy', "    return float(text)",
               "ValueError: could not convert string to float: 'x'"),
    "earlier_kill": ("Killed", "Resuming training from checkpoint-10"),
    "oom_retry": ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                  "memory ran out; retrying with a smaller micro-batch"),
    "words": ("sample: 'the process was killed by signal 9 and had a segmentation fault'",),
}  # fmt: skip
