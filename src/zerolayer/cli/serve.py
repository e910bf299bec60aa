"""`zerolayer serve`: a fleet of vLLM engines behind one OpenAI server."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from zerolayer.cli import before_start, environment
from zerolayer.cli.packaged import PACKAGED_NAME, packaged_model
from zerolayer.cli.parsing import PassThroughCommand, passed_through
from zerolayer.dispatch.choices import (
    DEFAULT_POLICY,
    Admission,
    PlacementChoices,
    drain_thresholds,
)

app = typer.Typer()

SHM = Path("/dev/shm")
#: What suits the packaged model: it is small enough that compiling it costs more than it saves.
PACKAGED_ARGS = (
    ("--served-model-name", PACKAGED_NAME),
    ("--enforce-eager",),
    ("--max-num-seqs", "16"),
)
HELP = (
    "Serve a model on several vLLM engines behind one OpenAI-compatible address.\n\n"
    "An engine that dies or hangs is replaced, and its answers go on from another engine: nothing "
    "is lost or said twice, and no connection breaks. Words behind -- go to vLLM unchanged."
)
EXAMPLE = (
    "Example: zerolayer serve mistralai/Mistral-7B-v0.3 --engines 2 --engines-per-gpu 2 "
    "-- --max-model-len 4096"
)

Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder of a model, or its name on the Hugging Face hub. "
        "Without it: the small packaged SmolLM2-135M-Instruct."
    ),
]
Engines = Annotated[
    int, typer.Option(help="vLLM engines to run; each is a process tree of its own.")
]
EnginesPerGpu = Annotated[
    int,
    typer.Option(
        metavar="K",
        help="Engines that may share a GPU. By default each has its own (with "
        "--tensor-parallel-size 2 two of them). Each of K engines gets a K-th of "
        "--gpu-memory-utilization, unless that is given: then it is each engine's own.",
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on.")]
Snapshots = Annotated[
    bool,
    typer.Option(
        help="Save each new token's KV cache to shared memory, so that another engine can go on "
        "from it. Without: a moved stream is computed again."
    ),
]
SnapshotGib = Annotated[
    float,
    typer.Option(
        help="Most shared memory per engine for snapshots, in GiB; never more than the engine's "
        "own KV cache."
    ),
]
WaitForEngine = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="How long a stream waits for a restarted engine when none is left.",
    ),
]
Offload = Annotated[
    bool,
    typer.Option(
        help="Move running streams off an engine that is about to be too full, or that is much "
        "slower than the others."
    ),
]
RemoteAdmin = Annotated[
    bool,
    typer.Option(
        "--remote-admin",
        help="Obey drain, roll, scale and back from other machines too. They end engines and ask "
        "for no password: only behind a proxy that does.",
    ),
]
Policy = Annotated[
    str, typer.Option(metavar="NAME", help="How engines are chosen; another one is for comparing.")
]
AdmissionChoice = Annotated[
    Admission,
    typer.Option(
        help="What becomes of a new request when every engine is over its limits: it waits, or it "
        "is answered with 429 and Retry-After."
    ),
]
Domains = Annotated[
    str,
    typer.Option(
        metavar="SLOTS",
        help="Engines of equal hardware, balanced among themselves: 0,1;2,3 makes two domains. "
        "Engines that are not named make one more. With labels, fp8+cheap=0,1;bf16=2,3: requests "
        "with x-precision-preference: fp8 or x-model-hint: cheap go to 0 and 1 while these have "
        "room.",
    ),
]
DrainGpu = Annotated[
    float,
    typer.Option(
        metavar="PERCENT",
        help="An engine over this utilisation and over --drain-memory-percent gets new work only "
        "when no other can have it.",
    ),
]
DrainMemory = Annotated[
    float, typer.Option(metavar="PERCENT", help="See --drain-gpu-percent; share of KV in use.")
]
DrainSamples = Annotated[
    int, typer.Option(help="Samples in a row (5 a second) that must be over both.")
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the engines' logs. Default: one of this start's own under "
        "~/.local/state/zerolayer/logs, of which the newest 20 are kept.",
        show_default=False,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show vLLM's own log and each HTTP request.")
]


@dataclass(frozen=True)
class ServeWords:
    """What was typed, checked for what can be checked without vLLM."""

    model: str | None
    """None: the packaged one."""
    engines: int
    engines_per_gpu: int
    host: str
    port: int
    snapshots: bool
    snapshot_bytes: int
    wait_for_engine_s: float
    log_dir: Path
    verbose: bool
    offload: bool
    remote_admin: bool
    placement: PlacementChoices
    vllm_args: tuple[str, ...]


@app.command(cls=PassThroughCommand, help=HELP, epilog=EXAMPLE)
def serve(
    ctx: typer.Context,
    model: Model = None,
    engines: Engines = 2,
    engines_per_gpu: EnginesPerGpu = 1,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    snapshots: Snapshots = True,
    snapshot_gib: SnapshotGib = 1.0,
    wait_for_engine: WaitForEngine = 120.0,
    offload: Offload = True,
    policy: Policy = DEFAULT_POLICY,
    admission: AdmissionChoice = Admission.QUEUE,
    domains: Domains = "",
    drain_gpu_percent: DrainGpu = 92.0,
    drain_memory_percent: DrainMemory = 95.0,
    drain_samples: DrainSamples = 3,
    remote_admin: RemoteAdmin = False,
    log_dir: LogDir = None,
    verbose: Verbose = False,
) -> None:
    """See `HELP`."""
    before_start.check_engines(engines, engines_per_gpu)
    before_start.check_numbers(port, snapshot_gib, wait_for_engine)
    placement = PlacementChoices(
        policy=before_start.check_policy(policy), admission=admission,
        domains=before_start.check_domains(domains, engines),
        drain=drain_thresholds(drain_gpu_percent, drain_memory_percent, drain_samples),
    )  # fmt: skip
    if model is not None:
        model = before_start.check_model(model)
    before_start.check_shared_memory(SHM)
    before_start.check_port_free(host, port)
    words = ServeWords(
        model=model, engines=engines, engines_per_gpu=engines_per_gpu,
        host=host, port=port, snapshots=snapshots,
        snapshot_bytes=int(snapshot_gib * 2**30), wait_for_engine_s=wait_for_engine,
        log_dir=log_dir or environment.new_log_dir(datetime.now()), verbose=verbose,
        offload=offload, remote_admin=remote_admin, placement=placement,
        vllm_args=passed_through(ctx),
    )  # fmt: skip
    before_start.check_log_dir(words.log_dir)
    raise typer.Exit(_run(words))


def _run(words: ServeWords) -> int:
    """Start, show, serve; returns the exit status."""
    environment.set_vllm_defaults(
        verbose=words.verbose,
        packaged_model=words.model is None,
        nvidia=environment.nvidia_present(),
    )
    # vLLM reads its settings when it is imported: whatever imports it comes after them.
    from rich.console import Console

    from zerolayer.cli.serve_progress import ServeProgress

    console = Console(stderr=True)
    progress = ServeProgress(console, verbose=words.verbose)
    if words.snapshots:
        note = before_start.snapshot_room_note(SHM, words.engines, words.snapshot_bytes)
        if note is not None:
            progress.line("note", note, "yellow")
    model = words.model or packaged_model(console)
    many = "s" if words.engines > 1 else ""
    progress.line("fleet", f"{model} on {words.engines} engine{many}, logs in {words.log_dir}")
    progress.line("fleet", "loading vLLM")

    from zerolayer.app.serve import ServeOptions, run_serve

    options = ServeOptions(
        model=model, engines=words.engines, engines_per_gpu=words.engines_per_gpu,
        host=words.host, port=words.port,
        snapshots=words.snapshots, snapshot_bytes=words.snapshot_bytes,
        wait_for_engine_s=words.wait_for_engine_s, log_dir=words.log_dir,
        vllm_args=vllm_args(words), environment=environment.chosen_gpus(), offload=words.offload,
        remote_admin=words.remote_admin, placement=words.placement,
    )  # fmt: skip
    return run_serve(options, progress.on_event)


def vllm_args(words: ServeWords) -> tuple[str, ...]:
    """The user's words for vLLM, with ours before them where the user gave none."""
    ours: list[str] = []
    if words.model is None:
        for flag, *value in PACKAGED_ARGS:
            if not _gives(words.vllm_args, flag):
                ours += [flag, *value]
    if not words.verbose:
        if not _gives(words.vllm_args, "--uvicorn-log-level"):
            ours += ["--uvicorn-log-level", "warning"]
        if not _gives(words.vllm_args, "--disable-uvicorn-access-log"):
            ours += ["--disable-uvicorn-access-log"]
    return (*ours, *words.vllm_args)


def _gives(words: tuple[str, ...], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in words)
