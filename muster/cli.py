"""The `muster` command: the argument tree. A command's code is imported only when it is chosen, torch with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from muster.errors import MusterError

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
        max_context=max_context,
    )


@app.command()
def quantize(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write.", show_default=False)],
    format: Annotated[str, typer.Option("--format", metavar="NAME", help="nvfp4, nvfp4-ct, mxfp4 or fp8-block.")],
    linears: Annotated[bool, typer.Option("--linears", help="Quantise attention and dense layers too.")] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint with quantised experts. Interrupted work resumes where it stopped."""
    from muster.lab.quantize import command

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
    from muster.lab.demo import command

    command(output)


def main() -> None:
    """Entry point: errors become one message on stderr and their exit code."""
    try:
        app()
    except MusterError as error:
        typer.echo(f"muster: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
