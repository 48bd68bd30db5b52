"""Run one measurement, from bundles to everything the report needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge.apps import options
from edge.apps.measure import cpu_profile, ort_profile
from edge.apps.measure.machine import Conditions, OtherLoad, conditions
from edge.apps.measure.memory import Usage, release
from edge.apps.measure.power import Meter, NvmlGpu, PowerLog, PowerSource, Rails, Rapl
from edge.apps.measure.roofline import Roof, device_roof, measure_roof
from edge.apps.measure.run_cost import DECODE, PREFILL, RunCost
from edge.apps.measure.stopwatch import Say, silent, without_collections
from edge.apps.profile import drafts
from edge.apps.profile.answers import AnswerPlan, Depth, Sample, answers, depths
from edge.apps.progress import load
from edge.bundle import open_bundle
from edge.bundle.manifest import Manifest
from edge.cpu import usable_cores
from edge.errors import InputError
from edge.runtime.context import Context, ContextMark, Logits
from edge.runtime.cuda.opening import open_device
from edge.runtime.engines import ENGINES, has_providers, on_cpu
from edge.runtime.model import Model, resolve
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler
from edge.tensors import parameters

DEFAULT_PROMPT = 512
DEFAULT_DEPTHS = (128, 512, 1024, 2048, 4096)
STEPS = 16
THIS, OTHER = "this", "other"


@dataclass(frozen=True)
class ProfileRequest:
    """Options of a measurement as given on the command line; see `edge profile --help`."""

    bundle: str
    against: str | None = None
    engine: str = "auto"
    provider: str | None = None
    threads: int | None = None
    spin: bool = False
    pin: bool = False
    prompts: tuple[int, ...] | None = None
    generated: int = 128
    repetitions: int = 5
    warmup: int = 1
    contexts: tuple[int, ...] | None = None
    temperature: float = 0.0
    explain: bool = True
    draft: drafts.DraftRequest | None = None

    @property
    def sides(self) -> dict[str, tuple[str, str]]:
        """Bundle and engine of each side. `--against` names another bundle or engine."""
        if self.against is None:
            return {THIS: (self.bundle, self.engine)}
        if self.against in ENGINES[1:]:
            other = (self.bundle, self.against)
        else:
            other = (self.against, self.engine)
        return {THIS: (self.bundle, self.engine), OTHER: other}

    def provider_on(self, engine: str) -> str | None:
        """Return the requested provider if `engine` has providers, else None."""
        return self.provider if has_providers(engine) else None

    def check(self) -> None:
        """Check engines and providers before anything is loaded: see `options.check_engine`."""
        engines = [engine for _, engine in self.sides.values()]
        for engine in engines:
            options.check_engine(engine, self.provider_on(engine))
        if not any(map(has_providers, engines)):
            options.check_engine(self.engine, self.provider)


class Subject:
    """A bundle under measurement: a `Runner` that works like a session.

    Attributes:
        memory: resident bytes before loading, after loading, and after the longest prompt.
    """

    def __init__(self, request: ProfileRequest, bundle: str, engine: str) -> None:
        """Load the bundle. Raises BundleError, EngineError, TokenizerError."""
        self.memory = Usage()
        # the runtime's default would give a small and a large model different thread counts
        shared_threads = usable_cores() if request.against is not None else None
        self.model: Model = load(
            bundle, engine=engine, threads=request.threads or shared_threads, spin=request.spin,
            pin=request.pin, provider=request.provider_on(engine),
        )  # fmt: skip
        self.memory.loaded()
        self.threads = getattr(self.model.engine, "threads", request.threads)
        self.spin, self.pin = request.spin, request.pin
        self._sampler = Sampler(SamplingParams(temperature=request.temperature, seed=0))
        self._vocab = self.model.tokenizer.vocab_size
        self._logits: Logits | None = None

    def prepare(self, capacity: int, prompt: Sequence[int]) -> None:
        """Allocate a sequence of `capacity` tokens, and touch all memory that a prompt needs."""
        engine = self.model.engine
        self._capacity = capacity if self.model.config.has_attention else None
        self._context = Context(engine, engine.new_state(capacity=self._capacity))
        self.feed(prompt)
        self.step(self.sample())
        self.memory.used()

    def clear(self) -> None:
        self._context.clear()

    def feed(self, tokens: Sequence[int]) -> None:
        self._logits = self._context.feed(tokens, lambda: False)

    def step(self, token: int) -> None:
        self._logits = self._context.step(token)

    def sample(self) -> int:
        assert self._logits is not None
        return self._sampler(self._logits[: self._vocab])

    def mark(self) -> ContextMark:
        return self._context.mark()

    def restore(self, mark: ContextMark) -> None:
        self._context.restore(mark)

    def facts(self) -> dict[str, Any]:
        """Return the identity of bundle and engine, and the memory they use."""
        model = self.model
        plan = model.engine.memory_plan(capacity=self._capacity)
        weights = model.manifest.entry("weights.bin")
        return {
            "bundle": str(model.path),
            "fingerprint": model.fingerprint,
            "family": model.config.family,
            "quantization": model.manifest.quantization.recipe,
            "parameters": parameters(model.config),
            "weight_bytes": weights.size if weights else 0,
            "engine": model.engine.name,
            "provider": model.engine.provider,
            "threads": self.threads,
            "spin": self.spin,
            "pin": self.pin,
            "chunk": model.engine.chunk,
            "state_bytes": plan["state"],
            "kv_cache_bytes": plan["kv_cache"],
            "kv_cache_tokens": self._capacity,
            "memory_plan": plan,
        }


@dataclass
class ProfileSide:
    """Measurements of one bundle on one engine.

    Attributes:
        facts: identity and memory, see `Subject.facts`.
        samples: samples by prompt length and repetition.
        costs: breakdown of a step and of a prefill by the engine's profiler; empty if turned off.
    """

    facts: dict[str, Any]
    subject: Subject | None
    samples: list[list[Sample]] = field(default_factory=list)
    depths: list[Depth] = field(default_factory=list)
    costs: Mapping[str, RunCost] = field(default_factory=dict)


@dataclass
class ProfileResult:
    """Everything that was measured.

    Attributes:
        others: share of the CPU used by other programs.
        roofs: roofs by memory, see `memory_of`; empty if turned off.
        notes: remarks for the reader.
    """

    request: ProfileRequest
    plan: AnswerPlan
    sides: dict[str, ProfileSide]
    before: Conditions
    after: Conditions
    others: float
    logs: list[tuple[PowerSource, PowerLog]]
    gpu: NvmlGpu | None
    roofs: Mapping[str, Roof]
    notes: list[str]
    drafted: drafts.Drafted | None = None


def profile(request: ProfileRequest, say: Say = silent) -> ProfileResult:
    """Measure. Raises InputError for lengths that do not fit a model, and what loading raises."""
    request.check()
    plan, notes = make_plan(request)
    longest = max((*plan.prompts, plan.context), key=len)
    sides: dict[str, ProfileSide] = {}
    for name, (bundle, engine) in request.sides.items():
        say(f"loading {bundle}")
        sides[name] = _load_side(request, bundle, engine, plan, longest, sides.get(THIS))
    runners = {name: side.subject for name, side in sides.items() if side.subject}
    measure_drafting = _prepare_drafting(request, sides[THIS], notes)
    others, before = OtherLoad(), conditions()
    gpu = NvmlGpu.find()
    with ExitStack() as stack:
        meters = [stack.enter_context(Meter(source)) for source in _power_sources(sides, gpu)]
        stack.enter_context(without_collections())
        samples = answers(runners, plan, time.perf_counter, say)
        depth_times = depths(runners, plan, time.perf_counter, say)
        drafted = measure_drafting(plan.repetitions, plan.warmup, say) if measure_drafting else None
    share, after = others.share(), conditions()
    for name, side in sides.items():
        side.samples, side.depths = samples[name], depth_times[name]
        side.subject = None  # free its memory before the profiler loads the graph again
    del runners, measure_drafting
    release()
    roofs: dict[str, Roof] = {}
    if request.explain:
        _add_breakdowns(request, sides, say)
        say("measuring memory bandwidth")
        roofs = roofs_of(request, [memory_of(side.facts) for side in sides.values()])
    logs = [(meter.source, meter.log) for meter in meters]
    return ProfileResult(
        request, plan, sides, before, after, share, logs, gpu, roofs, notes, drafted
    )


def memory_of(facts: Mapping[str, Any]) -> str | None:
    """Return the memory that a side reads its weights from: "cpu", "gpu" or None if unknown."""
    if on_cpu(facts["engine"], facts.get("provider")):
        return "cpu"
    return None if facts["engine"] == "ort" else "gpu"


def roofs_of(request: ProfileRequest, memories: Sequence[str | None]) -> dict[str, Roof]:
    """Measure the roof of each memory in use."""
    roofs = {}
    if "gpu" in memories:
        roofs["gpu"] = device_roof(open_device())
    if "cpu" in memories:
        cores = usable_cores()
        threads = request.threads or cores
        roofs["cpu"] = measure_roof(threads, arithmetic=threads == cores)
    return roofs


def make_plan(request: ProfileRequest) -> tuple[AnswerPlan, list[str]]:
    """Choose lengths that fit every model. Return notes on lengths left out. Raises InputError."""
    manifests = [_manifest(bundle) for bundle in {bundle for bundle, _ in request.sides.values()}]
    limits = [m.model.max_context for m in manifests if m.model.has_attention]
    limit, notes = min((n for n in limits if n is not None), default=None), []
    lengths = request.prompts
    if lengths is None:
        room = DEFAULT_PROMPT if limit is None else limit - request.generated
        lengths = (max(1, min(DEFAULT_PROMPT, room)),)
        if lengths[0] < DEFAULT_PROMPT:
            notes.append(f"prompt of {lengths[0]} tokens: the attention was made for {limit}")
    _check_room(lengths, request.generated, limit, "-p")
    requested = DEFAULT_DEPTHS if request.contexts is None else sorted(request.contexts)
    fitting = tuple(d for d in requested if limit is None or d + STEPS + 1 <= limit)
    if request.contexts is not None:
        _check_room(requested, STEPS + 1, limit, "--context")
    elif len(fitting) < len(requested):
        notes.append(f"contexts up to {max(fitting, default=0)}: attention ends at {limit} tokens")
    # ids that every vocabulary has: the cost of a token does not depend on its id
    smallest = min(m.tokenizer.vocab_size for m in manifests)
    ids = np.random.default_rng(0).integers(0, smallest, max((*lengths, *fitting)))
    tokens = tuple(ids.tolist())
    return AnswerPlan(
        prompts=tuple(tokens[:length] for length in lengths),
        generated=request.generated,
        repetitions=request.repetitions,
        warmup=request.warmup,
        context=tokens[: max(fitting, default=0)],
        depths=fitting,
        steps=STEPS,
    ), notes


def _manifest(bundle: str) -> Manifest:
    with open_bundle(resolve(bundle)) as opened:
        return opened.manifest


def _check_room(lengths: Sequence[int], extra: int, limit: int | None, option: str) -> None:
    for length in lengths:
        if limit is not None and length + extra > limit:
            bound = f"at most {limit - extra}" if limit > extra else f"fewer than {limit} with -n"
            raise InputError(
                f"{length} tokens and {extra} after them do not fit into a context of {limit}",
                field=option,
                remedy=f"{bound}; models without attention have no such limit",
            )


def _load_side(
    request: ProfileRequest,
    bundle: str,
    engine: str,
    plan: AnswerPlan,
    longest: Sequence[int],
    first: ProfileSide | None,
) -> ProfileSide:
    subject = Subject(request, bundle, engine)
    longest_answer = max((len(prompt) + plan.generated for prompt in plan.prompts), default=0)
    subject.prepare(max(longest_answer, len(plan.context) + STEPS + 1), longest)
    program = first.subject.memory.program if first and first.subject else None
    memory = subject.memory.to_dict(program)
    peak = memory["peak"] if memory else None
    return ProfileSide(subject.facts() | {"peak_memory_bytes": peak, "memory": memory}, subject)


def _prepare_drafting(
    request: ProfileRequest, side: ProfileSide, notes: list[str]
) -> Callable[[int, int, Say], drafts.Drafted] | None:
    """Return the function that measures drafting, or None. Its memory is allocated up front."""
    if request.draft is None or side.subject is None:
        return None
    running = options.RunOptions(
        engine=request.engine, provider=request.provider, threads=request.threads,
        spin=request.spin, pin=request.pin,
    )  # fmt: skip
    drafter = running.load_drafter(request.draft.draft)
    if drafter is None:
        return None
    sampling = {"temperature": request.temperature, "max_tokens": request.generated, "seed": 0}
    model = side.subject.model
    if note := options.self_drafting_note(model, drafter):
        notes.append(note.removeprefix("note: "))
    with options.named_as_options():
        return drafts.compare(model, drafter, request.draft, sampling)


def _power_sources(sides: Mapping[str, ProfileSide], gpu: NvmlGpu | None) -> list[PowerSource]:
    """Return the power sources of this machine, a GPU only if something runs on it."""
    sources: list[PowerSource | None] = [Rails.find(), Rapl.find()]
    if any(memory_of(side.facts) != "cpu" for side in sides.values()):
        sources.append(gpu)
    return [source for source in sources if source is not None]


def _add_breakdowns(request: ProfileRequest, sides: Mapping[str, ProfileSide], say: Say) -> None:
    kinds = {"decode": DECODE, "prefill": PREFILL}
    for name, (bundle, _) in request.sides.items():
        side = sides[name]
        # on a GPU, ONNX Runtime's profiler times only the launches of kernels
        if not on_cpu(side.facts["engine"], side.facts["provider"]):
            continue
        say(f"profiling {bundle}")
        if side.facts["engine"] == "cpu":
            side.costs = cpu_profile.breakdown(
                resolve(bundle), request.threads, kinds, pin=request.pin
            )
        else:
            side.costs = ort_profile.breakdown(
                resolve(bundle), request.threads, kinds, spin=request.spin
            )
