"""What every figure means; printed with the report, and in the page and the JSON object."""

from __future__ import annotations

DEFINITIONS = {
    "TTFT": "time to first token: from the request, token ids at hand, until the first token is "
    "sampled; mean over repetitions",
    "TPOT": "time per output token after the first: (TTLT - TTFT) / (n - 1); mean over repetitions",
    "ITL": "inter-token latency: every gap between two tokens, all repetitions together; "
    "percentiles interpolated linearly",
    "TTLT": "time to last token: from the request until the last token is sampled; mean",
    "prefill": "prompt tokens a second until the prompt is consumed, before the first token is "
    "sampled; mean ± sample standard deviation over repetitions",
    "decode": "tokens a second after the first, 1 / TPOT; mean ± sample standard deviation",
    "context": "one step and one choice of a token after so many tokens were read",
    "peak memory": "most bytes resident at once since before the bundle was loaded (VmHWM), the "
    "program's own included; anonymous and file-backed apart as they were after the longest prompt",
    "state": "one recurrent state, whatever the length of the text; KV caches apart",
    "ratio": "this ÷ the other, above 1 takes longer: geometric mean of the ratios within each "
    "repetition, with a 95 % interval by Student's t on their logarithms",
    "breakdown": "the engine's own profiler, the quickest of several runs; it slows a run down, so "
    "shares count, not sums",
    "roofline": "bytes of the weights read once and of the state read and written, ÷ the best "
    "bandwidth measured here by reading or copying a buffer far larger than the cache",
    "drafting": "answers to real prompts with drafts and without, in turn; tokens after the first, "
    "so that reading the prompt counts only where the drafter does it; acceptance length: tokens a "
    "verifying run yields, the target's own one included",
    "energy": "rails read every 50 ms, counters where there are any; tokens per joule over decode, "
    "with what the machine draws anyway included",
}

INSIDE = {
    "tokenization": False,
    "sampling": True,
    "detokenization": False,
    "prompt": "random token ids, seed 0; an end token ends nothing",
}


def inside(temperature: float) -> str:
    """One line on what the times include."""
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return (
        f"sampling ({how}) is inside the times; tokenization and detokenization are not; "
        "prompts are random token ids, and an end token ends nothing"
    )
