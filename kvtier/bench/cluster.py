"""A trace replayed against a running cluster, any OpenAI endpoint, or clusters started for it.

    kvtier bench cluster --trace FILE --url http://127.0.0.1:8000 [--url NAME=URL ...]
    kvtier bench cluster --trace FILE --policies cache_aware least_loaded

With `--url` an endpoint is an arm; without, each policy of the router gets a cluster of its own,
one after the other, with nothing in its caches. What must not live here: parsing, sending.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

from kvtier.bench.cluster_load import Endpoint, Replayed, find_model, replay
from kvtier.bench.cluster_trace import Replay, Shaping, read_replay
from kvtier.bench.report import Bar, Result
from kvtier.bench.router_cost import percentile
from kvtier.errors import ConfigError
from kvtier.local.cluster import running
from kvtier.local.settings import Cluster, merged, read_cluster

_URL_HELP: Final = "endpoint that runs, without /v1; again for another arm"
_SHARES: Final = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


@dataclass(frozen=True, slots=True)
class _Arm:
    """One row of figures: an endpoint that runs, or a cluster to be started."""

    name: str
    url: str = ""
    cluster: Cluster | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, help="required: Mooncake or Bailian JSON lines, or Azure's CSV")
    add("--url", action="append", default=[], metavar="[NAME=]URL", help=_URL_HELP)
    add("--policies", nargs="+", default=["cache_aware"], help="without --url: a cluster each")
    add("--cluster", type=Path, help="without --url: cluster file (default: two fake workers)")
    add("--model", default="", help="served name (default: the endpoint's first)")
    add("--api-key-file", type=Path, help="file with the API key")
    add("--requests", type=int, default=200, help="so many of the trace's first")
    add("--speed", type=float, default=1.0, help="trace seconds a second")
    add("--token-scale", type=int, default=1, help="tokens of the trace that one stands for")
    add("--prompt-max", type=int, default=1 << 20, help="longer prompts are cut")
    add("--output-max", type=int, default=1 << 20, help="longer answers are cut")
    add("--open-max", type=int, default=256, help="requests under way at once")


def run(arguments: argparse.Namespace) -> list[Result]:
    if arguments.trace is None:
        raise ConfigError("give --trace FILE")
    if arguments.open_max < 1:
        raise ConfigError("--open-max must be positive")
    wanted = read_replay(
        arguments.trace,
        Shaping(
            requests_max=arguments.requests,
            speed=arguments.speed,
            token_scale=arguments.token_scale,
            prompt_tokens_max=arguments.prompt_max,
            output_tokens_max=arguments.output_max,
        ),
    )
    sys.stderr.write(f"{wanted.note}: {len(wanted.asks)} requests\n")
    arms = _arms(arguments)
    results = [
        Result("requests", len(wanted.asks), "requests"),
        Result("prompt tokens of the replay", wanted.prompt_tokens, "tokens"),
        Result("hit rate of a cache without bounds", wanted.ideal_hit(), "ratio"),
    ]
    told = {arm.name: asyncio.run(_replayed(arm, wanted, arguments)) for arm in arms}
    return results + side_by_side({name: figures(name, done) for name, done in told.items()})


def _arms(arguments: argparse.Namespace) -> list[_Arm]:
    if not arguments.url:
        return [_Arm(name, cluster=_cluster(name, arguments)) for name in arguments.policies]
    if arguments.cluster is not None:
        raise ConfigError("give --url or --cluster, not both")
    arms = []
    for text in arguments.url:
        name, equals, url = text.partition("=")
        name, url = (name, url) if equals and "/" not in name else ("", text)
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {text}: want http://HOST:PORT")
        arms.append(_Arm(name or url, url))
    if len({arm.name for arm in arms}) < len(arms):
        raise ConfigError("give each --url a name of its own: --url NAME=URL")
    return arms


def _cluster(policy: str, arguments: argparse.Namespace) -> Cluster:
    flags = [] if arguments.cluster is None else ["--config", str(arguments.cluster)]
    cluster = read_cluster(flags, {"model": "fake", "bind": "127.0.0.1:0"})
    router = merged(cluster.sections["router"], {"policy": policy})
    return replace(cluster, sections={**cluster.sections, "router": router})


async def _replayed(arm: _Arm, wanted: Replay, arguments: argparse.Namespace) -> Replayed:
    key_file = arguments.api_key_file
    key = "" if key_file is None else key_file.read_text(encoding="utf-8").strip()
    if arm.cluster is None:
        model = arguments.model or await find_model(arm.url, key)
        return await replay(Endpoint(arm.url, model, key), wanted, arguments.open_max, arm.name)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", ignore_cleanup_errors=True) as made:
        config = replace(arm.cluster.config, data_dir=Path(made))
        cluster = replace(arm.cluster, loaded=replace(arm.cluster.loaded, config=config))
        async with running(cluster) as found:
            endpoint = Endpoint(found.plan.endpoint, arguments.model or found.models[0], key)
            return await replay(endpoint, wanted, arguments.open_max, arm.name)


def side_by_side(arms: Mapping[str, Sequence[Result]]) -> list[Result]:
    """The figures of all arms, each figure of one arm beside those of the others. Pure."""
    names = dict.fromkeys(result.name for results in arms.values() for result in results)
    return [
        replace(result, name=f"{name}: {arm}")
        for name in names
        for arm, results in arms.items()
        for result in results
        if result.name == name
    ]


def figures(arm: str, replayed: Replayed) -> list[Result]:
    """The figures of one arm; its only bar is that no request failed. Pure but for stderr."""
    well, failed = replayed.answered, replayed.errors
    if failed:
        sys.stderr.write(f"{arm}: first of {len(failed)} errors: {failed[0]}\n")
    prompt_tokens = sum(one.prompt_tokens for one in well)
    took_s = max(replayed.took_s, 1e-9)
    results = [Result("errors", len(failed), "requests", 0, Bar.AT_MOST)]
    results += _percentiles("TTFT", [one.ttft_s for one in well])
    gaps = list(chain.from_iterable(one.gaps_s for one in well))
    results += _percentiles("time between pieces", gaps)
    results += _percentiles("whole answer", [one.total_s for one in well])
    rates = (
        ("requests", len(well), "requests/s"),
        ("prompt tokens", prompt_tokens, "tokens/s"),
        ("output tokens", sum(one.output_tokens for one in well), "tokens/s"),
    )
    results += [Result(name, count / took_s, unit) for name, count, unit in rates]
    cached = sum(one.cached_tokens for one in well)
    results.append(Result("hit rate", cached / max(1, prompt_tokens), "ratio"))
    for tier in dict.fromkeys(chain.from_iterable(one.by_tier for one in well)):
        found = sum(one.by_tier.get(tier, 0) for one in well)
        results.append(Result(f"hit rate, {tier}", found / max(1, prompt_tokens), "ratio"))
    late = percentile([one.late_s for one in replayed.outcomes], 0.99)
    return [*results, Result("sent too late, p99", late, "s")]


def _percentiles(name: str, values: Sequence[float]) -> list[Result]:
    """Nothing where nothing was measured: no figure is better than a zero."""
    if not values:
        return []
    return [Result(f"{name}, {word}", percentile(values, share), "s") for share, word in _SHARES]
