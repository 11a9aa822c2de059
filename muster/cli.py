"""The `muster` command: the argument tree. A command's code is imported only when it is chosen, torch with it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.errors import MusterError, UsageError

app = typer.Typer(
    name="muster",
    help="Mixture-of-Experts inference on kernels that have passed muster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint directory.", show_default=False)]
MoEBackend = Annotated[
    str | None, typer.Option("--moe-backend", metavar="NAME", help="Expert backend; the plan chooses when not given.")
]
Unproven = Annotated[
    bool, typer.Option("--unproven", help="Choose by declared facts, whatever the evidence; every output is marked.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 takes the likeliest token.")]
TopK = Annotated[int, typer.Option(metavar="N", help="Sample among the N likeliest; 0: all.")]
TopP = Annotated[float, typer.Option(metavar="X", help="Sample among the likeliest that make up this share.")]
MinP = Annotated[float, typer.Option(metavar="X", help="Drop tokens below this share of the likeliest.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Makes sampling repeatable.", show_default=False)]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message.", show_default=False)]
Context = Annotated[
    int | None,
    typer.Option("--max-context", metavar="N", help="Most tokens of prompt and answer; default: the model's."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
AnyModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="Directory, config.json or name of a released checkpoint.")
]
Tensor = Annotated[int | None, typer.Option("--tp", metavar="N", help="Tensor-parallel GPUs; default: all there are.")]
Expert = Annotated[int | None, typer.Option("--ep", metavar="N", help="Groups of GPUs that share the experts.")]
Batch = Annotated[int, typer.Option("--batch", metavar="B", help="Sequences decoded together.")]
LoadContext = Annotated[int, typer.Option("--context", metavar="C", help="Tokens that each sequence holds.")]
Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", metavar="NAME", help="Only this backend; repeatable.", show_default=False),
]
Role = Annotated[
    str | None, typer.Option("--role", metavar="ROLE", help="Only experts, draft or linears.", show_default=False)
]
Tokens = Annotated[
    str | None,
    typer.Option("--tokens", metavar="LIST", help="Token counts, such as 1,8,64.", show_default=False),
]


def version(value: bool) -> None:
    """Prints the version and stops."""
    if value:
        from muster import __version__

        typer.echo(f"muster {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Mixture-of-Experts inference on kernels that have passed muster."""


@app.command()
def run(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt; '-' reads stdin.")],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; repeatable.")] = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    moe_backend: MoEBackend = None,
    unproven: Unproven = False,
    max_context: Context = None,
    json: Json = False,
) -> None:
    """Answer one prompt, streamed; then one line: tokens per second, backends, bytes read."""
    from muster.console import run as command

    command(
        model,
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        sampling={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "stop": tuple(stop or ()),
        },
        system=system,
        raw=raw,
        moe_backend=moe_backend,
        unproven=unproven,
        max_context=max_context,
        json=json,
    )


@app.command()
def chat(
    model: Model,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    system: System = None,
    moe_backend: MoEBackend = None,
    unproven: Unproven = False,
    max_context: Context = None,
) -> None:
    """Talk with a model at the terminal. Ctrl-C stops an answer, Ctrl-D ends the talk."""
    from muster.console import chat as command

    command(
        model,
        sampling={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
        },
        system=system,
        moe_backend=moe_backend,
        unproven=unproven,
        max_context=max_context,
    )


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="0: any that is free.", min=0, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the model for clients; default: its directory's.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", metavar="FILE", help="One key a line; clients must have one.", show_default=False
        ),
    ] = None,
    max_context: Context = None,
    max_batch: Annotated[int, typer.Option("--max-batch", metavar="N", help="Most requests computed together.")] = 64,
    token_budget: Annotated[int, typer.Option("--token-budget", metavar="N", help="Most tokens of one step.")] = 128,
    kv_gib: Annotated[
        float | None,
        typer.Option("--kv-gib", metavar="GIB", help="Key-value cache; default: what four full contexts need."),
    ] = None,
    max_queue: Annotated[int, typer.Option("--max-queue", metavar="N", help="Most requests that wait.", min=0)] = 256,
    max_body: Annotated[float, typer.Option("--max-body", metavar="MIB", help="Largest body of a request.")] = 4.0,
    reasoning_style: Annotated[
        str | None, typer.Option("--reasoning-style", metavar="NAME", help="Default: as the chat template has it.")
    ] = None,
    tool_style: Annotated[
        str | None, typer.Option("--tool-style", metavar="NAME", help="Default: as the chat template has it.")
    ] = None,
    drain: Annotated[float, typer.Option(metavar="SECONDS", help="For requests to end after SIGTERM.", min=0)] = 30.0,
    watchdog: Annotated[float, typer.Option(metavar="SECONDS", help="A longer step counts as hung.", min=0.1)] = 120.0,
    moe_backend: MoEBackend = None,
    unproven: Unproven = False,
) -> None:
    """Serve a model to clients of OpenAI's API."""
    from muster.server.options import Options

    Options(
        model=model,
        host=host,
        port=port,
        name=name,
        api_key_file=api_key_file,
        kv_gib=kv_gib,
        max_queue=max_queue,
        max_body=max_body,
        reasoning_style=reasoning_style,
        tool_style=tool_style,
        drain=drain,
        watchdog=watchdog,
        engine={
            "max_context": max_context,
            "max_batch": max_batch,
            "token_budget": token_budget,
            "moe_backend": moe_backend,
            "unproven": unproven,
        },
    ).serve()


@app.command()
def plan(
    model: Model,
    tokens: Annotated[
        str | None, typer.Option(metavar="LIST", help="Token counts, such as 1,8,64; default: up to a full prefill.")
    ] = None,
    layout_budget: Annotated[
        float | None,
        typer.Option(
            "--layout-budget",
            metavar="GIB",
            help="Memory that further layouts of the weights may take; default: a tenth of what is free.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Prove and time every backend on this checkpoint, choose the fastest proven ones, and save that."""
    from muster.lab.choose.planner import command

    command(model, tokens=tokens, layout_budget=layout_budget, json=json)


@app.command()
def quantize(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write.", show_default=False)],
    format: Annotated[str, typer.Option("--format", metavar="NAME", help="nvfp4, nvfp4-ct, mxfp4 or fp8-block.")],
    linears: Annotated[bool, typer.Option("--linears", help="Quantise attention and dense layers too.")] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint with quantised experts. Interrupted work resumes where it stopped."""
    from muster.lab.build.quantize import command

    command(model, output=output, format=format, linears=linears, json=json)


@app.command()
def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Where to write; default: MUSTER_HOME/demo.", show_default=False
        ),
    ] = None,
) -> None:
    """Write the demo checkpoints DIR/bf16 and DIR/nvfp4 and print where they are."""
    from muster.lab.build.demo import command

    command(output)


@app.command()
def backends(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Directory, config.json or name of a released checkpoint; default: a plain layer."
        ),
    ] = None,
    cc: Annotated[
        str | None,
        typer.Option("--cc", metavar="X.Y", help="Compute capability, or all; default: this machine."),
    ] = None,
    role: Role = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a page in Markdown.")] = False,
) -> None:
    """Which backends can compute a model's layers, and every reason against the others."""
    from muster.lab.explain.backends import command

    command(model, cc=cc, role=role, json=json, markdown=markdown)


@app.command()
def inspect(
    model: AnyModel,
    tp: Tensor = None,
    ep: Expert = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAMES", help="8xRTX-PRO-6000, h200, here; default: a table of all."),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GIB", help="Of each GPU, instead of its name.")
    ] = None,
    context: LoadContext = 4096,
    batch: Batch = 1,
    json: Json = False,
) -> None:
    """What a model is, how it is stored, where it fits and what could run it. No GPU, no weights."""
    from muster.lab.explain.inspect import command
    from muster.lab.explain.memory import load_of

    load = load_of(batch, context)
    command(model, tensor=tp, expert=ep, gpu=gpu, memory=memory, load=load, json=json)


@app.command()
def roofline(
    model: AnyModel,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAMES", help="8xRTX-PRO-6000, h200, ...; several by commas.")
    ] = "here",
    tp: Tensor = None,
    ep: Expert = None,
    batch: Batch = 1,
    context: LoadContext = 4096,
    cache: Annotated[str, typer.Option("--cache", metavar="NAME", help="Format of the cache: bf16 or fp8.")] = "bf16",
    mtp: Annotated[int | None, typer.Option("--mtp", metavar="N", help="Tokens to draft per step.")] = None,
    acceptance: Annotated[
        float | None, typer.Option("--acceptance", metavar="A", help="Share of drafts accepted, 0 to 1.")
    ] = None,
    measured: Annotated[bool, typer.Option("--measured", help="Divide by measured bandwidth where known.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it too: .png, .svg, .pdf.")] = None,
    json: Json = False,
) -> None:
    """How fast a model could be on a machine at most, where the time goes, what would change it. No GPU needed."""
    from muster.lab.explain.roofline import command
    from muster.lab.explain.workload import workload

    load = workload(batch, context, cache, mtp, acceptance)
    command(model, gpu=gpu, tensor=tp, expert=ep, load=load, measured=measured, json=json, plot=plot)


@app.command()
def verify(
    model: Model,
    backend: Backends = None,
    role: Role = None,
    tokens: Tokens = None,
    soak: Annotated[
        float | None,
        typer.Option("--soak", metavar="MINUTES", help="Go on with new seeds for so long.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of tokens and routing.")] = 0,
    case: Annotated[
        str | None, typer.Option("--case", metavar="JSON", help="Only this case, as the ledger names it.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run what is already known too.")] = False,
    json: Json = False,
) -> None:
    """Prove every backend on every part of a checkpoint. Interrupted work goes on where it stopped."""
    from muster.lab.prove.verify import command

    command(
        model,
        backends=backend or (),
        role=role,
        tokens=tokens,
        soak=soak,
        seed=seed,
        case=case,
        again=again,
        json=json,
    )


@app.command()
def bench(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="Checkpoint directory.", show_default=False)
    ] = None,
    backend: Backends = None,
    role: Role = None,
    tokens: Tokens = None,
    again: Annotated[bool, typer.Option("--again", help="Time what has been timed too.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Find, prove and save tile sizes for this GPU first.")] = False,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Load this server instead; the options below are for it."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Its name there; default: the only one.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Its first line is the key for it.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="LIST", help="Requests per second, one after the other; default: 1.")
    ] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="Requests per rate.")] = None,
    seconds: Annotated[float | None, typer.Option(metavar="S", help="Or seconds per rate; default: 30.")] = None,
    arrivals: Annotated[
        str | None, typer.Option(metavar="NAME", help="poisson (default), constant, burst or burst:VARIATION.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="chat (default), summarise, code, reasoning, fixed:IN,OUT or a FILE."),
    ] = None,
    shared_prefix: Annotated[
        int | None, typer.Option("--shared-prefix", metavar="N", help="Tokens in front of all prompts; default: 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of arrivals and lengths; default: 0.")] = None,
    warm_up: Annotated[
        int | None, typer.Option("--warm-up", metavar="N", help="Requests first that do not count; default: 0.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="S", help="Of one request; default: 600.")] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="LIMITS", help="Such as ttft=500ms,tbt=50ms,e2e=10s, or some of these.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a row per request.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Draw times and shares of the floor, or latencies.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Time every proven backend beside what the hardware allows, or how a server bears requests at a rate."""
    of_model = {
        "MODEL": model,
        "--backend": backend,
        "--role": role,
        "--tokens": tokens,
        "--again": again or None,
        "--tune": tune or None,
    }
    of_server: dict[str, Any] = {
        "model": name,
        "api_key_file": api_key_file,
        "rate": rate,
        "requests": requests,
        "seconds": seconds,
        "arrivals": arrivals,
        "lengths": lengths,
        "shared_prefix": shared_prefix,
        "seed": seed,
        "warm_up": warm_up,
        "timeout": timeout,
        "slo": slo,
        "csv": csv,
    }
    given = {option: value for option, value in of_server.items() if value is not None}
    if server is not None:
        from muster.lab.load.options import Options

        foreign = [option for option, value in of_model.items() if value is not None]
        Options(server=server, **given, plot=plot, json=json).bench(foreign)
        return
    checkpoint = _checkpoint(model, given)
    from muster.lab.measure.bench import command

    command(checkpoint, backends=backend or (), role=role, tokens=tokens, again=again, tune=tune, plot=plot, json=json)


def _checkpoint(model: Path | None, of_server: Iterable[str]) -> Path:
    """The checkpoint, where nothing is said that only a server understands."""
    problems = [
        UsageError(f"--{name.replace('_', '-')}", found="it without --server", expected="it with --server only")
        for name in of_server
    ]
    if model is None:
        problems.insert(0, UsageError("muster bench", found="neither MODEL nor --server", expected="one of them"))
    error = UsageError.only_or_all("options", problems)
    if error is not None:
        raise error
    assert model is not None
    return model


ledger = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The evidence of this machine.")
app.add_typer(ledger, name="ledger")


@ledger.command("list")
def ledger_list(
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="Of this backend.", show_default=False)] = None,
    part: Annotated[str | None, typer.Option(metavar="TEXT", help="Of parts with TEXT in their name.")] = None,
    role: Annotated[str | None, typer.Option(metavar="ROLE", help="experts, draft or linears.")] = None,
    verdict: Annotated[str | None, typer.Option(metavar="VERDICT", help="proven, wrong, crash, ...")] = None,
    all: Annotated[bool, typer.Option("--all", help="Older verdicts of the same case too.")] = False,
    json: Json = False,
) -> None:
    """Every verdict and time, and why those that do not count here and now do not."""
    from muster.lab.ledger.ledgers import Filter, list_command

    list_command(Filter(backend, part, role, verdict), all=all, json=json)


@ledger.command("show")
def ledger_show(
    id: Annotated[str, typer.Argument(metavar="ID", help="An id, or a beginning that only one has.")],
    json: Json = False,
) -> None:
    """Everything about one verdict or time, with the command that repeats it."""
    from muster.lab.ledger.ledgers import show_command

    show_command(id, json=json)


@ledger.command("export")
def ledger_export(
    format: Annotated[str, typer.Option("--format", metavar="NAME", help="muster or flashinfer-bench.")] = "muster",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write; default: stdout.")
    ] = None,
) -> None:
    """What this machine found itself, one JSON object a line."""
    from muster.lab.ledger.ledgers import export_command

    export_command(format, output)


@ledger.command("import")
def ledger_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Another machine's ledger.sqlite, or an export of it.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What to call it; default: its own name.")
    ] = None,
) -> None:
    """Take in another machine's evidence: shown from then on, never counted for a plan."""
    from muster.lab.ledger.ledgers import import_command

    import_command(file, name)


def main() -> None:
    """Entry point: errors become one message on stderr and their exit code."""
    try:
        app()
    except MusterError as error:
        typer.echo(f"muster: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
