"""The command line: parses, calls, prints. Heavy imports happen inside commands: help and typing errors are quick."""

import argparse
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FIELD = "--config."
AXIS = "--sweep."
STREAM = "--stream."
EVALUATE = {  # fields of `eval` that `evaluate` can set, with an example
    "lengths": "64,128",
    "protocols": "targets,blocks,stream",
    "split": "validation or test",
    "last_k": "32",
    "stride": "64",
    "max_windows": "256",
    "batch_tokens": "4096",
    "transforms": "none,pi,yarn:factor=4:ramp=paper; `pe-ablation transforms` lists them",
}
GENERATE = {  # how `generate` goes on: default and help
    "max_new_tokens": ("64", "how many tokens each prompt gets at most; ends at EOS"),
    "temperature": ("1.0", "of the draw; 0 takes the most likely token"),
    "top_k": ("all", "draw among the k most likely"),
    "top_p": ("1.0", "among the fewest that hold this probability"),
    "seed": ("0", "of the draws"),
    "cache": ("full", "what is kept: full, window, sink, recompute, block_recompute"),
    "window": ("as in training", "W, how many tokens are kept, sinks among them"),
    "sinks": ("4 with sink, else 0", "S, how many first tokens are kept for good"),
    "evict": ("after", "a token is dropped after the next one was read, or before"),
    "positions": ("in_cache", "of what is kept: in_cache, original, capped"),
    "limit": ("none", "with positions capped: how far away sinks are shown at most"),
    "absolute": ("none", "for encodings added at the input: saturate, ring, layer0_fix"),
    "cache_dtype": ("float32", "keys and values are kept in: float32, bfloat16"),
    "transform": ("none", "of the trained model, as yarn or ntk:factor=4 (see transforms)"),
}
BENCH = {  # shapes of what is measured: default and help
    "size": ("micro", "of the decoder, by name"),
    "length": ("128", "tokens of a training window, of a prompt and of what follows it"),
    "batch": ("32 windows, 8 prompts", "how many of them at once"),
    "encodings": ("each part's own", "names, as none,rope"),
    "lengths": ("512,1024,2048,4096,8192", "tokens of the windows that are scored"),
    "tokens": ("100000", "of the text to be streamed"),
    "rounds": ("5, evaluation 3", "turns of each way"),
}
REPORT = {  # what `report` can narrow down
    "protocol": "one protocol: targets, blocks or sliding (default: all)",
    "metric": "bits_per_byte, nats, perplexity, ... (default: bits_per_byte)",
    "split": "validation or test (default: validation)",
}
PICTURES = "docs/encodings"
SELECT = "choose the best value of a swept field (lr: train.learning_rate) per encoding and training length, at 1x"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 fine, 1 something is not done, 2 refused (one line on stderr), 130 interrupted.

    75 (EX_TEMPFAIL): `launch` or `run` was stopped by SIGTERM or SIGUSR1; the same command goes on from there.
    """
    parser = _parser()
    rest, fields = _split_fields(sys.argv[1:] if argv is None else list(argv), FIELD, parser)
    rest, axes = _split_fields(rest, AXIS, parser)
    rest, stream = _split_fields(rest, STREAM, parser)
    args = parser.parse_args(rest)
    if fields and getattr(args, "config", None) is None and args.command is not _import_gpt2:
        parser.error(f"{FIELD}FIELD=VALUE goes with --config")
    if axes and args.command is not _launch:
        parser.error(f"{AXIS}FIELD=VALUES goes with launch")
    if stream and args.command is not _evaluate:
        parser.error(f"{STREAM}FIELD=VALUE goes with evaluate")
    args.fields, args.axes, args.stream_fields = fields, axes, stream
    try:
        return args.command(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError) as error:
        if not _is_refusal(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _is_refusal(error: Exception) -> bool:
    """Whether this package raised it to refuse something; from inside a library it is a fault, to be shown whole."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, FileNotFoundError) or raised_in.is_relative_to(Path(__file__).parent)


def _split_fields(argv: list[str], prefix: str, parser: argparse.ArgumentParser) -> tuple[list[str], dict[str, str]]:
    """Take `--config.a.b=v` and `--config.a.b v` out of the arguments: (what is left, {"a.b": "v"})."""
    rest, fields = [], {}
    remaining = iter(argv)
    for argument in remaining:
        if not argument.startswith(prefix):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix(prefix).partition("=")
        text = value if equals else next(remaining, None)
        if text is None:
            parser.error(f"{argument}: needs a value")
        if name in fields:
            parser.error(f"{prefix}{name}: given twice")
        fields[name] = text
    return rest, fields


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pe-ablation", description="Positional-encoding ablations.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    launch = _command(commands, "launch", _launch, "train and score every point of a sweep")
    what_if = _add_config(launch, launch)
    what_if.add_argument("--list", action="store_true", help="print a line per point (index, name, seeds) and stop")
    launch.add_argument("--sweep", metavar="NAMES", help="a sweep of the config file, or the product of A,B")
    launch.add_argument("--only", action="append", default=[], metavar="KEY=VALUE|GLOB", help="some points and seeds")
    launch.epilog = f"{launch.epilog}; {AXIS}FIELD=V1,V2 replaces the values of a swept field"
    _add_select(launch, f"{SELECT}, on a seed of its own, then train the sweep at it", "100")
    launch.add_argument(
        "--workers", metavar="N", type=int, default=1, help="points or packs at once, each on its cores or device"
    )
    launch.add_argument(
        "--pack", action="store_true", help="train points that differ by train.learning_rate alone in one program"
    )
    launch.add_argument(
        "--index", metavar="I", type=int, help="only the point, or with --pack the pack, of this index (array jobs)"
    )
    launch.add_argument("--force", action="store_true", help="train again; what is there is kept as DIR.replaced-N")

    run = _command(commands, "run", _run, "train and score the config alone, without a sweep")
    what = run.add_mutually_exclusive_group(required=True)
    _add_config(run, what)
    what.add_argument("--point", nargs="+", metavar="DIR", help=argparse.SUPPRESS)

    status = _command(commands, "status", _status, "list the runs: done, running, stopped, failed (why), missing")
    status.add_argument("workdir", metavar="WORKDIR")

    evaluate = _command(commands, "evaluate", _evaluate, "score finished runs elsewhere; nothing is trained")
    evaluate.add_argument("runs", metavar="RUNS")
    for name, help_text in EVALUATE.items():
        evaluate.add_argument(f"--{name}", help=f"{help_text} (default: the run's own)")
    evaluate.epilog = (
        f"with --protocols stream: {STREAM}window=W, {STREAM}sinks=0,1,2,4, {STREAM}tokens=N, ... (StreamConfig)"
    )

    generate = _command(commands, "generate", _generate, "continue prompts with a trained model")
    generate.add_argument("run", metavar="RUN", help="one finished run: POINT/seed_K")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="may be given again: a batch (default: '')")
    for name, (default, help_text) in GENERATE.items():
        generate.add_argument(f"--{name}", metavar="X", help=f"{help_text} (default: {default})")
    generate.add_argument("--stream", action="store_true", help="show the text as it comes; one prompt")
    generate.add_argument("--stats", action="store_true", help="repetition: rep-n, distinct-n, diversity, loops")

    report = _command(commands, "report", _report, "tables and curves from run records")
    report.add_argument("runs", metavar="RUNS", nargs="+", help="a folder of runs; two with --compare")
    report.add_argument("--out", metavar="DIR", help="where to write (default: RUNS/report, of the first RUNS)")
    for name, help_text in REPORT.items():
        report.add_argument(f"--{name}", help=help_text)
    report.add_argument("--baseline", metavar="ARM", help="an arm to which all others' paired differences are shown")
    report.add_argument("--margin", type=float, metavar="SHARE", help="of 1x, within which a cell is stable (0.01)")
    _add_select(report, f"{SELECT}, on seeds that the table leaves out", "those with the whole grid")
    report.add_argument(
        "--compare", action="store_true", help="the second RUNS less the first, paired, and their config"
    )
    report.add_argument("--wandb", action="store_true", help="also mirror table, figures and rows to W&B")

    import_ = _command(commands, "import-gpt2", _import_gpt2, "read a Hugging Face GPT-2 folder into a run directory")
    import_.add_argument("folder", metavar="DIR", help="where config.json and model.safetensors are")
    import_.add_argument("--out", metavar="RUNDIR", help="the run directory (default: runs/<name of DIR>)")
    import_.epilog = f"{FIELD}FIELD=VALUE sets what it is scored on and how: data.*, eval.*, label, model.dtype"

    export = _command(commands, "export-gpt2", _export_gpt2, "write a run of encoding learned as such a folder")
    export.add_argument("run", metavar="RUNDIR", help="one finished run: POINT/seed_K")
    export.add_argument("folder", metavar="DIR", help="a folder that is empty or not there")

    bench = _command(commands, "bench", _bench, "measure speed and memory on this machine, beside peers")
    bench.add_argument("parts", metavar="PART", nargs="*", help="training, evaluation, decoding, streaming (all)")
    bench.add_argument("--out", metavar="DIR", default="runs/bench", help="where to write (default: runs/bench)")
    for name, (default, help_text) in BENCH.items():
        bench.add_argument(f"--{name}", metavar="X", help=f"{help_text} (default: {default})")

    listed = _command(
        commands, "encodings", _encodings, "list the encodings: formula, source, parameters, what to expect"
    )
    listed.add_argument("--check", metavar="NAME|FILE.py:CLASS", help="try one against everything that all must do")
    listed.add_argument("--docs", metavar="FILE", help="write their documentation, as docs/encodings.md is")
    listed.add_argument("--plot", metavar="DIR", nargs="?", const=PICTURES, help=f"draw them (default: {PICTURES})")
    listed.add_argument("--only", metavar="NAME|FILE.py:CLASS", help="with --plot: draw this one alone")
    changes = _command(
        commands, "transforms", _transforms, "list what a trained model can be read under: NAME[:FIELD=VALUE]..."
    )
    changes.add_argument(
        "--run", metavar="RUN", help="instead, how often each pair of its rotation turns, by transform"
    )
    changes.add_argument("--length", metavar="N", type=int, help="with --run: tokens to be read (default: the longest)")
    changes.add_argument("--transforms", metavar="NAMES", help="with --run: which (default: pi, ntk, ...)")
    return parser


def _command(commands: Any, name: str, function: Callable[[argparse.Namespace], int], help_text: str):
    parser = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
    parser.set_defaults(command=function)
    return parser


def _add_config(parser: argparse.ArgumentParser, source: Any) -> Any:
    """The arguments of what a config file starts; returns the group of those that start nothing."""
    source.add_argument("--config", metavar="FILE[:ARG]", required=source is parser, help="config file, its argument")
    parser.add_argument("--workdir", metavar="DIR", help="where runs are kept (default: runs/<file>-<argument>)")
    what_if = parser.add_mutually_exclusive_group()
    what_if.add_argument("--dry_run", action="store_true", help="print what would run and its cost, write nothing")
    parser.epilog = f"{FIELD}FIELD=VALUE overrides a field, as in {FIELD}train.steps=100"
    return what_if


def _add_select(parser: argparse.ArgumentParser, help_text: str, seeds: str) -> None:
    parser.add_argument("--select", metavar="FIELD", help=help_text)
    parser.add_argument("--select_seed", metavar="K", help=f"the seed to choose by (default: {seeds})")


def _selected(args: argparse.Namespace) -> dict[str, Any]:
    """{field, seed} of --select; empty without it."""
    from pe_ablation import config

    if args.select is None:
        if args.select_seed is not None:
            raise config.ConfigError("select_seed: goes with --select FIELD")
        return {}
    from pe_ablation import selection  # pandas, which a launch without a choice doesn't wait for

    seed = args.select_seed
    typed = None if seed is None else config.convert(int, config.from_flag(seed), "select_seed")
    return {"field": selection.field_path(args.select), "seed": typed}


def _overrides(fields: Mapping[str, str]) -> dict[str, Any]:
    from pe_ablation import config

    return {path: config.from_flag(text) for path, text in fields.items()}


def _launch(args: argparse.Namespace) -> int:
    from pe_ablation import launch, mirror, sweep, tuning

    selected = _selected(args)
    _leave_accelerators()
    file = sweep.load(args.config)
    points = _points(file, args)
    if args.list:
        return _print(sweep.listing(sweep.packs(points, args.pack)))
    if args.index is not None:
        if selected:
            raise ValueError("--index: goes without --select, which needs the whole grid to choose")
        points = launch.at(points, args.index, pack=args.pack)
    points = mirror.tagged(points, args.sweep.split(",") if args.sweep else [file.name])
    workdir = Path(args.workdir or f"runs/{file.name}")
    if args.dry_run:
        planned = tuning.dry_run if selected else launch.dry_run
        return _print(planned(points, workdir, pack=args.pack, **selected))
    start = tuning.launch_selected if selected else launch.launch
    options = {"workers": args.workers, "force": args.force, "pack": args.pack}
    code = start(points, workdir, file.spec, **options, **selected)
    print()
    _print(launch.status(workdir))
    print(f"\npe-ablation report {workdir}{f' --select {args.select}' if selected else ''}")
    _print(mirror.sync_commands(workdir))
    return code


def _points(file: Any, args: argparse.Namespace) -> Any:
    """The points that a launch is about: its sweeps, with their axes replaced, of which `--only` keeps some."""
    from pe_ablation import config, only, sweep

    names = sweep.default_sweep(file) if args.sweep is None else args.sweep
    axes = {path: config.from_flags(path, text) for path, text in args.axes.items()}
    keep = functools.partial(only.select, conditions=args.only)
    return sweep.points(file, names, _overrides(args.fields), axes, keep)


def _leave_accelerators() -> None:
    """A launcher only plans: accelerators, and their memory, belong to the processes that it starts."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _keep_programs() -> None:
    from pe_ablation import compiled, data

    compiled.keep(data.cache_folder())


def _run(args: argparse.Namespace) -> int:
    from pe_ablation import cores, launch, mirror, stopping, sweep

    cores.as_devices()
    if args.point:
        _keep_programs()
        return launch.child(args.point)
    file = sweep.load(args.config)
    points = sweep.points(file, None, _overrides(args.fields))
    workdir = Path(args.workdir or f"runs/{file.name}")
    if args.dry_run:
        return _print(launch.dry_run(points, workdir))
    try:
        with stopping.interrupting():
            [plan] = launch.plan(points, workdir, file.spec, launch.check(points))
    except stopping.Stopped:
        return stopping.RESUMABLE
    _keep_programs()
    code = launch.run_pack([run.path for run in plan.open_runs])
    _print(launch.status(workdir / plan.point.directory_name))
    _print(mirror.sync_commands(workdir / plan.point.directory_name))
    return code


def _status(args: argparse.Namespace) -> int:
    from pe_ablation import launch

    return _print(launch.status(args.workdir))


def _evaluate(args: argparse.Namespace) -> int:
    from pe_ablation import checkpoint, config, evaluate, mirror, record, streaming, streaming_tables, trained

    _keep_programs()
    chosen = {name: getattr(args, name) for name in EVALUATE}
    overrides = _overrides({f"eval.{name}": text for name, text in chosen.items() if text is not None})
    overrides |= _overrides({f"stream.{name}": text for name, text in args.stream_fields.items()})
    errors = (
        record.RecordError, trained.NotTrained, checkpoint.CheckpointError, evaluate.EvaluationError,
        streaming.StreamError,
    )  # fmt: skip
    left_out, scored, streamed = 0, [], []
    runs = record.find(args.runs)
    if args.transforms is not None:
        evaluate.check_transforms(runs, overrides)
    for run in runs:
        try:
            asked = config.read(run.config["experiment"], overrides)
            if args.stream_fields and "stream" not in asked.eval.protocols:
                raise config.ConfigError(f"{STREAM}{next(iter(args.stream_fields))}: goes with --protocols stream")
            evaluate.check(asked)
            if "stream" in asked.eval.protocols:
                streaming.check(asked)
                streamed.append((run, {cell["key"] for cell in streaming.score(run, asked)}))
            if not asked.eval.windowed:
                continue
            frame = evaluate.score(run.path, overrides)
        except errors as error:
            print(f"{error}; left out", file=sys.stderr)
            left_out += 1
            continue
        columns = ["encoding", "train_length", "eval_length", "seed", "protocol", "null", "bits_per_byte", "status"]
        transformed = asked.eval.transforms != ("none",)
        print(frame[[*columns[:1], *(["transform"] if transformed else []), *columns[1:]]].to_string(index=False))
        for reason in evaluate.reasons(run, frame) if transformed else ():
            print(f"{run.path}: n/a: {reason}", file=sys.stderr)
        scored.append((run, asked, frame))
    if streamed:
        print(streaming_tables.to_markdown(streaming_tables.rows(streamed)))
    mirror.evaluated(scored)
    _print(mirror.sync_commands(args.runs))
    return 1 if left_out else 0


def _generate(args: argparse.Namespace) -> int:
    from pe_ablation import config, generate, record, trained

    given = {name: config.from_flag(text) for name in GENERATE if (text := getattr(args, name)) is not None}
    asked = config.build(generate.Request, given)
    prompts = [prompt.encode("utf-8", "surrogateescape") for prompt in args.prompt or [""]]
    if args.stream and len(prompts) > 1:
        raise config.ConfigError(f"--stream: {len(prompts)} prompts; one at a time")
    runs = record.find(args.run)
    if len(runs) > 1:
        raise config.ConfigError(f"RUN: {args.run} holds {len(runs)} runs; name one, such as {runs[0].path}")
    _keep_programs()
    loaded = trained.load(runs[0])
    return _print(generate.shown(loaded, prompts, asked, stream=args.stream, stats=args.stats))


def _report(args: argparse.Namespace) -> int:
    from pe_ablation import config, report

    wanted, how = (2, "with") if args.compare else (1, "without")
    if len(args.runs) != wanted:
        raise config.ConfigError(f"RUNS: {len(args.runs)} given; {wanted} {how} --compare")
    asked = {name: value for name in (*REPORT, "baseline", "margin") if (value := getattr(args, name)) is not None}
    out = args.out or Path(args.runs[0]) / "report"
    if args.compare:
        from pe_ablation import compare

        if alone := [name for name in ("baseline", "margin", "wandb") if getattr(args, name) not in (None, False)]:
            raise config.ConfigError(f"--{alone[0]}: goes without --compare")
        print(compare.write(args.runs[0], args.runs[1], out, **asked, **_selected(args)))
        return 0
    print(report.write(args.runs[0], out, **asked, **_selected(args)))
    if args.wandb:
        from pe_ablation import mirror

        _print(mirror.reported(args.runs[0], out))
    return 0


def _import_gpt2(args: argparse.Namespace) -> int:
    from pe_ablation import huggingface

    _leave_accelerators()
    out = args.out or Path("runs") / Path(args.folder).absolute().name
    run = huggingface.import_folder(args.folder, out, _overrides(args.fields))
    lines = (f"{run.path}: {run.experiment.label}, weights {run.experiment.imported}", "")
    return _print([*lines, f"pe-ablation evaluate {run.path}"])


def _export_gpt2(args: argparse.Namespace) -> int:
    from pe_ablation import huggingface

    _leave_accelerators()
    return _print([f"{path}" for path in huggingface.export(args.run, args.folder)])


def _bench(args: argparse.Namespace) -> int:
    from pe_ablation import bench, config, cores

    cores.as_devices()
    given = {name: config.from_flag(text) for name in BENCH if (text := getattr(args, name)) is not None}
    parts = bench.check(args.parts, given)
    asked = config.build(bench.Request, given)
    say = functools.partial(print, file=sys.stderr, flush=True)
    return _print(bench.write(args.out, parts, asked, say))


def _encodings(args: argparse.Namespace) -> int:
    from pe_ablation import encodings

    if args.only is not None and args.plot is None:
        raise ValueError("--only: goes with --plot")
    if args.check is not None:
        if args.docs is not None or args.plot is not None:
            raise ValueError("--check: goes without --docs and --plot")
        return _checked(args.check)
    if args.docs is not None or args.plot is not None:
        return _print(_documented(args))
    for name in encodings.names():
        about = encodings.find(name).about
        options = ", ".join(f"{option}={value}" for option, value in encodings.option_defaults(name).items()) or "none"
        described = (("formula", about.formula), ("source", about.source), ("parameters", about.parameters))
        lines = (*described, ("options", options), ("beyond", about.beyond), ("cost", about.cost))
        print("\n".join([name, *(f"  {title:<11} {text}" for title, text in lines)]))
    return 0


def _documented(args: argparse.Namespace) -> Iterator[Path]:
    """Write what `encodings` is asked for, and name each file that is there."""
    from pe_ablation import atomic, cards, encodings, report

    _leave_accelerators()
    names = encodings.names() if args.only is None else (args.only,)
    for name in names:
        encodings.find(name)
    if args.docs is not None:
        file = Path(args.docs)
        if file.is_dir():
            raise ValueError(f"--docs: {file} is a folder; name a file, such as docs/encodings.md")
        report.folder(file.parent, "documentation", "--docs")
        atomic.write(file, [cards.markdown().encode()])
        yield file
    if args.plot is not None:
        folder = report.folder(args.plot, "pictures", "--plot")
        for name in names:
            picture = io.BytesIO()
            cards.picture(name, picture)
            file = folder / f"{name.rpartition(':')[2]}.png"
            atomic.write(file, [picture.getvalue()])
            yield file


def _checked(name: str) -> int:
    """Print every check of one encoding; 1 if one failed."""
    from pe_ablation import conformance

    failed = 0
    for result in conformance.battery(name):
        print(result, flush=True)
        failed += not result.ok
    print(f"{name}: {failed} failed" if failed else f"{name}: all kept")
    return 1 if failed else 0


def _transforms(args: argparse.Namespace) -> int:
    import dataclasses

    from pe_ablation import config, transforms

    if args.run is not None:
        return _print(_rotations(args))
    if args.length is not None or args.transforms is not None:
        raise config.ConfigError("--length, --transforms: go with --run RUN")

    def lines() -> Iterator[str]:
        yield "None: for a factor the length to be read over the training length, at least 1; else as said below"
        for name, each in transforms.REGISTRY.items():
            fields = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(each))
            yield f"\n{name}\n  fields      {fields}\n  {' '.join((each.__doc__ or '').split())}"

    return _print(lines())


def _rotations(args: argparse.Namespace) -> Iterator[str]:
    from pe_ablation import config, record, rotations

    runs = record.find(args.run)
    if len({run.config["point"] for run in runs}) > 1:
        raise config.ConfigError(f"--run: {args.run} holds {len(runs)} runs; name one, such as {runs[0].path}")
    experiment = runs[0].experiment
    length = experiment.eval.longest(experiment.train.length) if args.length is None else args.length
    if length < 1:
        raise config.ConfigError(f"--length: {length} is not a length; at least 1")
    asked = args.transforms.split(",") if args.transforms else rotations.USUAL
    yield rotations.to_markdown(experiment, length, asked)


def _print(lines: Any) -> int:
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # who read has gone, as in `launch --list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
