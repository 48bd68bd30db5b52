"""Speculative decoding: the same greedy answer from fewer runs of the model.

python docs/examples/speculate.py [BUNDLE [DRAFT]]
"""

import sys

import edge

PROMPT = "Once upon a time, there was a little"


def main(bundle: str = "demo-fp16", draft: str = "demo-draft") -> None:
    target, small = edge.load(bundle), edge.load(draft)
    sampling = {"max_tokens": 64, "temperature": 0}

    plain = target.session().generate(PROMPT, **sampling).finish()
    print(f"plain: {len(plain.tokens)} tokens, one run each\n{plain.text}\n")

    sessions = {
        "look-ups in the text itself": target.session(draft="ngram"),
        "chains of 3 from a small model": target.session(draft=small, draft_tokens=3),
        "a tree from a small model": target.session(draft=small, draft_tree=(2, 1, 1)),
    }
    for name, session in sessions.items():
        result = session.generate(PROMPT, **sampling).finish()
        speculation = result.speculation
        assert speculation is not None
        # Greedy drafting is lossless: only the number of runs changes.
        assert result.text == plain.text
        length = speculation.acceptance_length
        print(f"{name}: {f'{length:.2f} tokens a verifying run' if length else 'nothing drafted'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
