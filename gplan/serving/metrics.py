"""What Prometheus reads at `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from formats.plan import PhasePlan, Plan
from gplan.scheduling.times import interpolate
from gplan.serving.drift_watch import DriftWatch
from gplan.serving.protocol import LedgerActual, StepStats

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters of one server. Padding in seconds is read off the plan's times: a replay of the bucket over one of the
    batch's exact size.

    Args:
        path: of the plan's file.
        debug_graphs: what the plan says to replay runs eagerly, and is counted as `debug`.
    """

    def __init__(self, plan: Plan, *, path: str = "PLAN", debug_graphs: bool = False) -> None:
        self._replayed = "debug" if debug_graphs else "replayed"
        self._graph_us: dict[str, Mapping[int, float]] = {
            phase.phase: _graph_times(phase) for phase in (plan.decode, plan.prefill)
        }
        self.registry = registry = CollectorRegistry()
        self.prompt_tokens = Counter("gplan_prompt_tokens", "Prompt tokens computed.", registry=registry)
        self.output_tokens = Counter("gplan_output_tokens", "Tokens generated.", registry=registry)
        self.requests = Counter("gplan_requests", "Requests answered.", ["endpoint", "status"], registry=registry)
        self.waiting = Gauge("gplan_requests_waiting", "Requests that wait for a row.", registry=registry)
        self.running = Gauge("gplan_requests_running", "Requests that hold a row.", registry=registry)
        self.pages = Gauge("gplan_kv_pages_used", "Pages that requests hold.", registry=registry)
        self.page_limit = Gauge("gplan_kv_pages", "Pages of the KV pool, without the dummy page.", registry=registry)
        self.preemptions = Counter("gplan_preemptions", "Requests that gave their pages back.", registry=registry)
        self.prefix_lookups = Counter(
            "gplan_prefix_lookups", "Requests whose beginning was looked up in the prefix cache.", registry=registry
        )
        self.prefix_hits = Counter("gplan_prefix_hits", "Of these, those that found cached pages.", registry=registry)
        self.prefix_hit_tokens = Counter(
            "gplan_prefix_hit_tokens", "Tokens that were cached and not computed.", registry=registry
        )
        self.pages_evicted = Counter(
            "gplan_kv_pages_evicted", "Cached pages that were forgotten to make room.", registry=registry
        )
        self.pages_cached = Gauge(
            "gplan_kv_pages_cached", "Pages that no request holds and another could begin with.", registry=registry
        )
        self._known: dict[Counter, int] = {}
        self.ttft = Histogram("gplan_ttft_seconds", "From request to first token.", buckets=_LATENCY, registry=registry)
        self.inter_token = Histogram(
            "gplan_inter_token_seconds", "Between tokens of an answer.", buckets=_TOKEN, registry=registry
        )
        self.latency = Histogram(
            "gplan_e2e_seconds", "From request to last token.", buckets=_LATENCY, registry=registry
        )
        self.step_seconds = Histogram(
            "gplan_step_seconds", "From launch to tokens, per step.", ["phase"], buckets=_TOKEN, registry=registry
        )
        self.steps = Counter(
            "gplan_steps",
            "Steps by outcome: replayed from a bucket, or eager for a reason.",
            ["phase", "outcome", "bucket", "variant", "reason"],
            registry=registry,
        )
        self.padding_rows = Counter(
            "gplan_padding_rows", "Rows of buckets beyond batches.", ["phase"], registry=registry
        )
        self.padding_seconds = Counter(
            "gplan_padding_seconds", "Time that padding rows took, by the plan's times.", ["phase"], registry=registry
        )
        self.page_limit.set(plan.num_kv_pages - 1)
        self.drift = DriftWatch(plan, registry, path=path, times_replays=not debug_graphs)

    def on_step(self, step: StepStats) -> None:
        self.drift.on_step(step)
        self.prompt_tokens.inc(step.prompt_tokens)
        self.output_tokens.inc(step.output_tokens)
        self.waiting.set(step.num_waiting)
        self.running.set(step.num_running)
        self.pages.set(step.pages_used)
        self.pages_cached.set(step.pages_cached)
        self._raise_to(self.preemptions, step.preemptions)
        self._raise_to(self.prefix_lookups, step.prefix_lookups)
        self._raise_to(self.prefix_hits, step.prefix_hits)
        self._raise_to(self.prefix_hit_tokens, step.prefix_hit_tokens)
        self._raise_to(self.pages_evicted, step.pages_evicted)
        self.step_seconds.labels(step.phase).observe(step.elapsed_s)
        if not step.key:
            self.steps.labels(step.phase, "eager", "", "", step.reason).inc()
            return
        bucket = step.size + step.padding_rows
        self.steps.labels(step.phase, self._replayed, str(bucket), _variant(step.key), "").inc()
        self.padding_rows.labels(step.phase).inc(step.padding_rows)
        self.padding_seconds.labels(step.phase).inc(self._padding_s(step.phase, step.size, bucket))

    def on_first_token(self, seconds: float) -> None:
        self.ttft.observe(seconds)

    def on_next_token(self, seconds: float) -> None:
        self.inter_token.observe(seconds)

    def on_last_token(self, seconds: float) -> None:
        self.latency.observe(seconds)

    def on_idle(self, pages_used: int, pages_cached: int) -> None:
        self.waiting.set(0)
        self.running.set(0)
        self.pages.set(pages_used)
        self.pages_cached.set(pages_cached)

    def on_ledger(self, rows: Sequence[LedgerActual], overrun: Sequence[str]) -> None:
        self.drift.on_ledger(rows, overrun)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _raise_to(self, counter: Counter, total: int) -> None:
        """Brings a counter to what the engine counted since it started."""
        known = self._known.get(counter, 0)
        if total != known:
            counter.inc(total - known)
            self._known[counter] = total

    def _padding_s(self, phase: str, size: int, bucket: int) -> float:
        times = self._graph_us[phase]
        return max(0.0, interpolate(times, bucket) - interpolate(times, size)) / 1e6 if times else 0.0


def _graph_times(phase: PhasePlan) -> Mapping[int, float]:
    return {bucket.size: bucket.graph.median_us for bucket in phase.base_ladder if bucket.graph is not None}


def _variant(key: str) -> str:
    """`greedy` of `decode:4:greedy`."""
    return key.split(":")[2] if key.count(":") == 2 else ""
